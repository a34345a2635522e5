"""Let CuPy's arrays live in a pool on a GPU.

Covers the GPU's arena, pool, copier and pinned slabs, and entering and leaving. The only module of
the allocator that imports CuPy, so import it only where a GPU is asked for.

1. Each array has a memory object of its own with its true size, starting at its own base address:
   CuPy and Chainer rebuild pointers from it.
2. An array's death takes no lock and runs no Python code while the pool is in force: a weak
   reference's callback appends to the pool's list of late frees.
3. A block that one stream used is reused by another only behind an event. The host never waits,
   except where the stream is no more.
4. On leaving, the allocator that was in force before is in force again, after an exception too.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import cache
from typing import Any

import cupy
from cupy.cuda import runtime

from dynamemo.allocator.block import Block
from dynamemo.allocator.errors import AllocatorError, OutOfMemoryError
from dynamemo.allocator.pool import Pool

__all__ = [
    "CudaArena",
    "CudaCopier",
    "CudaPool",
    "PinnedSlab",
    "PinnedSlabs",
    "PoolMemory",
    "as_cupy_error",
    "current_gpu",
    "free_device_bytes",
    "gpu_count",
    "new_pool",
    "root_block",
    "using_cupy_pool",
    "using_device",
]

_DEVICE_TO_HOST, _HOST_TO_DEVICE = 2, 1  # cudaMemcpyKind
_PER_THREAD_STREAM = 2  # handle of the default stream that each thread has for itself
_LASTING_STREAMS = (0, 1)  # handles of the default stream, which is never destroyed


# -- devices --


def gpu_count() -> int:
    """Return the number of GPUs that CuPy sees; 0 without a driver."""
    try:
        return int(runtime.getDeviceCount())
    except runtime.CUDARuntimeError:
        return 0


def current_gpu() -> int:
    """Return the number of the current GPU."""
    return int(runtime.getDevice())


def free_device_bytes() -> int:
    """Return the bytes that the current GPU can still give, with those in CuPy's own cache."""
    cached_bytes = int(cupy.get_default_memory_pool().free_bytes())
    return int(runtime.memGetInfo()[0]) + cached_bytes


def using_device(number: int) -> AbstractContextManager[object]:
    """Return a context in which GPU `number` is the current one."""
    device: AbstractContextManager[object] = cupy.cuda.Device(number)
    return device


# -- arena and slabs --


class CudaArena:
    """One raw allocation on the current GPU, released with the object.

    Parameters
    ----------
    capacity_bytes : int
        Length in bytes, at least 1.

    Raises
    ------
    OutOfMemoryError
        If the GPU has no such stretch, also after CuPy's own pool gave back what it caches.
    """

    def __init__(self, capacity_bytes: int) -> None:
        #: Length in bytes.
        self.capacity_bytes = capacity_bytes
        #: Number of the GPU.
        self.device_id = current_gpu()
        self._memory = _take_from_device(capacity_bytes)
        #: Address of the first byte, a multiple of 512.
        self.address = int(self._memory.ptr)

    def close(self) -> None:
        """Return the memory to the GPU, which waits for its work. Nothing in it may be in use."""
        self._memory = None


class PinnedSlab:
    """Page-locked host memory for `HostTier`, released with the object.

    Parameters
    ----------
    capacity_bytes : int
        Length in bytes; pinning takes about a second per GiB.

    Raises
    ------
    MemoryError
        If the machine cannot pin so much.
    """

    def __init__(self, capacity_bytes: int) -> None:
        #: Length in bytes.
        self.capacity_bytes = capacity_bytes
        try:
            self._memory = cupy.cuda.PinnedMemory(capacity_bytes)
        except runtime.CUDARuntimeError as error:
            raise MemoryError(f"cannot pin {capacity_bytes:,} bytes of host memory") from error
        #: Address of the first byte.
        self.address = int(self._memory.ptr)

    def close(self) -> None:
        """Unpin the memory and return it to the machine. Nothing in it may be in use."""
        self._memory = None


class PinnedSlabs:
    """Makes pinned slabs for `HostTier`."""

    def __call__(self, capacity_bytes: int) -> PinnedSlab:
        """Return a slab; errors as `PinnedSlab`."""
        return PinnedSlab(capacity_bytes)


class CudaCopier:
    """Copies on the current stream of the current GPU, and waits for that stream."""

    @property
    def is_host(self) -> bool:
        """Always false."""
        return False

    def to_host(self, host_address: int, device_address: int, nbytes: int) -> None:
        """Copy `nbytes` from the GPU to the host."""
        self._copy(host_address, device_address, nbytes, _DEVICE_TO_HOST)

    def to_device(self, device_address: int, host_address: int, nbytes: int) -> None:
        """Copy `nbytes` from the host to the GPU."""
        self._copy(device_address, host_address, nbytes, _HOST_TO_DEVICE)

    def _copy(self, target: int, source: int, nbytes: int, kind: int) -> None:
        if not nbytes:
            return
        stream = cupy.cuda.get_current_stream().ptr
        runtime.memcpyAsync(target, source, nbytes, kind, stream)
        runtime.streamSynchronize(stream)


def _take_from_device(capacity_bytes: int) -> Any:
    for is_last_try in (False, True):
        try:
            return cupy.cuda.Memory(capacity_bytes)
        except runtime.CUDARuntimeError as error:
            if is_last_try:
                raise _arena_error(capacity_bytes) from error
            cupy.get_default_memory_pool().free_all_blocks()
    raise AssertionError


def _arena_error(capacity_bytes: int) -> OutOfMemoryError:
    free_bytes, total_bytes = (int(n) for n in runtime.memGetInfo())
    error = OutOfMemoryError(
        requested_bytes=capacity_bytes,
        budget_bytes=total_bytes,
        in_use_bytes=total_bytes - free_bytes,
        feasible_bytes=total_bytes - free_bytes + capacity_bytes,
        largest_free_bytes=free_bytes,
        function="the pool's arena, which must be smaller than what the GPU has free",
    )
    return as_cupy_error(error)


# -- errors --


def as_cupy_error(error: OutOfMemoryError) -> OutOfMemoryError:
    """Return the same error, as one that is CuPy's own ``OutOfMemoryError`` too."""
    return _rebuild_cupy_error(error.fields())


@cache
def _cupy_error_class() -> type[OutOfMemoryError]:
    class CupyOutOfMemoryError(OutOfMemoryError, cupy.cuda.memory.OutOfMemoryError):
        __doc__ = OutOfMemoryError.__doc__

        def __reduce__(self) -> tuple[object, ...]:
            return (_rebuild_cupy_error, (self.fields(),))

    return CupyOutOfMemoryError


def _rebuild_cupy_error(fields: dict[str, int | str | None]) -> OutOfMemoryError:
    return _cupy_error_class()(**fields)  # type: ignore[arg-type]


# -- pool --


class CudaPool(Pool):
    """A pool on a GPU.

    Parameters
    ----------
    arena : CudaArena
        The memory.
    budget_bytes : int, optional
        The limit, at most the arena's capacity (the default).
    """

    def __init__(self, arena: CudaArena, *, budget_bytes: int | None = None) -> None:
        super().__init__(arena, budget_bytes=budget_bytes)
        #: Number of the GPU.
        self.device_id = arena.device_id
        self._streams: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
        self._event: Any = None

    def register_stream(self, stream: Any) -> int:
        """Make a stream known, so that `Block.stream` may name it; return its handle."""
        handle = int(stream.ptr)
        if handle == _PER_THREAD_STREAM:
            return -threading.get_ident()  # the same handle is another stream in each thread
        if handle not in _LASTING_STREAMS:
            self._streams[handle] = stream
        return handle

    def _order(self, from_stream: int, to_stream: int) -> None:
        if from_stream == to_stream:
            return
        from_handle, to_handle = self._handle(from_stream), self._handle(to_stream)
        with cupy.cuda.Device(self.device_id):
            if from_handle is None or to_handle is None:
                # Nothing can be recorded on a stream that is gone, or on another thread's own.
                runtime.deviceSynchronize()
                return
            if self._event is None:
                self._event = cupy.cuda.Event(disable_timing=True)
            runtime.eventRecord(self._event.ptr, from_handle)
            runtime.streamWaitEvent(to_handle, self._event.ptr)

    def _handle(self, stream: int) -> int | None:
        """Return the handle by which this thread may name a stream; None where it may not."""
        if stream < 0:
            return _PER_THREAD_STREAM if stream == -threading.get_ident() else None
        return stream if stream in _LASTING_STREAMS or stream in self._streams else None

    def _out_of_memory(self, requested_bytes: int, block_bytes: int) -> OutOfMemoryError:
        return as_cupy_error(super()._out_of_memory(requested_bytes, block_bytes))


def new_pool(budget_bytes: int) -> CudaPool:
    """Return a pool of `budget_bytes` on the current GPU. Errors as `CudaArena`."""
    return CudaPool(CudaArena(budget_bytes))


class PoolMemory(cupy.cuda.BaseMemory):
    """The memory of one array; its block goes back to the pool when it dies, in whatever thread.

    Parameters
    ----------
    block : Block
        The memory; made over to this object.
    device_id : int
        Number of the GPU.
    """

    __slots__ = ("__weakref__", "block")

    def __init__(self, block: Block, device_id: int) -> None:
        #: Address of the first byte.
        self.ptr = block.address  # type: ignore[misc]
        #: True length of the array in bytes.
        self.size = block.requested_bytes  # type: ignore[misc]
        self.device_id = device_id  # type: ignore[misc]
        #: The block in the pool.
        self.block = block


class _Watch(weakref.ref[PoolMemory]):
    """Notices the death of an array's memory.

    The block keeps it alive: a cycle, until the block is freed.
    """

    __slots__ = ("block",)
    block: Block

    def release(self, pool: Pool) -> None:
        """Free the block; a second call does nothing."""
        block = self.block
        block.handle = None
        if pool.block_at(block.address) is block:
            pool.free(block)


def root_block(array: Any) -> Block | None:
    """Return the block of a CuPy array or of the array it is a view of; None for foreign memory."""
    memory = array.data.mem
    return memory.block if isinstance(memory, PoolMemory) else None


# -- entering and leaving --


@contextmanager
def using_cupy_pool(pool: Pool) -> Iterator[Pool]:
    """Take the memory of new CuPy arrays from a pool, in all threads.

    Where a ``cupy.cuda.using_allocator`` is active in this thread, CuPy does not allow that, and
    only this thread is affected. Requests while another GPU is the current one go to the former
    allocator. Arrays outlive the context. A request that does not fit raises an `OutOfMemoryError`
    that is CuPy's as well.

    Parameters
    ----------
    pool : CudaPool
        Kept alive as long as an array of it lives.

    Raises
    ------
    AllocatorError
        If the present allocator gives managed memory; nothing is changed then.
    """
    if not isinstance(pool, CudaPool):
        raise TypeError(f"CuPy needs a CudaPool, not a {type(pool).__name__}")
    former = cupy.cuda.get_allocator()
    _refuse_managed(former)
    allocate = _allocator(pool, former)
    try:
        with _in_force(allocate, former):
            yield pool
    finally:
        _watch_eagerly(pool)
        pool.settle()


@contextmanager
def _in_force(allocate: Callable[[int], Any], former: Callable[[int], Any]) -> Iterator[None]:
    try:
        cupy.cuda.set_allocator(allocate)
    except ValueError:  # inside using_allocator, which is this thread's alone
        with cupy.cuda.using_allocator(allocate):
            yield
        return
    try:
        yield
    finally:
        cupy.cuda.set_allocator(former)


def _allocator(pool: CudaPool, former: Callable[[int], Any]) -> Callable[[int], Any]:
    device_id = pool.device_id
    note_death = pool.late.append
    get_device, get_stream = runtime.getDevice, cupy.cuda.get_current_stream
    new_pointer = cupy.cuda.MemoryPointer

    def allocate(nbytes: int) -> Any:
        if get_device() != device_id:
            return former(nbytes)
        stream = get_stream()
        handle = stream.ptr
        if handle:
            handle = pool.register_stream(stream)
        block = pool.allocate(nbytes, stream=handle)
        memory = PoolMemory(block, device_id)
        watch = _Watch(memory, note_death)
        watch.block = block
        block.handle = watch
        return new_pointer(memory, 0)

    return allocate


def _watch_eagerly(pool: CudaPool) -> None:
    """Let the arrays still alive free their blocks at once: nobody may use the pool again."""

    def free_at_once(watch: Any) -> None:
        pool_of_block = watch.block.pool
        pool_of_block.free_later(watch)
        pool_of_block.try_settle()

    for block in pool.blocks():
        memory = block.handle() if isinstance(block.handle, _Watch) else None
        if memory is not None:
            watch = _Watch(memory, free_at_once)
            watch.block = block
            block.handle = watch


def _refuse_managed(allocator: Callable[[int], Any]) -> None:
    if getattr(allocator, "__self__", None) is cupy.get_default_memory_pool():
        return  # known to be device memory
    memory = allocator(1).mem
    if isinstance(memory, cupy.cuda.ManagedMemory) or (
        getattr(memory, "identity", None) == "ManagedMemory"
    ):
        raise AllocatorError(
            "CuPy's present allocator gives managed (unified) memory, for which a byte "
            "budget means nothing; "
            "call cupy.cuda.set_allocator(cupy.get_default_memory_pool().malloc) first"
        )
