"""Host and file tiers with the CPU as the device."""

from __future__ import annotations

import ctypes
import errno
import os
import pickle
from pathlib import Path
from typing import Any

import pytest

from dynamemo.allocator import (
    Arena,
    FileTier,
    HostArena,
    HostCopier,
    HostTier,
    InternalError,
    SpillError,
    Ticket,
    Tier,
    TierStack,
)
from dynamemo.allocator import file_tier as file_module
from tests.allocator.contracts import MIB, TierContract


class Memory:
    """Host memory with an address."""

    def __init__(self, data: bytes) -> None:
        self.arena = HostArena(max(1, len(data)))
        self.address = self.arena.address
        self.nbytes = len(data)
        ctypes.memmove(self.address, data, len(data))


def store(tier: Tier | TierStack, data: bytes) -> Ticket | None:
    memory = Memory(data)
    return tier.store(memory.address, memory.nbytes)


class RemoteCopier(HostCopier):
    """Makes a tier believe that device memory cannot be reached but by copies."""

    @property
    def is_host(self) -> bool:
        return False


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


class TestFileTier(OnHost):
    def make_tier(self, limit_bytes: int, folder: str) -> Tier:
        return FileTier(HostCopier(), folder, limit_bytes)


class TestFileTierThroughStaging(OnHost):
    def make_tier(self, limit_bytes: int, folder: str) -> Tier:
        return FileTier(RemoteCopier(), folder, limit_bytes)


class TestNamedFileTier(OnHost):
    """A file system that cannot make files without a name."""

    @pytest.fixture(autouse=True)
    def no_nameless_files(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.delattr(os, "O_TMPFILE", raising=False)

    def make_tier(self, limit_bytes: int, folder: str) -> Tier:
        tier = FileTier(HostCopier(), folder, limit_bytes)
        assert os.listdir(folder) == []
        return tier


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
    assert store(tier, b"x" * MIB) is not None
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
@pytest.mark.parametrize("copier", [HostCopier(), RemoteCopier()])
def test_a_disk_that_fills_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: int | None, copier: HostCopier
) -> None:
    tier = FileTier(copier, tmp_path)
    kept_data, data = b"k" * 5000, b"d" * 100_000
    kept = store(tier, kept_data)
    assert kept is not None
    before = tier.statistics()
    monkeypatch.setattr(file_module, "os", FullDisk(60_000, error=error))
    with pytest.raises(SpillError, match="100,000 bytes in spill folder") as caught:
        store(tier, data)
    monkeypatch.undo()
    assert caught.value.requested_bytes == 100_000
    assert caught.value.free_bytes > 0
    after = tier.statistics()
    assert (after.used_bytes, after.tickets) == (before.used_bytes, before.tickets)
    target = Memory(bytes(5000))
    tier.load(kept, target.address)
    assert ctypes.string_at(target.address, 5000) == kept_data
    assert store(tier, data) is not None
    tier.close()


def test_short_writes_are_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(file_module, "_CHUNK_BYTES", 1000)
    tier = FileTier(HostCopier(), tmp_path)
    data = bytes(range(256)) * 50
    ticket = store(tier, data)
    assert ticket is not None
    target = Memory(bytes(len(data)))
    tier.load(ticket, target.address)
    assert ctypes.string_at(target.address, len(data)) == data
    tier.close()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this system")
@pytest.mark.filterwarnings("ignore:.*multi-threaded.*:DeprecationWarning")
def test_a_forked_child_reads_and_stores_nothing(tmp_path: Path) -> None:
    tier = FileTier(HostCopier(), tmp_path)
    memory = Memory(b"parent")
    ticket = tier.store(memory.address, 6)
    assert ticket is not None
    child = os.fork()
    if child == 0:
        code = 1
        try:
            tier.load(ticket, memory.address)
            if tier.store(memory.address, 6) is None:
                code = 0
        finally:
            os._exit(code)
    assert os.waitpid(child, 0)[1] == 0
    tier.close()


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
