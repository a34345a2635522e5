"""Host and file tiers with a GPU as the device."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from dynamemo.allocator import FileTier, HostTier, Tier, file_tier, spill_extent, spill_staging
from tests.allocator.contracts import MIB, TierContract

pytestmark = pytest.mark.gpu


class DeviceMemory:
    """GPU memory with an address."""

    def __init__(self, data: bytes) -> None:
        import cupy

        self.array = cupy.asarray(np.frombuffer(data, np.uint8))
        self.address = int(self.array.data.ptr)


class OnGpu(TierContract):
    def to_device(self, data: bytes) -> DeviceMemory:
        return DeviceMemory(data)

    def to_bytes(self, memory: DeviceMemory) -> bytes:
        data: bytes = memory.array.get().tobytes()
        return data

    @staticmethod
    def copier() -> Any:
        from dynamemo.allocator import cupy_copier

        return cupy_copier.CudaCopier()

    @staticmethod
    def slabs() -> Any:
        from dynamemo.allocator import cupy_copier

        return cupy_copier.PinnedSlabs()


class TestPinnedTier(OnGpu):
    def make_tier(self, limit_bytes: int, folder: str) -> Tier:
        slabs = self.slabs()
        return HostTier(self.copier(), limit_bytes, slabs=slabs, slab_bytes=MIB)


class TestPinnedTierAheadOfNeed(OnGpu):
    def make_tier(self, limit_bytes: int, folder: str) -> Tier:
        slabs = self.slabs()
        return HostTier(
            self.copier(), limit_bytes, slabs=slabs, slab_bytes=MIB, ahead_bytes=MIB // 2
        )


class TestFileTier(OnGpu):
    def make_tier(self, limit_bytes: int, folder: str) -> Tier:
        return FileTier(self.copier(), folder, limit_bytes, slabs=self.slabs())


class TestFileTierPastTheCache(OnGpu):
    def make_tier(self, limit_bytes: int, folder: str) -> Tier:
        return FileTier(self.copier(), folder, limit_bytes, slabs=self.slabs(), cached_bytes=0)


class TestFileTierThroughTwoBuffers(OnGpu):
    """Values are far longer than the staging."""

    @pytest.fixture(autouse=True)
    def short_staging(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(spill_extent, "PIECE_BYTES", 65_536)
        monkeypatch.setattr(spill_staging, "PIECE_BYTES", 65_536)
        monkeypatch.setattr(file_tier, "_BUFFERS", 2)

    def make_tier(self, limit_bytes: int, folder: str) -> Tier:
        return FileTier(self.copier(), folder, limit_bytes)  # plain memory works too
