"""A CUDA device through CuPy. Imported only when one is asked for."""

from __future__ import annotations

import contextlib
import hashlib
import sys
from typing import Any

import cupy

from dynamemo.allocator import Block, Copier, FileTier, HostTier, Pool, Tier
from dynamemo.allocator.cupy_copier import CudaCopier, PinnedSlabs
from dynamemo.allocator.cupy_memory import CudaArena, CudaPool, PoolMemory, using_cupy_pool
from dynamemo.device import Timer, members_if_counted
from dynamemo.errors import DynamemoError
from dynamemo.storage import Array, View

#: Part of the budget that is not given to arrays: the device's page tables for pinned host memory
#: (measured on an H200: 2 MiB a GiB) and kernels that are loaded while training come out of it.
_SIDE_SHARE = 64
_MOST_SIDE_BYTES = 256 << 20
#: The driver takes whole pieces of 2 MiB, for whatever it is.
_LEAST_SIDE_BYTES = 4 << 20
#: Pinned host bytes for each byte set aside.
_PINNED_PER_SIDE_BYTE = 400


def device_count() -> int:
    """Return how many CUDA devices the process sees; 0 where the driver cannot be used."""
    try:
        return int(cupy.cuda.runtime.getDeviceCount())
    except cupy.cuda.runtime.CUDARuntimeError:
        return 0


class _EventPair:
    """Two events around some work; their distance is read once both have happened."""

    __slots__ = ("_start", "_stop")

    def __init__(self, start: Any, stop: Any) -> None:
        self._start = start
        self._stop = stop

    def elapsed_s(self) -> float | None:
        if not self._stop.done:
            return None
        return float(cupy.cuda.get_elapsed_time(self._start, self._stop)) / 1e3


class CudaDevice:
    """One CUDA device: CuPy arrays.

    Parameters
    ----------
    index : int, optional
        Number of the device; default: the current one.

    Raises
    ------
    DynamemoError
        Where there is no such device.
    """

    has_host_tier = True

    def __init__(self, index: int | None = None) -> None:
        count = device_count()
        if count == 0 or (index is not None and not 0 <= index < count):
            raise DynamemoError(
                f"CUDA device {'(current)' if index is None else index} does not exist: "
                f"{count} device(s) are visible to this process"
            )
        self._index = cupy.cuda.runtime.getDevice() if index is None else index
        self.name = f"cuda:{self._index}"
        with cupy.cuda.Device(self._index):
            self._copier = CudaCopier()
        self.copier: Copier = self._copier
        self._side_bytes = 0

    def free_bytes(self) -> int:
        """Return the bytes that the device can still give, CuPy's own cache given back first."""
        with cupy.cuda.Device(self._index):
            cupy.get_default_memory_pool().free_all_blocks()
            return int(cupy.cuda.runtime.memGetInfo()[0])

    def make_pool(self, budget_bytes: int) -> Pool:
        """Take the arena.

        It is the budget less what CuPy's own pool holds in arrays that are alive, and less what is
        set aside for what the runtime makes the device take besides.
        """
        with cupy.cuda.Device(self._index):
            default = cupy.get_default_memory_pool()
            default.free_all_blocks()
            foreign_bytes = int(default.total_bytes())
            side_bytes = max(budget_bytes // _SIDE_SHARE, min(_LEAST_SIDE_BYTES, budget_bytes // 8))
            if foreign_bytes + side_bytes >= budget_bytes:
                raise DynamemoError(
                    f"arrays made before the runtime already take {foreign_bytes:,} bytes of the "
                    f"device, the budget is {budget_bytes:,}: raise it, or make the model inside"
                )
            self._side_bytes = min(_MOST_SIDE_BYTES, side_bytes)
            reserved_bytes = foreign_bytes + self._side_bytes
            pool = CudaPool(CudaArena(budget_bytes - reserved_bytes), budget_bytes=budget_bytes)
            pool.reserve(reserved_bytes)
            return pool

    def make_host_tier(self, limit_bytes: int) -> Tier:
        """Return the tier of pinned host memory, within what is set aside for pinning it."""
        limit_bytes = min(limit_bytes, self._side_bytes * _PINNED_PER_SIDE_BYTE)
        slab_bytes = max(1 << 20, min(64 << 20, limit_bytes // 8))
        return HostTier(
            self.copier,
            limit_bytes,
            slabs=PinnedSlabs(self._index),
            slab_bytes=slab_bytes,
            ahead_bytes=slab_bytes,
        )

    def make_file_tier(self, folder: str | None, limit_bytes: int | None) -> Tier:
        """Return a tier behind the host's memory, through pinned buffers."""
        return FileTier(self.copier, folder, limit_bytes, slabs=PinnedSlabs(self._index))

    def using_pool(
        self, pool: Pool, *, small_bytes: int | None
    ) -> contextlib.AbstractContextManager[Any]:
        """Serve CuPy's memory from the pool, in all threads."""
        return using_cupy_pool(pool)

    def owns(self, array: Array) -> bool:
        """Tell whether it is a CuPy array of this device."""
        return type(array) is cupy.ndarray and array.data.device_id == self._index

    def block_of(self, array: Array) -> Block | None:
        """Return the pool block under an array, None where the memory is not from a pool."""
        memory = array.data.mem
        return memory.block if type(memory) is PoolMemory else None

    def is_ordered(self, block: Block) -> bool:
        """Tell whether the block's stream is one that copies wait for."""
        return block.stream in self._copier.compute_streams()

    def view_of(self, array: Array, block: Block) -> View:
        """Return how the array lies in its block."""
        return View(array.data.ptr - block.address, array.shape, array.dtype, array.strides)

    def layout_of(self, array: Array) -> tuple[View, int]:
        """Return how the array lies in its memory object, and the bytes of that."""
        memory = array.data.mem
        view = View(array.data.ptr - memory.ptr, array.shape, array.dtype, array.strides)
        return view, int(memory.size)

    def is_exclusive(self, arrays: list[Array], references: list[int]) -> bool:
        """Compare the reference counts of arrays, bases, pointers and memory with what is known."""
        members = members_if_counted(arrays, references, cupy.ndarray)
        return members is not None and _is_memory_exclusive(members)

    def allocate(self, nbytes: int) -> Any:
        """Return a pointer to new memory from CuPy's current allocator."""
        return cupy.cuda.alloc(nbytes)

    def address_of(self, memory: Any) -> int:
        """Return the device address."""
        return int(memory.ptr)

    def array_in(self, memory: Any, view: View) -> Array:
        """Return an array over memory that keeps the memory alive."""
        return cupy.ndarray(view.shape, view.dtype, memory + view.offset, strides=view.strides)

    def memory_of(self, array: Array) -> Any:
        """Return a pointer to the start of the array's memory object."""
        return cupy.cuda.MemoryPointer(array.data.mem, 0)

    def digest(self, array: Array) -> bytes:
        """Return a hash of the array's elements. Synchronises; copies to the host."""
        return hashlib.blake2b(cupy.ascontiguousarray(array).get().tobytes()).digest()

    def start_timer(self) -> Any:
        """Record an event on the current stream."""
        event = cupy.cuda.Event()
        event.record()
        return event

    def stop_timer(self, start: Any) -> Timer:
        """Record the second event; its time is known when the device got there."""
        return _EventPair(start, self.start_timer())


def _is_memory_exclusive(members: list[Array]) -> bool:
    """Tell whether only these arrays refer to their pointers, and only those to their memory."""
    pointers = {id(member.data): member.data for member in members}
    users: dict[int, int] = {}
    for member in members:
        users[id(member.data)] = users.get(id(member.data), 0) + 1
    memories: dict[int, Any] = {}
    pointer_count: dict[int, int] = {}
    for key in pointers:
        # `pointers` and getrefcount's argument are two more.
        if sys.getrefcount(pointers[key]) > users[key] + 2:
            return False
        memory = pointers[key].mem
        memories[id(memory)] = memory
        pointer_count[id(memory)] = pointer_count.get(id(memory), 0) + 1
        del memory
    return all(sys.getrefcount(memories[key]) <= pointer_count[key] + 2 for key in memories)
