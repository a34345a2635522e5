"""A device that knows what is ordered with what, and says where two accesses are not.

A CPU for arrays, with copies that are done at once, so values are always right. What is checked is
the promise: vector clocks for the compute stream, a stream for each direction of the copies, and
the host. Of two accesses that touch the same bytes, one of them a write, the earlier must have
*happened before* the later: its end must be known to whoever begins the later. Whatever a real
device does with the time that it is given, the bytes are then the same.

Rules:
  1. A copy begins behind everything the compute stream was given and behind its `after`.
  2. `Mark.hold_compute` orders later compute work behind a copy, `Mark.wait` and a true
     `Mark.is_done` everything that is given later: the host knows then. Nothing else does.
  3. A new block is written by the compute stream, all of it. A function reads its inputs in
     forward, what it retained and its gradients in backward. An update writes its parameter.
     What `Transfers.fetch` returned may be read at once.
  4. A copy out whose source is overwritten too early is *torn*. That harms nobody as long as
     nobody copies the value back.
  5. Only a copy writes to a place in host memory; the host itself may give a slab back.

It does not see who writes into an array by hand, outside Chainer: `late` does.

Source: vector clocks with the last write and the reads since then for each range of bytes are as in
Flanagan and Freund, "FastTrack", PLDI 2009; here a range is split as accesses need it.
"""

from __future__ import annotations

import contextlib
import ctypes
import enum
import random
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import chainer
from sortedcontainers import SortedDict

from dynamemo import rules
from dynamemo.allocator import DONE, Block, CopyTime, HostArena, HostTier, Mark, Pool, Tier
from dynamemo.device import HostDevice
from dynamemo.transfers import Transfers
from tests.runtime.quiet_hook import QuietHook

#: How many races are described; the others are counted.
MOST_TOLD = 20


class Lane(enum.IntEnum):
    """What does one thing after the other."""

    COMPUTE = 0
    OUT = 1
    IN = 2
    HOST = 3


class Value:
    """What one copy out has brought to the host."""

    __slots__ = ("reader", "torn_by")

    def __init__(self) -> None:
        #: A copy back of it.
        self.reader: Access | None = None
        #: Who wrote into its source before it was copied.
        self.torn_by: Access | None = None


@dataclass(slots=True, eq=False)
class Access:
    """Somebody reads or writes, as step `tick` of a lane."""

    lane: Lane
    tick: int
    what: str
    #: Of a copy out: what it makes.
    value: Value | None = None

    def __str__(self) -> str:
        return f"{self.what} ({self.lane.name.lower()} {self.tick})"


@dataclass(slots=True)
class Region:
    """A range of bytes with one history, from its key in the memory up to `stop`."""

    stop: int
    writer: Access | None = None
    #: The reads since that write: each copy out's, and the last of each other lane's.
    readers: dict[object, Access] = field(default_factory=dict)


class Memory:
    """The history of an address space."""

    def __init__(self) -> None:
        self._regions: SortedDict = SortedDict()

    def touched(self, start: int, stop: int) -> list[Region]:
        """Return the regions that make up a range; they are cut at its ends, gaps are filled."""
        self._cut(start)
        self._cut(stop)
        regions = self._regions
        found = []
        position = start
        for begin in list(regions.irange(start, stop, inclusive=(True, False))):
            if position < begin:
                found.append(regions.setdefault(position, Region(begin)))
            found.append(regions[begin])
            position = regions[begin].stop
        if position < stop:
            found.append(regions.setdefault(position, Region(stop)))
        return found

    def overwrite(self, start: int, stop: int, writer: Access) -> None:
        """Make one region of a range that `touched` has just returned the parts of."""
        regions = self._regions
        for begin in list(regions.irange(start, stop, inclusive=(True, False))):
            del regions[begin]
        regions[start] = Region(stop, writer)

    def _cut(self, at: int) -> None:
        regions = self._regions
        index = regions.bisect_left(at) - 1
        if index >= 0:
            region = regions.peekitem(index)[1]
            if region.stop > at:
                regions[at] = Region(region.stop, region.writer, dict(region.readers))
                region.stop = at


class Checker:
    """The clocks, the histories of both memories, and the races found."""

    def __init__(self) -> None:
        #: For each lane, how far it knows each lane to have come.
        self.clocks = [[0] * len(Lane) for _ in Lane]
        self.device = Memory()
        self.host = Memory()
        #: What was wrong, in words.
        self.races: list[str] = []
        #: How many races there were.
        self.count = 0

    def begin(self, lane: Lane, what: str, *behind: list[int]) -> Access:
        """Take the next step of a lane, behind what the host knows and behind other clocks."""
        own = self.clocks[lane]
        for clock in (self.clocks[Lane.HOST], *behind):
            own[:] = map(max, own, clock)
        own[lane] += 1
        return Access(lane, own[lane], what)

    def join(self, lane: Lane, clock: list[int]) -> None:
        """Let a lane's later steps come behind a clock."""
        self.clocks[lane][:] = map(max, self.clocks[lane], clock)

    def is_before(self, access: Access, later: Access) -> bool:
        """Tell whether an access has ended before a step that begins now."""
        return access.tick <= self.clocks[later.lane][access.lane]

    def reads(self, memory: Memory, start: int, nbytes: int, access: Access) -> None:
        """Note that a range is read."""
        for region in memory.touched(start, start + nbytes):
            writer = region.writer
            if writer is not None:
                self._check_writer(writer, access, start)
                if memory is self.host and writer.value is not None:
                    writer.value.reader = access
                    self._check_value(writer.value, start)
            region.readers[access.value or access.lane] = access

    def writes(self, memory: Memory, start: int, nbytes: int, access: Access) -> None:
        """Note that a range is written."""
        for region in memory.touched(start, start + nbytes):
            if region.writer is not None:
                self._check_writer(region.writer, access, start)
            for reader in region.readers.values():
                if self.is_before(reader, access):
                    continue
                if memory is self.device and reader.value is not None:
                    reader.value.torn_by = reader.value.torn_by or access
                    self._check_value(reader.value, start)
                else:
                    self._tell(f"{access} may write at {start:#x} before {reader} has read")
        memory.overwrite(start, start + nbytes, access)

    def _check_writer(self, writer: Access, access: Access, start: int) -> None:
        if not self.is_before(writer, access):
            self._tell(f"{access} may come to {start:#x} before {writer} has written")

    def _check_value(self, value: Value, start: int) -> None:
        if value.torn_by is not None and value.reader is not None:
            self._tell(f"{value.reader} is of a value at {start:#x} torn by {value.torn_by}")

    def _tell(self, story: str) -> None:
        self.count += 1
        if len(self.races) < MOST_TOLD:
            self.races.append(story)


class CheckedMark:
    """The end of a copy, which the host believes as late as it may."""

    def __init__(self, copier: CheckedCopier, lane: Lane) -> None:
        self._copier = copier
        self._lane = lane
        #: What is known to have ended when the copy has.
        self.clock = list(copier.checker.clocks[lane])

    @property
    def is_done(self) -> bool:
        clocks = self._copier.checker.clocks
        if self.clock[self._lane] <= clocks[Lane.HOST][self._lane]:
            return True
        if self._copier.is_seen():
            self._copier.checker.join(Lane.HOST, self.clock)
            return True
        return False

    def hold_compute(self) -> None:
        self._copier.checker.join(Lane.COMPUTE, self.clock)

    def wait(self) -> None:
        self._copier.waits += 1
        self._copier.checker.join(Lane.HOST, self.clock)


class CheckedCopier:
    """Copies at once, and notes what they touch.

    Parameters
    ----------
    checker : Checker
        Is told.
    draw : random.Random, optional
        Whether the host sees a copy's end when it asks; by default it never does before it waits.
    """

    is_host = False

    def __init__(self, checker: Checker, draw: random.Random | None = None) -> None:
        self.waits = 0
        #: Copies so far.
        self.copies = 0
        self.checker = checker
        self._draw = draw
        self._under_way: deque[tuple[CheckedMark, CopyTime]] = deque()

    def is_seen(self) -> bool:
        return self._draw is not None and self._draw.random() < 0.3

    def to_host(
        self, host_address: int, device_address: int, nbytes: int, *, after: Mark = DONE
    ) -> Mark:
        checker = self.checker
        access = self._begin(Lane.OUT, nbytes, after)
        access.value = Value()
        checker.reads(checker.device, device_address, nbytes, access)
        checker.writes(checker.host, host_address, nbytes, access)
        ctypes.memmove(host_address, device_address, nbytes)
        return self._end(Lane.OUT, nbytes)

    def to_device(
        self, device_address: int, host_address: int, nbytes: int, *, after: Mark = DONE
    ) -> Mark:
        checker = self.checker
        access = self._begin(Lane.IN, nbytes, after)
        checker.reads(checker.host, host_address, nbytes, access)
        checker.writes(checker.device, device_address, nbytes, access)
        ctypes.memmove(device_address, host_address, nbytes)
        return self._end(Lane.IN, nbytes)

    def _begin(self, lane: Lane, nbytes: int, after: Mark) -> Access:
        self.copies += 1
        what = f"copy {self.copies} of {nbytes:,} bytes"
        behind = [self.checker.clocks[Lane.COMPUTE]]
        if isinstance(after, CheckedMark):
            behind.append(after.clock)
        else:
            after.wait()
        return self.checker.begin(lane, what, *behind)

    def _end(self, lane: Lane, nbytes: int) -> Mark:
        mark = CheckedMark(self, lane)
        elapsed_s = nbytes / 50e9  # no latency: a link of that rate whatever it is measured with
        self._under_way.append((mark, CopyTime(lane is Lane.OUT, nbytes, elapsed_s)))
        return mark

    def times(self) -> list[CopyTime]:
        times = []
        while self._under_way and self._under_way[0][0].is_done:
            times.append(self._under_way.popleft()[1])
        return times

    def finish(self) -> None:
        for lane in (Lane.OUT, Lane.IN):
            self.checker.join(Lane.HOST, self.checker.clocks[lane])


class CheckedPool(Pool):
    """A pool whose blocks are written to as soon as they are given out."""

    def __init__(self, budget_bytes: int, checker: Checker) -> None:
        super().__init__(HostArena(budget_bytes))
        self._checker = checker

    def allocate(self, requested_bytes: int, **options: Any) -> Block:
        block = super().allocate(requested_bytes, **options)
        checker = self._checker
        access = checker.begin(Lane.COMPUTE, f"the new owner of {requested_bytes:,} bytes")
        checker.writes(checker.device, block.address, block.block_bytes, access)
        return block


class CheckedSlab(HostArena):
    """Host memory that must not be given back while a copy touches it."""

    def __init__(self, capacity_bytes: int, checker: Checker) -> None:
        super().__init__(capacity_bytes)
        self._checker = checker
        self._is_closed = False

    def close(self) -> None:
        if not self._is_closed:
            self._is_closed = True
            checker = self._checker
            access = checker.begin(Lane.HOST, "the end of a slab")
            checker.writes(checker.host, self.address, self.capacity_bytes, access)
        super().close()


class _Elapsed:
    def __init__(self, seconds: float) -> None:
        self._seconds = seconds

    def elapsed_s(self) -> float:
        return self._seconds


class CheckedDevice(HostDevice):
    """The CPU, with a host tier behind such a copier; its arrays' uses are noted in `watching`.

    What functions take is made up: what is done does not depend on this machine's speed.

    Parameters
    ----------
    draw : random.Random, optional
        As `CheckedCopier`.
    slab_bytes : int
        Usual length of a slab of the host tier.
    """

    name = "checked"
    has_host_tier = True

    def __init__(self, draw: random.Random | None = None, *, slab_bytes: int = 1 << 20) -> None:
        super().__init__()
        self.checker = Checker()
        self.copier = self.checked = CheckedCopier(self.checker, draw)
        self._slab_bytes = slab_bytes
        self._draw = draw

    def start_timer(self) -> float:
        return 0.0

    def stop_timer(self, start: float) -> Any:
        return _Elapsed(3e-6 if self._draw is None else self._draw.uniform(1e-7, 1e-5))

    def make_pool(self, budget_bytes: int) -> Pool:
        return CheckedPool(budget_bytes, self.checker)

    def make_host_tier(self, limit_bytes: int) -> Tier:
        def make_slab(capacity_bytes: int) -> CheckedSlab:
            return CheckedSlab(capacity_bytes, self.checker)

        return HostTier(self.checked, limit_bytes, slabs=make_slab, slab_bytes=self._slab_bytes)

    def digest(self, array: Any) -> bytes:
        self.note_read("the hash", [array])
        return super().digest(array)

    def note_read(self, what: str, arrays: Any) -> None:
        """Note that the compute stream reads arrays."""
        for block in self._blocks(arrays):
            access = self.checker.begin(Lane.COMPUTE, what)
            self.checker.reads(self.checker.device, block.address, block.block_bytes, access)

    def note_write(self, what: str, arrays: Any) -> None:
        """Note that the compute stream writes into arrays."""
        for block in self._blocks(arrays):
            access = self.checker.begin(Lane.COMPUTE, what)
            self.checker.writes(self.checker.device, block.address, block.block_bytes, access)

    def _blocks(self, arrays: Any) -> list[Block]:
        blocks = [self.block_of(array) for array in arrays if self.owns(array)]
        return [block for block in blocks if block is not None]

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Note what functions, updates and fetches read and write. Inside the runtime."""
        fetch = Transfers.fetch
        update = chainer.optimizer.UpdateRule.update

        def watched_fetch(transfers: Any, storage: Any, ticket: Any) -> Any:
            arrays = fetch(transfers, storage, ticket)
            self.note_read("the reader of what came back", arrays)
            return arrays

        def watched_update(rule: Any, param: Any) -> Any:
            result = update(rule, param)
            # Whoever wrote kept them in place while it ran.
            held = [list.__getitem__(param.__dict__["_data"], 0)]
            held += (rule.__dict__.get("_state") or {}).values()
            self.note_write("the update", held)
            return result

        Transfers.fetch = watched_fetch  # type: ignore[method-assign]
        chainer.optimizer.UpdateRule.update = watched_update
        try:
            with Uses(self):
                yield
        finally:
            Transfers.fetch = fetch  # type: ignore[method-assign]
            chainer.optimizer.UpdateRule.update = update


class Uses(QuietHook):
    """Note what functions use."""

    name = "uses"

    def __init__(self, device: CheckedDevice) -> None:
        self._device = device

    def forward_preprocess(self, function: Any, in_data: Any) -> None:
        if rules.is_trusted(function):
            self._device.note_read(function.label, in_data)
        else:
            self._device.note_write(function.label, in_data)

    def begin_backward(self, function: Any, out_grad: Any) -> None:
        arrays = [*out_grad, *function.__dict__.values()]
        inner = function.__dict__.get("_function")  # an old-style function
        if inner is not None:
            arrays += inner.__dict__.values()
        nodes = [function.inputs[i] for i in function._input_indexes_to_retain or ()]
        nodes += [function.outputs[i]() for i in function._output_indexes_to_retain or ()]
        arrays += [node.__dict__.get("_data") for node in nodes if node is not None]
        arrays += function.__dict__.get("_retained_output_data") or ()
        self._device.note_read(f"{function.label} (backward)", arrays)
