"""Hold the one stretch of host memory that a pool divides.

Covers the CPU's arena; the GPU's is `cupy_memory.CudaArena`. Does not place anything in it:
`heap.BlockHeap` does.

1. Pages are taken from the machine when first used, not when the arena is made.
2. The mapping is private: a forked child has its own copy, so it can neither see nor harm its
   parent's arrays.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import platform
import sys
from typing import Protocol

__all__ = ["Arena", "HostArena"]

#: Below this length huge pages only cost memory.
_HUGE_PAGES_FROM_BYTES = 4 << 20


class Arena(Protocol):
    """One contiguous stretch of device memory."""

    @property
    def address(self) -> int:
        """Address of the first byte, a multiple of 4096 on a host and of 512 on a GPU."""

    @property
    def capacity_bytes(self) -> int:
        """Length in bytes."""

    def close(self) -> None:
        """Return the memory to the device. Nothing in it may be in use. May be called twice."""


class HostArena:
    """One anonymous private mapping of host memory, released with the object.

    Parameters
    ----------
    capacity_bytes : int
        Length in bytes, at least 1.

    Raises
    ------
    OSError
        If the machine refuses the mapping.
    """

    def __init__(self, capacity_bytes: int) -> None:
        #: Length in bytes.
        self.capacity_bytes = capacity_bytes
        self._mapping = _map_private(capacity_bytes)
        #: Address of the first byte.
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self._mapping))

    def close(self) -> None:
        """Unmap the memory. Nothing in it may be in use."""
        self._mapping.close()


def _map_private(capacity_bytes: int) -> mmap.mmap:
    if sys.platform == "win32":
        return mmap.mmap(-1, capacity_bytes)
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    mapping = mmap.mmap(-1, capacity_bytes, flags=flags | _no_reserve_flag())
    if capacity_bytes >= _HUGE_PAGES_FROM_BYTES and hasattr(mmap, "MADV_HUGEPAGE"):
        # NumPy does the same for its own large arrays; not every kernel can.
        with contextlib.suppress(OSError):
            mapping.madvise(mmap.MADV_HUGEPAGE)
    return mapping


def _no_reserve_flag() -> int:
    named = getattr(mmap, "MAP_NORESERVE", None)  # Python 3.13 and later
    if named is not None:
        return int(named)
    is_known = sys.platform == "linux" and platform.machine() in ("x86_64", "aarch64")
    return 0x4000 if is_known else 0
