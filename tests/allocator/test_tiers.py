"""Host and file tiers with the CPU as the device."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import gc
import os
import pickle
import random
import threading
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from dynamemo.allocator import (
    Arena,
    Copier,
    FileTier,
    HostArena,
    HostCopier,
    HostTier,
    InternalError,
    Mark,
    SpillError,
    Ticket,
    Tier,
    TierStack,
    file_tier,
    spill_extent,
    spill_file,
    spill_jobs,
    spill_staging,
)
from tests.allocator.contracts import MIB, TierContract
from tests.allocator.late_copier import LateCopier

SHORT_PIECE_BYTES = 65_536


class Memory:
    """Host memory with an address."""

    def __init__(self, data: bytes) -> None:
        self.arena = HostArena(max(1, len(data)))
        self.address = self.arena.address
        self.nbytes = len(data)
        ctypes.memmove(self.address, data, len(data))


def store(tier: Tier | TierStack, data: bytes) -> Ticket | None:
    """Store a value; its memory stays as it is until the test ends."""
    memory = Memory(data)
    MEMORIES.append(memory)
    return tier.store(memory.address, memory.nbytes)


MEMORIES: list[Memory] = []


@pytest.fixture(autouse=True)
def _memories() -> Iterator[None]:
    yield
    MEMORIES.clear()


class RemoteCopier(HostCopier):
    """Makes a tier believe that device memory cannot be reached but by copies."""

    @property
    def is_host(self) -> bool:
        return False


def load(tier: Tier | TierStack, ticket: Ticket) -> bytes:
    target = Memory(bytes(ticket.nbytes))
    tier.load(ticket, target.address).wait()
    return ctypes.string_at(target.address, ticket.nbytes)


class OnHost(TierContract):
    def to_device(self, data: bytes) -> Memory:
        return Memory(data)

    def to_bytes(self, memory: Memory) -> bytes:
        return ctypes.string_at(memory.address, memory.nbytes)


class TestHostTier(OnHost):
    def make_tier(self, limit_bytes: int, folder: str) -> Tier:
        return HostTier(HostCopier(), limit_bytes, slab_bytes=MIB)


class TestHostTierWithOneSlab(OnHost):
    def make_tier(self, limit_bytes: int, folder: str) -> Tier:
        return HostTier(HostCopier(), limit_bytes)


class TestHostTierAheadOfNeed(OnHost):
    def make_tier(self, limit_bytes: int, folder: str) -> Tier:
        return HostTier(LateCopier(), limit_bytes, slab_bytes=MIB, ahead_bytes=MIB // 2)


class TestHostTierWithLateCopies(OnHost):
    def make_tier(self, limit_bytes: int, folder: str) -> Tier:
        return HostTier(LateCopier(), limit_bytes, slab_bytes=MIB)


class TestFileTier(OnHost):
    def make_tier(self, limit_bytes: int, folder: str) -> Tier:
        return FileTier(HostCopier(), folder, limit_bytes)


class TestFileTierThroughStaging(OnHost):
    def make_tier(self, limit_bytes: int, folder: str) -> Tier:
        return FileTier(RemoteCopier(), folder, limit_bytes)


class TestFileTierWithLateCopies(OnHost):
    def make_tier(self, limit_bytes: int, folder: str) -> Tier:
        return FileTier(LateCopier(), folder, limit_bytes)


class TestFileTierPastTheCache(OnHost):
    def make_tier(self, limit_bytes: int, folder: str) -> Tier:
        return FileTier(HostCopier(), folder, limit_bytes, cached_bytes=0)


class TestFileTierThroughTwoBuffers(OnHost):
    """Values are far longer than the staging."""

    @pytest.fixture(autouse=True)
    def short_staging(self, monkeypatch: pytest.MonkeyPatch) -> None:
        use_short_pieces(monkeypatch)
        monkeypatch.setattr(file_tier, "_BUFFERS", 2)

    def make_tier(self, limit_bytes: int, folder: str) -> Tier:
        return FileTier(LateCopier(), folder, limit_bytes)


class TestNamedFileTier(OnHost):
    """A file system that cannot make files without a name."""

    @pytest.fixture(autouse=True)
    def no_nameless_files(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.delattr(os, "O_TMPFILE", raising=False)

    def make_tier(self, limit_bytes: int, folder: str) -> Tier:
        tier = FileTier(HostCopier(), folder, limit_bytes)
        assert os.listdir(folder) == []
        return tier


def use_short_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spill_extent, "PIECE_BYTES", SHORT_PIECE_BYTES)
    monkeypatch.setattr(spill_staging, "PIECE_BYTES", SHORT_PIECE_BYTES)


def test_a_long_value_gets_a_slab_of_its_own_length() -> None:
    """No rounding to powers of two (case A-06)."""
    tier = HostTier(HostCopier(), 10 * MIB, slab_bytes=MIB)
    memory = Memory(b"x" * (4 * MIB + 5000))
    assert tier.store(memory.address, 4 * MIB + 5000) is not None
    assert tier.held_bytes == 4 * MIB + 8192


def test_empty_slabs_make_room_for_a_long_value() -> None:
    tier = HostTier(HostCopier(), 4 * MIB, slab_bytes=MIB)
    memory = Memory(b"x" * (4 * MIB))
    tickets = [tier.store(memory.address, MIB) for _ in range(4)]
    for ticket in tickets:
        assert ticket is not None
        tier.discard(ticket)
    assert tier.held_bytes == 4 * MIB
    assert tier.store(memory.address, 4 * MIB) is not None


def test_a_machine_without_memory_is_a_full_tier() -> None:
    def refuse(capacity_bytes: int) -> Arena:
        raise MemoryError

    tier = HostTier(HostCopier(), MIB, slabs=refuse)
    assert store(tier, b"x") is None
    assert tier.used_bytes == 0


@pytest.mark.parametrize("limit_bytes", [0, 100])
def test_a_tier_with_next_to_no_room(limit_bytes: int, tmp_path: Path) -> None:
    memory = Memory(b"x" * 200)
    for tier in (
        HostTier(HostCopier(), limit_bytes),
        FileTier(HostCopier(), tmp_path, limit_bytes),
    ):
        assert tier.store(memory.address, 200) is None
        tier.close()


def test_the_spill_file_has_no_name(tmp_path: Path) -> None:
    tier = FileTier(HostCopier(), tmp_path)
    ticket = store(tier, b"x" * MIB)
    assert ticket is not None
    ticket.written.wait()
    assert list(tmp_path.iterdir()) == []
    assert tier.held_bytes >= MIB
    tier.close()


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    with pytest.raises(SpillError, match="choose a folder") as caught:
        FileTier(HostCopier(), tmp_path / "missing")
    assert isinstance(caught.value, OSError)
    assert caught.value.folder == str(tmp_path / "missing")
    twin = pickle.loads(pickle.dumps(caught.value))
    assert (str(twin), twin.folder) == (str(caught.value), caught.value.folder)


# -- slabs taken ahead of need -------------------------------------------------------------------


class SlowSlabs:
    """Makes slabs when it is let, in whatever thread."""

    def __init__(self) -> None:
        self.may_go_on = threading.Event()
        self.may_go_on.set()
        self.is_asked = threading.Event()
        self.threads: list[str] = []
        self.room = 100

    def __call__(self, capacity_bytes: int) -> Arena:
        self.threads.append(threading.current_thread().name)
        self.is_asked.set()
        self.may_go_on.wait()
        if len(self.threads) > self.room:
            raise MemoryError
        return HostArena(capacity_bytes)


def test_a_thread_takes_the_next_slab_before_it_is_needed() -> None:
    slabs = SlowSlabs()
    tier = HostTier(HostCopier(), 3 * MIB, slabs=slabs, slab_bytes=MIB, ahead_bytes=MIB // 4)
    half = b"h" * (MIB // 2)
    assert store(tier, half) is not None
    assert (len(slabs.threads), tier.held_bytes) == (1, MIB)
    slabs.is_asked.clear()
    slabs.may_go_on.clear()
    assert store(tier, half) is not None
    slabs.is_asked.wait()
    assert slabs.threads[1] != slabs.threads[0] == threading.current_thread().name
    assert tier.held_bytes == 2 * MIB  # from the moment it is asked for
    assert tier.waits == 1  # the first slab
    slabs.may_go_on.set()
    assert store(tier, half) is not None
    assert tier.waits <= 2  # whether the thread had ended by then
    tier.close()
    assert tier.held_bytes == 0


def test_a_store_waits_for_the_slab_that_is_being_taken() -> None:
    slabs = SlowSlabs()
    tier = HostTier(HostCopier(), 2 * MIB, slabs=slabs, slab_bytes=MIB, ahead_bytes=MIB // 4)
    assert store(tier, b"a" * MIB) is not None  # and asks for the second slab
    assert len(slabs.threads) == 2 or slabs.is_asked.wait()
    ticket = store(tier, b"b" * MIB)
    assert ticket is not None
    assert load(tier, ticket) == b"b" * MIB
    assert (tier.used_bytes, tier.held_bytes, len(slabs.threads)) == (2 * MIB, 2 * MIB, 2)
    assert store(tier, b"c") is None
    tier.close()


def test_a_machine_that_has_no_more_slabs_is_not_asked_again_and_again() -> None:
    slabs = SlowSlabs()
    slabs.room = 1
    tier = HostTier(HostCopier(), 8 * MIB, slabs=slabs, slab_bytes=MIB, ahead_bytes=MIB)
    kept = store(tier, b"k" * (MIB // 4))
    assert kept is not None
    tier.trim()  # waits for the thread
    assert tier.held_bytes == MIB
    for _ in range(3):
        assert store(tier, b"x" * 4096) is not None
    assert len(slabs.threads) == 2
    assert load(tier, kept) == b"k" * (MIB // 4)
    tier.close()


# -- disks that fail -----------------------------------------------------------------------------


class FullDisk:
    """Writes a little, then fails as a full disk does: by an error or by writing nothing."""

    def __init__(self, room_bytes: int, *, error: int | None) -> None:
        self.room_bytes = room_bytes
        self.error = error

    def pwrite(self, file: int, data: Any, offset: int) -> int:
        count = min(len(data), self.room_bytes)
        self.room_bytes -= count
        if count == 0 and self.error is not None:
            raise OSError(self.error, os.strerror(self.error))
        return os.pwrite(file, data[:count], offset) if count else 0

    def __getattr__(self, name: str) -> Any:
        return getattr(os, name)


@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EIO, None])
@pytest.mark.parametrize("copier", [HostCopier(), RemoteCopier(), LateCopier()])
def test_a_disk_that_fills_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: int | None, copier: Copier
) -> None:
    tier = FileTier(copier, tmp_path)
    kept_data, memory = b"k" * 5000, Memory(b"d" * 100_000)
    kept = store(tier, kept_data)
    assert kept is not None
    before = tier.statistics()
    monkeypatch.setattr(spill_file, "os", FullDisk(60_000, error=error))
    failed = tier.store(memory.address, 100_000)
    assert failed is not None
    target = Memory(b"t" * 100_000)
    coming = tier.load(failed, target.address)
    for wait in (failed.written.wait, failed.written.hold_compute, coming.hold_compute):
        with pytest.raises(SpillError, match="cannot write 100,000 bytes in spill") as caught:
            wait()
        assert caught.value.requested_bytes == 100_000
        assert caught.value.free_bytes > 0
        assert len(traceback.extract_tb(caught.tb)) < 8  # a new error each time
    monkeypatch.undo()
    assert failed.last.is_done
    tier.discard(failed)
    after = tier.statistics()
    assert (after.used_bytes, after.tickets) == (before.used_bytes, before.tickets)
    assert load(tier, kept) == kept_data
    again = store(tier, bytes(100_000))
    assert again is not None
    assert load(tier, again) == bytes(100_000)
    tier.close()


class BadReads:
    """Fails to read so many times."""

    def __init__(self, failures: int) -> None:
        self.failures = failures

    def preadv(self, file: int, buffers: Any, offset: int) -> int:
        self.failures -= 1
        if self.failures >= 0:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return os.preadv(file, buffers, offset)

    def __getattr__(self, name: str) -> Any:
        return getattr(os, name)


@pytest.mark.parametrize("copier", [HostCopier(), LateCopier()])
def test_a_value_outlives_a_read_that_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, copier: Copier
) -> None:
    use_short_pieces(monkeypatch)
    tier = FileTier(copier, tmp_path)
    data = random.Random(0).randbytes(5 * SHORT_PIECE_BYTES)
    ticket = store(tier, data)
    assert ticket is not None
    ticket.written.wait()
    monkeypatch.setattr(spill_file, "os", BadReads(1))
    with pytest.raises(SpillError, match="cannot read"):
        load(tier, ticket)
    assert load(tier, ticket) == data
    tier.discard(ticket)
    tier.finish()
    assert tier.used_bytes == 0
    tier.close()


@pytest.mark.parametrize("copier", [HostCopier(), LateCopier()])
@pytest.mark.parametrize("position", [0, SHORT_PIECE_BYTES + 1, 2 * SHORT_PIECE_BYTES + 99])
def test_a_damaged_value_is_not_given_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, copier: Copier, position: int
) -> None:
    use_short_pieces(monkeypatch)
    tier = FileTier(copier, tmp_path)
    sound, data = store(tier, b"sound"), bytes(2 * SHORT_PIECE_BYTES + 100)
    ticket = store(tier, data)
    assert ticket is not None
    assert sound is not None
    ticket.written.wait()
    os.pwrite(tier._file._file, b"\x01", ticket.place.offset + position)  # type: ignore[attr-defined]
    with pytest.raises(SpillError, match="damaged") as caught:
        load(tier, ticket)
    assert caught.value.folder == str(tmp_path)
    assert str(tmp_path) in str(caught.value)
    assert load(tier, sound) == b"sound"
    os.pwrite(tier._file._file, b"\x00", ticket.place.offset + position)  # type: ignore[attr-defined]
    assert load(tier, ticket) == data
    tier.close()


def test_short_writes_are_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spill_file, "_CHUNK_BYTES", 1000)
    tier = FileTier(HostCopier(), tmp_path)
    data = bytes(range(256)) * 50
    ticket = store(tier, data)
    assert ticket is not None
    assert load(tier, ticket) == data
    tier.close()


# -- past the page cache -------------------------------------------------------------------------


class Disk:
    """Notes what goes past the page cache, and wants memory aligned as it says."""

    def __init__(self, *, alignment_bytes: int) -> None:
        self.alignment_bytes = alignment_bytes
        self.direct: set[int] = set()
        self.direct_bytes = self.refused = 0

    def open(self, path: str, flags: int, *rest: int) -> int:
        file = os.open(path, flags & ~os.O_DIRECT, *rest)
        if flags & os.O_DIRECT:
            self.direct.add(file)
        return file

    def pwrite(self, file: int, data: Any, offset: int) -> int:
        self.check(file, data, offset)
        return os.pwrite(file, data, offset)

    def preadv(self, file: int, buffers: Any, offset: int) -> int:
        self.check(file, buffers[0], offset)
        return os.preadv(file, buffers, offset)

    def check(self, file: int, data: Any, offset: int) -> None:
        if file not in self.direct:
            return
        address = ctypes.addressof(ctypes.c_char.from_buffer(data))
        assert offset % 4096 == len(data) % 4096 == 0
        if address % self.alignment_bytes:
            self.refused += 1
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        self.direct_bytes += len(data)

    def __getattr__(self, name: str) -> Any:
        return getattr(os, name)


@pytest.mark.skipif(not hasattr(os, "O_DIRECT"), reason="no direct I/O on this system")
@pytest.mark.parametrize(
    ("alignment_bytes", "shift", "cached_bytes", "is_direct"),
    [
        (512, 512, 0, True),
        (4096, 0, 0, True),
        (4096, 512, 0, False),  # found out once
        (1 << 40, 0, 0, False),
        (512, 8, 0, False),
        (512, 0, 64 * MIB, False),
    ],
)
def test_what_does_not_fit_the_page_cache_goes_past_it(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    alignment_bytes: int,
    shift: int,
    cached_bytes: int,
    is_direct: bool,
) -> None:
    disk = Disk(alignment_bytes=alignment_bytes)
    monkeypatch.setattr(spill_file, "os", disk)
    tier = FileTier(HostCopier(), tmp_path, cached_bytes=cached_bytes)
    nbytes = 9 * MIB + 77
    data = random.Random(0).randbytes(nbytes)
    memory, target = Memory(bytes(shift) + data), Memory(bytes(shift + nbytes))
    ticket = tier.store(memory.address + shift, nbytes)
    assert ticket is not None
    tier.load(ticket, target.address + shift).wait()
    assert ctypes.string_at(target.address + shift, nbytes) == data
    assert disk.direct_bytes == (2 * 9 * MIB if is_direct else 0)
    refusals = disk.refused
    assert load(tier, ticket) == data  # at an aligned address
    assert disk.refused <= refusals + 4  # one for each thread that was at it
    tier.close()


def test_what_the_file_took_is_told_once(tmp_path: Path) -> None:
    tier = FileTier(HostCopier(), tmp_path)
    ticket = store(tier, bytes(MIB))
    assert ticket is not None
    load(tier, ticket)
    times = tier.times()
    assert [(time.is_to_host, time.nbytes) for time in times] == [(True, MIB), (False, MIB)]
    assert all(time.elapsed_s >= 0 for time in times)
    assert tier.times() == []
    tier.close()


# -- staging -------------------------------------------------------------------------------------


def test_a_value_longer_than_the_staging_waits_and_is_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_short_pieces(monkeypatch)
    monkeypatch.setattr(file_tier, "_BUFFERS", 3)
    slabs = SlowSlabs()
    copier = LateCopier()
    tier = FileTier(copier, tmp_path, slabs=slabs)
    short = store(tier, b"s" * (3 * SHORT_PIECE_BYTES))
    assert short is not None
    assert tier.waits == 0
    assert copier.copies == 3  # begun by the caller
    short.written.wait()
    data = random.Random(0).randbytes(20 * SHORT_PIECE_BYTES)
    ticket = store(tier, data)
    assert ticket is not None
    assert tier.waits > 0
    assert load(tier, ticket) == data
    assert len(slabs.threads) == 3  # and no more
    tier.close()


def test_buffers_that_the_machine_refuses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use_short_pieces(monkeypatch)
    data = random.Random(0).randbytes(5 * SHORT_PIECE_BYTES)
    for room in (0, 1):
        slabs = SlowSlabs()
        slabs.room = room
        tier = FileTier(LateCopier(), tmp_path, slabs=slabs)
        ticket = store(tier, data)
        assert ticket is not None
        assert load(tier, ticket) == data
        tier.close()


def test_a_store_takes_the_buffers_of_loads_that_nobody_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_short_pieces(monkeypatch)
    monkeypatch.setattr(file_tier, "_BUFFERS", 2)
    tier = FileTier(LateCopier(), tmp_path)
    values = [random.Random(seed).randbytes(3 * SHORT_PIECE_BYTES) for seed in range(4)]
    tickets = [store(tier, value) for value in values[:2]]
    targets = [Memory(bytes(3 * SHORT_PIECE_BYTES)) for _ in range(2)]
    marks = []
    for ticket, target in zip(tickets, targets, strict=True):
        assert ticket is not None
        marks.append(tier.load(ticket, target.address))
    late = [store(tier, value) for value in values[2:]]
    assert not marks[0].is_done
    for mark in reversed(marks):
        mark.wait()
    for target, value in zip(targets, values[:2], strict=True):
        assert ctypes.string_at(target.address, len(value)) == value
    for ticket, value in zip(late, values[2:], strict=True):
        assert ticket is not None
        assert load(tier, ticket) == value
    tier.close()


# -- interrupts, closing, forks ------------------------------------------------------------------


@pytest.mark.parametrize("fails_at", [1, 2, 3])
def test_an_interrupted_store_keeps_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fails_at: int
) -> None:
    use_short_pieces(monkeypatch)
    data = random.Random(0).randbytes(3 * SHORT_PIECE_BYTES)
    copier = LateCopier(fails_at=fails_at)
    tier = FileTier(copier, tmp_path)
    memory = Memory(data)
    with pytest.raises(KeyboardInterrupt):
        tier.store(memory.address, len(data))
    tier.finish()
    assert (tier.used_bytes, tier.statistics().tickets) == (0, 0)
    again = store(tier, data)
    assert again is not None
    assert load(tier, again) == data
    tier.close()


class Interrupts:
    """Interrupts the first wait for a job in the main thread; holds reads up until then."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.may_read = threading.Event()
        self.wait = spill_jobs.Job.wait
        monkeypatch.setattr(spill_jobs.Job, "wait", lambda job: self.interrupt(job))
        monkeypatch.setattr(spill_file, "os", self)

    def interrupt(self, job: spill_jobs.Job) -> None:
        if threading.current_thread() is threading.main_thread() and not self.may_read.is_set():
            self.may_read.set()
            raise KeyboardInterrupt
        self.wait(job)

    def preadv(self, file: int, buffers: Any, offset: int) -> int:
        self.may_read.wait()
        return os.preadv(file, buffers, offset)

    def __getattr__(self, name: str) -> Any:
        return getattr(os, name)


@pytest.mark.parametrize("copier", [HostCopier(), LateCopier()])
def test_after_an_interrupted_wait_nobody_writes_into_the_target(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, copier: Copier
) -> None:
    use_short_pieces(monkeypatch)
    tier = FileTier(copier, tmp_path)
    data = random.Random(0).randbytes(20 * SHORT_PIECE_BYTES)
    ticket = store(tier, data)
    assert ticket is not None
    ticket.written.wait()
    Interrupts(monkeypatch)
    target = Memory(bytes(len(data)))
    mark = tier.load(ticket, target.address)
    with pytest.raises(KeyboardInterrupt):
        mark.hold_compute()
    assert mark.is_done
    ctypes.memset(target.address, 7, len(data))
    with pytest.raises(SpillError, match="given up"):
        mark.wait()
    assert load(tier, ticket) == data
    assert ctypes.string_at(target.address, len(data)) == b"\x07" * len(data)
    tier.close()


@pytest.mark.parametrize("copier", [HostCopier(), LateCopier()])
def test_closing_with_copies_under_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, copier: Copier
) -> None:
    use_short_pieces(monkeypatch)
    tier = FileTier(copier, tmp_path)
    data = random.Random(0).randbytes(40 * SHORT_PIECE_BYTES)
    memory, target = Memory(data), Memory(bytes(len(data)))
    ticket = tier.store(memory.address, len(data))
    assert ticket is not None
    mark = tier.load(ticket, target.address)
    tier.close()
    for end in (ticket.written, mark):
        with contextlib.suppress(SpillError):
            end.wait()
        assert end.is_done
    assert tier.store(memory.address, 1) is None
    assert (tier.used_bytes, tier.held_bytes) == (0, 0)
    tier.discard(ticket)


def spill_threads() -> list[threading.Thread]:
    return [t for t in threading.enumerate() if t.name.startswith("dynamemo-spill")]


def test_threads_are_there_while_they_are_needed(tmp_path: Path) -> None:
    gc.collect()  # tiers of other tests
    others = len(spill_threads())
    tier = FileTier(HostCopier(), tmp_path)
    assert len(spill_threads()) == others
    assert store(tier, b"x") is not None
    assert len(spill_threads()) > others
    tier.close()
    assert len(spill_threads()) <= others


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this system")
@pytest.mark.filterwarnings("ignore:.*multi-threaded.*:DeprecationWarning")
@pytest.mark.parametrize("copier", [HostCopier(), RemoteCopier(), LateCopier()])
def test_a_forked_child_reads_and_stores_nothing(tmp_path: Path, copier: Copier) -> None:
    tier = FileTier(copier, tmp_path)
    data = random.Random(0).randbytes(5 * MIB)
    memory, target = Memory(data), Memory(bytes(len(data)))
    ticket = tier.store(memory.address, len(data))
    assert ticket is not None
    coming = tier.load(ticket, target.address)
    child = os.fork()
    if child == 0:
        code = 1
        try:
            coming.wait()
            is_equal = ctypes.string_at(target.address, len(data)) == data
            if is_equal and load(tier, ticket) == data and tier.store(memory.address, 6) is None:
                tier.close()
                code = 0
        finally:
            os._exit(code)
    assert os.waitpid(child, 0)[1] == 0
    assert load(tier, ticket) == data
    tier.close()


# -- against a plain model -----------------------------------------------------------------------


class TierMachine(RuleBasedStateMachine):
    """Values come and go while copies are late; the model is a dictionary of what was stored."""

    tier: Tier

    def __init__(self) -> None:
        super().__init__()
        self.copier = LateCopier()
        self.kept: list[tuple[Ticket, Memory, bytes]] = []
        self.coming: list[tuple[Mark, Memory, bytes]] = []
        self.seed = 0

    @initialize(is_file=st.booleans())
    def start(self, is_file: bool) -> None:
        limit_bytes = 16 * 4096
        if is_file:
            self.tier = FileTier(self.copier, limit_bytes=limit_bytes)
        else:
            self.tier = HostTier(
                self.copier, limit_bytes, slab_bytes=4 * 4096, ahead_bytes=2 * 4096
            )

    @rule(nbytes=st.integers(0, 5 * 4096))
    def store(self, nbytes: int) -> None:
        self.seed += 1
        data = random.Random(self.seed).randbytes(nbytes)
        memory = Memory(data)
        ticket = self.tier.store(memory.address, nbytes)
        if ticket is not None:
            self.kept.append((ticket, memory, data))

    @precondition(lambda self: self.kept)
    @rule(data=st.data())
    def load(self, data: st.DataObject) -> None:
        ticket, _, value = data.draw(st.sampled_from(self.kept))
        target = Memory(bytes(len(value)))
        self.coming.append((self.tier.load(ticket, target.address), target, value))

    @precondition(lambda self: self.kept)
    @rule(data=st.data(), is_held=st.booleans())
    def discard(self, data: st.DataObject, is_held: bool) -> None:
        index = data.draw(st.integers(0, len(self.kept) - 1))
        ticket, memory, value = self.kept.pop(index)
        if is_held:  # the memory may be used again then
            ticket.written.hold_compute()
            ctypes.memset(memory.address, 0, len(value))
        else:
            self.coming.append((ticket.written, memory, value))
        self.tier.discard(ticket)

    @precondition(lambda self: self.coming)
    @rule(data=st.data(), is_held=st.booleans())
    def arrive(self, data: st.DataObject, is_held: bool) -> None:
        mark, target, value = self.coming.pop(data.draw(st.integers(0, len(self.coming) - 1)))
        if is_held:
            mark.hold_compute()
        else:
            mark.wait()
            assert mark.is_done
        assert ctypes.string_at(target.address, len(value)) == value
        ctypes.memset(target.address, 0, len(value))

    @rule(seed=st.integers(0, 1000))
    def copies_end(self, seed: int) -> None:
        self.copier.run_due(random.Random(seed))

    @rule()
    def trim(self) -> None:
        self.tier.trim()

    @invariant()
    def accounts_hold(self) -> None:
        if hasattr(self, "tier"):
            assert self.tier.statistics().tickets == len(self.kept)
            rounded = sum(max(4096, -(-t.nbytes // 4096) * 4096) for t, _, _ in self.kept)
            assert rounded <= self.tier.used_bytes <= 16 * 4096

    def teardown(self) -> None:
        if not hasattr(self, "tier"):
            return
        for ticket, _, value in self.kept:
            assert load(self.tier, ticket) == value
            self.tier.discard(ticket)
        for mark, target, value in self.coming:
            mark.wait()
            assert ctypes.string_at(target.address, len(value)) == value
        self.tier.finish()
        assert self.tier.used_bytes == 0
        self.tier.close()


TestTierMachine = TierMachine.TestCase
TestTierMachine.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


# -- stacks --------------------------------------------------------------------------------------


def test_a_stack_without_tiers_is_always_full() -> None:
    stack = TierStack([])
    assert store(stack, b"x") is None
    assert stack.statistics() == ()


def test_a_discarded_ticket_is_refused_by_a_stack() -> None:
    tier = HostTier(HostCopier(), MIB)
    stack = TierStack([tier])
    ticket = store(stack, b"x")
    assert isinstance(ticket, Ticket)
    stack.discard(ticket)
    with pytest.raises(InternalError, match="discarded"):
        stack.load(ticket, 0)
