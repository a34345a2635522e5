"""The device that the runtime is given: memory and placement as on a CUDA device, virtual seconds.

What is CUDA's: the arena is the budget less what is set aside, parked memory is never thought to be
fresh, host memory is pinned slabs in front of no file, and every array of the device, however
small, has its block in the pool. Nothing is ever written into the arena or the slabs, so no page of
them becomes resident.
"""

from __future__ import annotations

import contextlib
from typing import Any

import numpy

from benchmarks.rehearsing.gpu import Gpu
from benchmarks.rehearsing.phantom import Phantom, new
from benchmarks.rehearsing.roofline import Roofline
from benchmarks.rehearsing.virtual_time import Elapsed, UntouchedCopier
from dynamemo.allocator import Block, HostArena, HostTier, Pool, Tier
from dynamemo.device import HostDevice, Timer, members_if_counted
from dynamemo.storage import Array, View

#: Bytes a second of the link of an H200 host, each way (measured: `benchmarks/results`).
LINK_BYTES_PER_S = 55e9
#: What an H200 has free.
_FREE_BYTES = 139 << 30
#: As in `dynamemo.cuda_device`, which imports CuPy: what is set aside of a budget, and how much
#: pinned memory that is good for.
_SIDE_SHARE, _LEAST_SIDE_BYTES, _MOST_SIDE_BYTES = 64, 4 << 20, 256 << 20
_PINNED_PER_SIDE_BYTE = 400


class _CudaLikePool(Pool):
    """A pool that places blocks as a GPU's does."""

    __slots__ = ()

    _parked_share = 1.0


class RehearsedDevice(HostDevice):
    """A GPU that is not there.

    Parameters
    ----------
    link_bytes_per_s : float
        Each way.
    roofline : Roofline, optional
        What its kernels take.
    """

    has_host_tier = True

    def __init__(
        self, link_bytes_per_s: float = LINK_BYTES_PER_S, roofline: Roofline | None = None
    ) -> None:
        super().__init__()
        self.name = f"rehearsed:{link_bytes_per_s}"
        self.copier = self.clock = UntouchedCopier(link_bytes_per_s)
        self.gpu = Gpu(self.clock, roofline or Roofline())
        self._side_bytes = 0

    def free_bytes(self) -> int:
        """Return what an H200 has."""
        return _FREE_BYTES

    def make_pool(self, budget_bytes: int) -> Pool:
        """Map the arena, and set aside what `CudaDevice` does."""
        side_bytes = max(budget_bytes // _SIDE_SHARE, min(_LEAST_SIDE_BYTES, budget_bytes // 8))
        self._side_bytes = min(_MOST_SIDE_BYTES, side_bytes)
        arena = HostArena(budget_bytes - self._side_bytes)
        pool = _CudaLikePool(arena, budget_bytes=budget_bytes)
        pool.reserve(self._side_bytes)
        return pool

    def make_host_tier(self, limit_bytes: int) -> Tier:
        """Return slabs that nobody touches, as long as a GPU's."""
        limit_bytes = min(limit_bytes, self._side_bytes * _PINNED_PER_SIDE_BYTE)
        slab_bytes = max(1 << 20, min(64 << 20, limit_bytes // 8))
        return HostTier(self.copier, limit_bytes, slab_bytes=slab_bytes)

    def using_pool(
        self, pool: Pool, *, small_bytes: int | None
    ) -> contextlib.AbstractContextManager[Any]:
        """Serve phantoms from the pool, and nobody else."""
        return self.gpu.serving(pool)

    def owns(self, array: Array) -> bool:
        """Tell whether it is a phantom."""
        return type(array) is Phantom

    def is_ordered(self, block: Block) -> bool:
        """Return True: all work is on one stream."""
        return True

    def is_exclusive(self, arrays: list[Array], references: list[int]) -> bool:
        """Compare the reference counts of the arrays and their bases with what is known."""
        return members_if_counted(arrays, references, Phantom) is not None

    def allocate(self, nbytes: int) -> Any:
        """Return a flat phantom of bytes."""
        return new(nbytes, numpy.uint8)

    def array_in(self, memory: Any, view: View) -> Array:
        """Return a phantom whose base is the memory."""
        given = (view.shape, view.dtype, memory, view.offset, view.strides)
        return numpy.ndarray.__new__(Phantom, *given)

    def digest(self, array: Array) -> bytes:
        """Refuse: there is nothing to verify."""
        raise NotImplementedError("phantoms have no elements: rehearse without verify=True")

    def start_timer(self) -> float:
        """Return the clock's seconds."""
        return self.clock.now_s

    def stop_timer(self, start: float) -> Timer:
        """Return the virtual seconds since `start`."""
        return Elapsed(self.clock.now_s - start)
