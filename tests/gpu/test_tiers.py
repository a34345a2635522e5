"""Host and file tiers with a GPU as the device."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from dynamemo.allocator import FileTier, HostTier, Tier
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
        from dynamemo.allocator import cupy_memory

        return cupy_memory.CudaCopier()


class TestPinnedTier(OnGpu):
    def make_tier(self, limit_bytes: int, folder: str) -> Tier:
        from dynamemo.allocator import cupy_memory

        slabs = cupy_memory.PinnedSlabs()
        return HostTier(self.copier(), limit_bytes, slabs=slabs, slab_bytes=MIB)


class TestFileTier(OnGpu):
    def make_tier(self, limit_bytes: int, folder: str) -> Tier:
        return FileTier(self.copier(), folder, limit_bytes)
