"""The memory manager: evicts storages when the pool is short, and brings them back when read.

It owns the storages' records and is the only one that moves or drops their values. It knows no
Chainer: the binding registers arrays and slots and replays functions for it.

Invariants kept here (numbers of the design's list):
  2. The pool asks it for room with its lock held; requests made meanwhile evict nothing.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable
from typing import Any

import numpy

from dynamemo.allocator import OutOfMemoryError, Pool, TierStack
from dynamemo.compaction import Compactor
from dynamemo.device import Device
from dynamemo.evictor import MIN_BYTES, Evictor, costs_of, look_nowhere
from dynamemo.following import Follower, Recorded
from dynamemo.foresight import Key, Ran
from dynamemo.graph import LinkRate
from dynamemo.policies import NEGLIGIBLE_S, Policy, Suggestion, Technique
from dynamemo.prefetching import Need, Prefetcher
from dynamemo.recipe import ParameterVersion, Replay
from dynamemo.recorded import recorded_trace
from dynamemo.storage import Storage, View

#: Where a plan says what stays, only what is shorter than this part of the arena goes with it.
_SMALL_SHARE_PLANNED = 256
#: Backwards after which what has expired is left to the next shortage. The one that runs may hold
#: it, or the parameter that its recipe needs.
_MOST_TRIES = 4


class MemoryManager(Evictor):
    """Keep the managed storages of one device within the pool."""

    def __init__(
        self,
        device: Device,
        pool: Pool,
        tiers: TierStack,
        policy: Policy,
        *,
        replay: Replay,
        version_of: Callable[[Any, int], ParameterVersion | None],
        verify: bool = False,
        min_bytes: int = MIN_BYTES,
    ) -> None:
        super().__init__(
            device,
            pool,
            tiers,
            policy,
            replay=replay,
            version_of=version_of,
            verify=verify,
            min_bytes=min_bytes,
        )
        #: Called before offers are made: tells the manager of arrays that moved into new places.
        self.look_around: Callable[[], None] = look_nowhere
        self._follower = Follower(self.foresight, self._look_back)
        self.foresight.end_iteration = self._end_iteration
        self._prefetcher = Prefetcher(pool, self.foresight, self.transfers, self)
        self._compactor = Compactor(pool, self)
        #: Iteration in which room was made last.
        self._short_at = -2
        #: Storages that no backward will read again, to be freed: their ids, and how often that was
        #: tried.
        self._expired: list[tuple[int, int]] = []

    # -- eviction --------------------------------------------------------------------------

    def reclaim(self, pool: Pool, requested_bytes: int) -> bool:
        """Evict the cheapest run of adjacent blocks that makes room for the request.

        Called by the pool, with its lock held, possibly from inside an array allocation.

        Returns
        -------
        bool
            False where no run can be made free.
        """
        if self._is_evicting or self._is_closed:
            return False
        self._is_evicting = True
        self._pass += 1
        self._short_at = self.recorder.iterations
        try:
            self._prefetcher.note_request(requested_bytes)
            self.drain()
            self.transfers.reap()
            self.look_around()
            return self._free_run(requested_bytes)
        finally:
            self._is_evicting = False

    # -- restoring -------------------------------------------------------------------------

    def restore(self, storage: Storage) -> None:
        """Make a storage resident. Errors as `bring_back`."""
        with self.pool.lock:
            self.drain()
            try:
                with self.pool.retrying():
                    rebuilt = self.bring_back(storage)
            except MemoryError as error:
                error.__traceback__ = None  # its frames keep arrays
                rebuilt = None
            if rebuilt is None:
                self.look_around()
                self.evict_all()
                rebuilt = self.bring_back(storage)
            if not self.policy.keeps_rebuilt_sources:
                self._drop_again(rebuilt)

    def _drop_again(self, storages: list[Storage]) -> None:
        for storage in storages:
            if storage.recompute_s is not None and not math.isinf(storage.recompute_s):
                self._evict(storage, Technique.RECOMPUTE)

    # -- backward --------------------------------------------------------------------------

    def begin_backward(self, op_id: int) -> None:
        """Note that a function's backward begins; free what those before it needed last.

        Only here, since backprop holds a function's arrays until the next one begins.
        """
        self.recorder.begin_backward(op_id)
        if self.foresight.has_plans:
            self.pool.long_lived = frozenset()
            self.pool.coalesce()
        if self._expired and self.policy.frees_expired:
            self._free_expired()

    def end_backward(self, op_id: int) -> None:
        """Note that a function's backward has run."""
        self._expired += [(storage_id, 0) for storage_id in self.recorder.end_backward(op_id)]

    def _free_expired(self) -> None:
        """Take out what no backward will read again, where that costs nothing.

        Chainer keeps it as long as the graph is alive, in the way of all that comes.
        """
        expired, self._expired = self._expired, []
        if self._short_at < self.recorder.iterations - 1 or self._is_evicting or self._is_closed:
            return
        with self.pool.lock:
            self._is_evicting = True
            try:
                self.look_around()
                self._ask_again()
                for storage_id, tries in expired:
                    storage = self._storages.get(storage_id)
                    if storage is None or storage.block is None:
                        continue
                    if not self._free_at_no_cost(storage) and tries < _MOST_TRIES:
                        self._expired.append((storage_id, tries + 1))
            finally:
                self._is_evicting = False

    def _free_at_no_cost(self, storage: Storage) -> bool:
        """Tell whether a storage is gone, or may not go."""
        if storage.nbytes < self.min_bytes or not self._can_copy(storage):
            return True
        candidate = self._candidate(storage)
        suggestion = self.policy.suggest(candidate) if candidate.is_expired else None
        if suggestion is None or suggestion.cost_s > NEGLIGIBLE_S:
            return not candidate.is_expired
        return self._evict(storage, suggestion.technique)

    # -- where it lies -----------------------------------------------------------------------

    def gather_lasting(self) -> None:
        """Move parameters, gradients and optimizer state together, where that was not done yet."""
        with self.pool.lock:
            if self._is_evicting or self._is_closed:
                return
            self._is_evicting = True  # the requests in here take nothing from anybody
            try:
                self.drain()
                self.counters.moved_bytes += self._compactor.gather()
            finally:
                self._is_evicting = False

    def move(self, storage: Storage, *, above: int) -> bool:
        """Move a storage where its new memory begins above an address; tell whether it did."""
        block = storage.block
        if block is None or storage.ticket is not None or not self._can_copy(storage):
            return False
        contents = self._contents(storage)
        if not contents.arrays or not self._is_ours_alone(contents):
            return False
        views = [self.device.view_of(array, block) for array in contents.arrays]
        try:
            with self.pool.retrying():
                memory = self.device.allocate(storage.nbytes)
        except MemoryError:
            return False
        if self.device.address_of(memory) <= above:
            return False
        whole = View(0, (storage.nbytes,), numpy.dtype("u1"), (1,))
        source = self.device.array_in(self.device.memory_of(contents.arrays[0]), whole)
        self.device.array_in(memory, whole)[...] = source
        del source
        self._leave_slots(storage, contents)
        self._return_to_slots(storage, [self.device.array_in(memory, view) for view in views])
        return True

    # -- ahead of need -----------------------------------------------------------------------

    def ran_forward(self, op_id: int, signature: Any, made: list[Storage]) -> None:
        """Note that a function ran; begin to copy out what is foreseen to be evicted.

        Parameters
        ----------
        op_id : int
            The recorder's number of it.
        signature : hashable
            What it was, and on what shapes.
        made : list of Storage
            What it made, each with its producer.
        """
        self.transfers.timeline.now_s += self.costs.estimate(signature, nbytes=0)
        if not self.recorder.is_in_backward:
            self._prefetcher.leave_backward()
        for storage, technique in self.foresight.ran(op_id, signature, made):
            if storage.is_away or self._is_closed:
                continue
            storage.is_given_up = technique is not None
            if technique is Technique.RECOMPUTE:
                with self.pool.lock:
                    self._drop_ahead(storage)
            elif storage.ticket is None and storage.keeps_copy:
                with self.pool.lock:
                    if self._can_copy(storage) and self.transfers.copy_out(storage):
                        self.counters.early_bytes += storage.nbytes

        if self.foresight.has_plans:
            self._lay_out_next()

    def _lay_out_next(self) -> None:
        """Have the pool put what the next function makes, and a plan keeps, apart from the rest.

        What is kept lies at the high end in the order of its making, and goes from there in the
        order of backward: it leaves no holes. What is short-lived has the low end for itself.
        """
        pool = self.pool
        kept = self.foresight.kept_next()
        if kept or pool.long_lived:
            pool.long_lived = kept
        pool.coalesce()

    def _drop_ahead(self, storage: Storage) -> None:
        """Drop a storage that a plan wants to be made again; it stays where that cannot be."""
        if self._is_evicting or storage.nbytes < self.min_bytes or not self._can_copy(storage):
            return
        self._is_evicting = True
        try:
            self.look_around()
            self._evict(storage, Technique.RECOMPUTE, is_planned=True)
        finally:
            self._is_evicting = False

    def _end_iteration(self, ran: dict[int, Ran], keys: dict[int, Key]) -> None:
        """Have the iteration that has ended planned, where memory was short in it."""
        if self.policy.follows_plans and self._short_at >= self.recorder.iterations - 1:
            unplanned_share = self._unplanned_bytes / self.pool.capacity_bytes
            self._follower.end_iteration(ran, keys, unplanned_share)
            if self.foresight.has_plans:
                self.small_share = _SMALL_SHARE_PLANNED
        self._unplanned_bytes = 0

    def _look_back(self) -> Recorded:
        graph_bytes = sum(
            storage.block.block_bytes
            for storage in self.storages()
            if storage.block is not None and not (storage.is_lasting or storage.is_leaf)
        )
        outward, inward = (
            LinkRate(link.bytes_per_s, link.latency_s)
            for link in (self.transfers.outward, self.transfers.inward)
        )
        return Recorded(
            recorded_trace(self),
            self.recorder.traced_operations(),
            outward,
            inward,
            self.pool.capacity_bytes,
            self.pool.current_bytes - graph_bytes,
        )

    def prefetch(self, op_id: int) -> None:
        """Begin to bring back what backward will read soon. `op_id`: whose backward begins now."""
        prefetcher = self._prefetcher
        prefetcher.begin_backward(op_id)
        if not self.foresight.expects_reads or self._is_evicting or self._is_closed:
            return
        if not (urgent := prefetcher.urgent(op_id, self._storages)):
            return
        with self.pool.lock:
            self._is_evicting = True  # the requests in here take nothing from anybody
            try:
                prefetcher.bring(urgent)
            finally:
                self._is_evicting = False

    def take_free(self, nbytes: int) -> bool:
        """Make room in one piece without taking anything that will be needed."""
        if self.pool.largest_free_bytes() >= nbytes:
            return True
        offers = self._free_offers()
        while (window := self.pool.cheapest_window(nbytes, costs_of(offers))) is not None:
            if self._take_all(offers, window):
                return True
        return False

    def could_free(self, need: Need) -> bool:
        """Tell whether there is room, or could be without taking anything that will be needed."""
        pool = self.pool
        free_bytes = pool.available_bytes
        if free_bytes >= need.nbytes and pool.largest_free_bytes() >= need.piece_bytes:
            return True
        offers = self._free_offers()
        free_bytes += sum(storage.nbytes for storage, _ in offers.values())
        if free_bytes < need.nbytes:
            return False
        return pool.cheapest_window(need.piece_bytes, costs_of(offers)) is not None

    def begin_to_free(self, nbytes: int) -> None:
        """Begin to copy out what is held for nobody, so that it can be had for nothing soon."""
        for storage in self.storages():
            if nbytes <= 0:
                return
            if self._is_held_for_nobody(storage) and self.transfers.copy_out_aside(storage):
                nbytes -= storage.nbytes

    def _is_held_for_nobody(self, storage: Storage) -> bool:
        """Tell whether a value is not expected to be read again, and only a copy frees its room."""
        if storage.ticket is not None or not storage.keeps_copy or not self._can_copy(storage):
            return False
        candidate = self._candidate(storage)
        if storage.nbytes < self.min_bytes or not candidate.is_expired:
            return False
        suggestion = self.policy.suggest(candidate)
        return suggestion is not None and not self._can_carry_out(storage, suggestion)

    def _free_offers(self) -> dict[int, tuple[Storage, Suggestion]]:
        """Offer what can be had for nothing now."""
        self.look_around()
        offers = self._offers(is_missed=False)
        return {at: offer for at, offer in offers.items() if self._can_carry_out(*offer)}

    def _can_carry_out(self, storage: Storage, suggestion: Suggestion) -> bool:
        """Tell whether an offer costs nothing: a copy is there, or a recipe that nobody blocks."""
        if suggestion.technique is Technique.OFFLOAD:
            return storage.ticket is not None
        return self._plan(storage) is not None

    def close(self) -> None:
        """Evict no more, and bring parameters, gradients and optimizer state back.

        The tensors of a graph that are away stay so until they are read; then they come back.
        """
        with self.pool.lock:
            self._is_closed = True
            self.drain()
            for storage in self.storages():
                self.transfers.cancel(storage)
            for storage in self.storages():
                if storage.is_lasting and not storage.is_resident:
                    with contextlib.suppress(MemoryError):  # then it comes back when it is read
                        self.restore(storage)
            self.transfers.finish()

    def explain(self, error: OutOfMemoryError) -> None:
        """Say in an error which function asked, and what holds the memory."""
        graph_bytes = sum(
            s.block.block_bytes for s in self.storages() if s.block is not None and not s.is_lasting
        )
        error.function = self.current_function
        error.detail = (
            f"{graph_bytes:,} by tensors of the graph that are in use now or cannot be evicted, "
            f"{max(0, error.in_use_bytes - graph_bytes):,} by parameters, optimizer state and "
            "arrays outside of the graph"
        )
        if self.transfers.refusal is not None:
            error.detail += f"; {self.transfers.refusal}"
