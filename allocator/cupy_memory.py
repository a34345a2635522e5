"""Let CuPy's arrays live in a pool on a GPU.

Covers the GPU's arena and pool, and entering and leaving. With `cupy_copier` the only modules of
the allocator that import CuPy, so import them only where a GPU is asked for.

1. Each array has a memory object of its own with its true size, starting at its own base address:
   CuPy and Chainer rebuild pointers from it.
2. An array's death takes no lock and runs no Python code while the pool is in force: a weak
   reference's callback appends to the pool's list of late frees.
3. A block that one stream used is reused by another only behind an event. The host never waits,
   except where the stream is no more.
4. On leaving, the allocator that was in force before is in force again, after an exception too.
   Pools of several GPUs may be left in any order.
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

from dynamemo.allocator.block import BLOCK_SLOTS, UNPLACED, Block
from dynamemo.allocator.errors import AllocatorError, OutOfMemoryError
from dynamemo.allocator.pool import Pool

__all__ = [
    "CudaArena",
    "CudaPool",
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


# -- arena --


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

    __slots__ = ("_event", "_streams", "device_id")

    _parked_share = 1.0  # a GPU's arena has all its pages: to touch them costs nothing

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

    Made by `_allocator`, which sets what the base class has: `ptr`, the address of the first byte,
    `size`, the array's true length in bytes, and `device_id`.
    """

    __slots__ = ("__weakref__", "block")

    #: The block in the pool.
    block: Block


class _WatchedBlock(Block, weakref.ref[PoolMemory]):
    """A block that notices the death of the array's memory: it is a weak reference to that.

    The pool's table of live blocks keeps it alive for that long. One object instead of two.
    """

    __slots__ = (*BLOCK_SLOTS, "eager_watch")

    #: Set on leaving; see `_watch_eagerly`.
    eager_watch: _EagerWatch | None


class _EagerWatch(weakref.ref[PoolMemory]):
    """Notices the death of an array's memory a second time; a cycle with the block until then."""

    __slots__ = ("block",)
    block: _WatchedBlock


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
def _in_force(allocate: Any, former: Callable[[int], Any]) -> Iterator[None]:
    try:
        cupy.cuda.set_allocator(allocate)
    except ValueError:  # inside using_allocator, which is this thread's alone
        try:
            with cupy.cuda.using_allocator(allocate):
                yield
        finally:
            allocate.pass_on()
        return
    try:
        yield
    finally:
        _leave(allocate)


def _leave(allocate: Any) -> None:
    """Take an allocator out of force, also from under those that came after it."""
    allocate.pass_on()
    with _leaving:
        present: Any = cupy.cuda.get_allocator()
        if present is not allocate and getattr(present, "is_left", True) is False:
            return  # another GPU's pool came after this one, and passes by it from now on
        former = allocate.former
        while getattr(former, "is_left", False):
            former = former.former
        cupy.cuda.set_allocator(former)


_leaving = threading.Lock()


def _allocator(pool: CudaPool, former: Callable[[int], Any]) -> Any:
    own_id = pool.device_id
    place, register = pool.place, pool.register_stream
    note_death = pool.late.append
    get_device, get_stream = runtime.getDevice, cupy.cuda.get_current_stream
    is_own_always = runtime.getDeviceCount() == 1  # then nobody need ask for the current GPU
    is_left = False
    new_memory, new_block, new_pointer = PoolMemory, _WatchedBlock, cupy.cuda.MemoryPointer
    unplaced = UNPLACED

    def allocate(nbytes: int) -> Any:
        if not is_own_always and (is_left or get_device() != own_id):
            return former(nbytes)
        stream = get_stream(own_id)
        handle = stream.ptr
        if handle:
            handle = register(stream)
        memory = new_memory()
        # From here on the memory's death frees the block, whatever happens.
        block = new_block(memory, note_death)
        block.address = 0
        block.parking = unplaced
        place(block, nbytes, None, handle)
        memory.ptr = block.address
        memory.size = nbytes
        if own_id:  # a new one has 0
            memory.device_id = own_id
        memory.block = block
        return new_pointer(memory, 0)

    def pass_on() -> None:
        nonlocal is_own_always, is_left
        is_left, is_own_always = True, False  # all requests go to the former allocator
        chained.is_left = True
        del chained.pass_on  # a cycle, which would keep the pool alive

    chained: Any = allocate
    chained.former, chained.pass_on, chained.is_left = former, pass_on, False
    return chained


def _watch_eagerly(pool: CudaPool) -> None:
    """Let the arrays still alive free their blocks at once: nobody may use the pool again."""

    def free_at_once(watch: Any) -> None:
        block = watch.block
        del watch.block  # no cycle is left
        pool_of_block = block.pool
        pool_of_block.free_later(block)
        pool_of_block.try_settle()
        if pool_of_block.block_at(block.address) is not block:
            # The block's own callback follows and leaves it to a pool that nobody may use again.
            del block.pool

    for block in pool.blocks():
        if isinstance(block, _WatchedBlock) and (memory := block()) is not None:
            watch = _EagerWatch(memory, free_at_once)
            watch.block = block
            block.eager_watch = watch


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
