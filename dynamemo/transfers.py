"""Move values between the device and the tiers, ahead of need where need is foreseen.

Covers tickets of storages: the copy out, made early or under pressure, prefetched values that wait
for their reader, what the copies take, and giving tickets back. Decides nothing about what should
move (`MemoryManager`, `Foresight`).

Invariants kept here (numbers of the design's list):
  2. A prefetch asks for memory only where it is free or free for nothing, and keeps it only where
     it can be spared; nothing is allocated for a copy but its target.
  3. A block that a copy reads or writes goes to somebody else only behind the copy's end: the
     compute stream is held there, the host is not.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from dynamemo.allocator import DONE, CopyTime, Mark, Pool, SpillError, Ticket, TierStack
from dynamemo.counters import Counters
from dynamemo.device import Device
from dynamemo.graph import Link
from dynamemo.storage import Array, Arrival, Storage

#: A copy back is never thought to be free.
_LEAST_EXPOSURE = 0.1
#: How fast the estimate of what is waited for follows.
_EXPOSURE_RATE = 0.1

#: Bytes of the copies that the link is measured with.
_PROBE_BYTES = 32 << 20


@dataclass(frozen=True, slots=True)
class LinkFigures:
    """What the link between a device and its host tier can do, as measured."""

    out_bytes_per_s: float
    in_bytes_per_s: float
    #: The sum of both directions when they run at once.
    both_bytes_per_s: float
    #: Seconds of a copy of one byte.
    latency_s: float


#: What was measured in this process, by the device's name.
_figures: dict[str, LinkFigures] = {}


def _rate(copy: CopyTime) -> float:
    return copy.nbytes / copy.elapsed_s


class Timeline:
    """Where the device will be when it comes to what it is given now, in its own seconds.

    The host runs ahead of a GPU: what has not ended yet may well have ended by then. So the work
    that was given is added up at its measured cost, and each direction of the link is a queue
    beside it.
    """

    __slots__ = ("in_free_s", "now_s", "out_free_s")

    def __init__(self) -> None:
        #: Seconds of the work given so far.
        self.now_s = 0.0
        #: When the copies out, and in, that were begun so far have ended.
        self.out_free_s = self.in_free_s = 0.0

    def begin_out(self, elapsed_s: float) -> float:
        """Note a copy out of so many seconds; return when it ends."""
        self.out_free_s = max(self.now_s, self.out_free_s) + elapsed_s
        return self.out_free_s

    def begin_in(self, elapsed_s: float, *, after_s: float = 0.0) -> float:
        """Note a copy in of so many seconds, behind a moment; return when it ends."""
        self.in_free_s = max(self.now_s, self.in_free_s, after_s) + elapsed_s
        return self.in_free_s

    def end_out(self) -> None:
        """Note that all copies out were seen to have ended: what was added up is behind now."""
        self.out_free_s = min(self.out_free_s, self.now_s)

    def end_in(self) -> None:
        """Note that all copies in were seen to have ended."""
        self.in_free_s = min(self.in_free_s, self.now_s)

    def wait(self, moment_s: float) -> bool:
        """Let the device wait for a moment; tell whether it has to."""
        if moment_s <= self.now_s:
            return False
        self.now_s = moment_s
        return True


class Transfers:
    """The copies of one device.

    Parameters
    ----------
    device : Device
        Where the arrays are.
    pool : Pool
        Where their memory comes from.
    tiers : TierStack
        Where copies go.
    counters : Counters
        What is counted.
    """

    def __init__(self, device: Device, pool: Pool, tiers: TierStack, counters: Counters) -> None:
        #: Seconds of copies out and in, as measured.
        self.outward = Link()
        self.inward = Link()
        #: Where the device is, and what its link is busy with.
        self.timeline = Timeline()
        #: Why a tier last refused, for the error message.
        self.refusal: str | None = None
        self._device = device
        self._pool = pool
        self._tiers = tiers
        self._counters = counters
        #: Grows whenever a tier may have room again.
        self._revision = 0
        self._exposure = 1.0
        #: The ends of the newest copies out and in.
        self._last_out = self._last_in = DONE
        #: Prefetches whose copy may not have ended. They keep the target from here: where its
        #: storage dies meanwhile, the memory must not go to somebody else yet.
        self._coming: deque[tuple[Mark, list[Array]]] = deque()

    # -- the link ----------------------------------------------------------------------------

    def measure(self) -> LinkFigures | None:
        """Measure the link with values that go to the first tier and back; remember it.

        Each direction alone, then both at once. Waits for the device. Done once in a process for
        each device; later ones take what was found. None where there is no such tier, or no room.
        """
        name = self._device.name
        found = _figures.get(name)
        if self._device.has_host_tier and found is None:
            found = self._measure()
            if found is not None and self._pool.capacity_bytes >= 8 * _PROBE_BYTES:
                _figures[name] = found  # with less room the probe is too short to speak for all
        if found is not None:
            self.outward = Link(bytes_per_s=found.out_bytes_per_s, latency_s=found.latency_s)
            self.inward = Link(bytes_per_s=found.in_bytes_per_s, latency_s=found.latency_s)
        return found

    def _measure(self) -> LinkFigures | None:
        nbytes = min(_PROBE_BYTES, self._pool.capacity_bytes // 8)
        block = self._pool.allocate(nbytes)
        tickets = [self._tiers.store(block.address, length) for length in (nbytes, nbytes, 1)]
        try:
            if any(ticket is None for ticket in tickets):
                return None
            whole, other, tiny = [ticket for ticket in tickets if ticket is not None]
            alone = self._times_of([whole.written, other.written, tiny.written])
            back = self._times_of(
                [self._tiers.load(t, block.address) for t in (whole, other, tiny)]
            )
            both = self._tiers.store(block.address, nbytes)
            if both is None:
                return None
            tickets.append(both)
            together = self._times_of([self._tiers.load(whole, block.address), both.written])
        finally:
            for ticket in tickets:
                if ticket is not None:
                    ticket.last.wait()
                    self._tiers.discard(ticket)
            self._pool.free(block)
            self._pool.coalesce()  # what comes next, and may stay long, lies at the very end
        if not (alone and back and together):
            return None
        return LinkFigures(
            out_bytes_per_s=max(_rate(copy) for copy in alone),
            in_bytes_per_s=max(_rate(copy) for copy in back),
            both_bytes_per_s=sum(_rate(copy) for copy in together),
            latency_s=min(copy.elapsed_s for copy in (*alone, *back)),
        )

    def _times_of(self, marks: list[Mark]) -> list[CopyTime]:
        for mark in marks:
            mark.wait()
        return self._tiers.times()

    # -- out ---------------------------------------------------------------------------------

    def can_copy_out(self, storage: Storage) -> bool:
        """Tell whether a tier may have room for the storage."""
        if storage.ticket is not None:
            return True
        return storage.ticket_refused_at != self._revision

    def seconds_out(self, storage: Storage) -> float:
        """Estimate how long the device would wait for the storage's block, if it gave it up now."""
        if not self.can_copy_out(storage):
            return math.inf
        timeline = self.timeline
        if storage.ticket is None:
            waiting_s = max(0.0, timeline.out_free_s - timeline.now_s)
            return waiting_s + self.outward.seconds(storage.nbytes)
        if storage.ticket.written.is_done:
            return 0.0
        return max(0.0, storage.copied_s - timeline.now_s)

    def copy_out(self, storage: Storage) -> bool:
        """Begin to copy a resident storage out; False where no tier takes it. It stays resident."""
        if storage.ticket is not None:
            return True
        block = storage.block
        if block is None:
            return False
        started = time.perf_counter()
        try:
            ticket = self._tiers.store(block.address, storage.nbytes)
        except SpillError as error:
            self.refusal, ticket = str(error), None
        if ticket is None:
            storage.ticket_refused_at = self._revision
            return False
        if ticket.written is DONE:  # the host has just done it itself
            self.outward.observe(storage.nbytes, time.perf_counter() - started)
        storage.ticket = ticket
        self._last_out = ticket.written
        storage.copied_s = self.timeline.begin_out(self.outward.seconds(storage.nbytes))
        self._counters.offloaded_bytes += storage.nbytes
        self.observe()
        return True

    def copy_out_aside(self, storage: Storage) -> bool:
        """Begin to copy out what hardly anybody will read, only to have its block soon.

        False where the copy would hold up the host, or leave less than half of the first tier to
        values that are needed.
        """
        if not self._device.has_host_tier or not self._tiers.tiers:
            return False
        tier = self._tiers.tiers[0]
        limit_bytes = tier.limit_bytes
        if limit_bytes is not None and 2 * (tier.used_bytes + storage.nbytes) > limit_bytes:
            return False
        return self.copy_out(storage)

    def let_go(self, storage: Storage) -> bool:
        """Hold the device until a storage is copied out, so that its block can be given up.

        False where the copy failed; the storage is as it was, without a ticket.
        """
        ticket = storage.ticket
        if ticket is None:
            return False
        if not ticket.written.is_done and self.timeline.wait(storage.copied_s):
            self._counters.stalled_bytes += storage.nbytes
        try:
            ticket.last.hold_compute()
        except SpillError as error:
            self.refusal = str(error)
            storage.ticket_refused_at = self._revision
            self.forsake(storage)
            return False
        return True

    # -- in ----------------------------------------------------------------------------------

    def prefetch(
        self,
        storage: Storage,
        make_room: Callable[[int], bool],
        leaves_room: Callable[[], bool],
    ) -> bool:
        """Begin to bring a storage back into memory that is free, before anybody reads it.

        Parameters
        ----------
        storage : Storage
            Away, with a ticket.
        make_room : callable
            Frees so many bytes in one piece at no cost, or returns False.
        leaves_room : callable
            Tells, once the memory is taken, whether it can be spared.

        Raises
        ------
        MemoryError
            If the room that there is cannot be had; nothing changed.
        """
        ticket = storage.ticket
        if ticket is None or storage.arrival is not None:
            return False
        with self._pool.lock:
            if not make_room(storage.nbytes):
                return False
            memory = self._allocate(storage)
            if not leaves_room():
                self._pool.note_moved_out(storage.nbytes)
                return False
            storage.arrival = arrival = self._begin(storage, ticket, memory)
            self._coming.append((arrival.mark, arrival.arrays))
        self._counters.prefetched_bytes += storage.nbytes
        return True

    def seconds_in(self, storage: Storage) -> float:
        """Estimate how long the device will wait for a storage to come back.

        The copy's seconds, by the part of the last copies that were not there in time.
        """
        return self.inward.seconds(storage.nbytes) * max(_LEAST_EXPOSURE, self._exposure)

    def fetch(self, storage: Storage, ticket: Ticket) -> list[Array]:
        """Bring a storage back; what the device is given from now on may read the arrays.

        Raises
        ------
        OutOfMemoryError
            If there is no room; nothing changed.
        SpillError
            If the medium failed. The ticket stays.
        """
        arrival = storage.arrival
        started = time.perf_counter()
        if arrival is None:
            arrival = self._begin(storage, ticket, self._allocate(storage))
            self._counters.late_bytes += storage.nbytes
            self.timeline.wait(arrival.ends_s)
            was_waited_for = True
        else:
            was_waited_for = not arrival.mark.is_done and self.timeline.wait(arrival.ends_s)
            self._counters.awaited_bytes += storage.nbytes * was_waited_for
        is_at_once = arrival.mark is DONE
        try:
            arrival.mark.hold_compute()
        except SpillError:
            storage.arrival = arrival
            self.cancel(storage)
            raise
        self._take_from_coming(storage)
        if is_at_once:
            self.inward.observe(storage.nbytes, time.perf_counter() - started)
        self._counters.fetched_bytes += storage.nbytes
        self._exposure += _EXPOSURE_RATE * (was_waited_for - self._exposure)
        self.observe()
        return arrival.arrays

    def _allocate(self, storage: Storage) -> Array:
        """Take memory for what comes back.

        The pool is told before, so that no meter takes it for somebody's growth.
        """
        self._pool.note_moved_out(-storage.nbytes)
        try:
            return self._device.allocate(storage.nbytes)
        except BaseException:
            self._pool.note_moved_out(storage.nbytes)
            raise

    def _begin(self, storage: Storage, ticket: Ticket, memory: Array) -> Arrival:
        device = self._device
        arrays = [device.array_in(memory, view) for view in storage.views]
        block = device.block_of(arrays[0])
        try:
            mark = self._tiers.load(ticket, device.address_of(memory))
        except BaseException:  # an interrupt: the target must not go before the copy has ended
            device.copier.finish()
            self._tiers.finish()
            self._pool.note_moved_out(storage.nbytes)
            raise
        if block is not None and block.pool is not self._pool:
            block = None
        block_bytes = 0 if block is None else block.block_bytes
        self._pool.note_moved_out(storage.nbytes - block_bytes)
        self._last_in = mark
        seconds = self.inward.seconds(storage.nbytes)
        ends_s = self.timeline.begin_in(seconds, after_s=storage.copied_s)
        return Arrival(arrays, block, mark, ends_s)

    def _take_from_coming(self, storage: Storage) -> None:
        arrival, storage.arrival = storage.arrival, None
        if arrival is not None:
            kept = [item for item in self._coming if item[1] is not arrival.arrays]
            self._coming = deque(kept)

    def cancel(self, storage: Storage) -> bool:
        """Give up the memory of a prefetched storage, which stays in its tier."""
        arrival = storage.arrival
        if arrival is None:
            return True
        try:
            arrival.mark.hold_compute()
        except SpillError as error:  # its reader will be told
            self.refusal = str(error)
        self._take_from_coming(storage)
        if arrival.block is not None:
            self._pool.note_moved_out(arrival.block.block_bytes)
        arrival.arrays.clear()
        self._pool.settle()
        self._counters.cancelled_bytes += storage.nbytes
        return True

    def seconds_coming(self, storage: Storage) -> float:
        """Estimate how long the device would wait for the end of a prefetch."""
        arrival = storage.arrival
        if arrival is None or arrival.mark.is_done:
            return 0.0
        return max(0.0, arrival.ends_s - self.timeline.now_s)

    def backlog_s(self) -> float:
        """Estimate how long the copies in that were begun will still take."""
        self.reap()
        return max(0.0, self.timeline.in_free_s - self.timeline.now_s)

    def reap(self) -> None:
        """Let go of what has arrived; put the timeline right where all copies have ended.

        It leaves out what nobody measures (updates of parameters, the user's own work), so it would
        fall behind the link more with every iteration.
        """
        if self._last_out.is_done:
            self.timeline.end_out()
        if self._last_in.is_done:
            self.timeline.end_in()
        coming = self._coming
        while coming and coming[0][0].is_done:
            coming.popleft()

    # -- both ----------------------------------------------------------------------------------

    def observe(self) -> None:
        """Take in what copies took that have ended: the link may be shared, and changes."""
        for copy in self._tiers.times():
            link = self.outward if copy.is_to_host else self.inward
            link.observe(copy.nbytes, copy.elapsed_s)

    def forsake(self, storage: Storage) -> None:
        """Give the tier's copy of a resident storage up: it is no longer true, or not wanted."""
        ticket, storage.ticket = storage.ticket, None
        if ticket is not None:
            self.discard(ticket)

    def discard(self, ticket: Ticket) -> None:
        """Give a ticket back."""
        self._tiers.discard(ticket)
        self._revision += 1

    def finish(self) -> None:
        """Let the host wait for all copies under way."""
        self._device.copier.finish()
        self._tiers.finish()
        self._coming.clear()
