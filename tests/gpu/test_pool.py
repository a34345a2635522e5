"""The pool and its streams on a GPU."""

from __future__ import annotations

from typing import Any

import pytest

from dynamemo.allocator import OutOfMemoryError, Pool
from tests.allocator.contracts import MIB, PoolContract

pytestmark = pytest.mark.gpu


class TestCudaPool(PoolContract):
    def make_pool(self, capacity_bytes: int) -> Pool:
        from dynamemo.allocator import cupy_memory

        return cupy_memory.new_pool(capacity_bytes)


def test_the_arena_is_taken_once_and_given_back(cupy: Any) -> None:
    from dynamemo.allocator import cupy_memory

    cupy.zeros(1)
    cupy.get_default_memory_pool().free_all_blocks()
    free_before = cupy.cuda.runtime.memGetInfo()[0]
    with cupy_memory.using_cupy_pool(cupy_memory.new_pool(512 * MIB)) as pool:
        taken = free_before - cupy.cuda.runtime.memGetInfo()[0]
        for _ in range(20):
            array = cupy.ones(50 * MIB, cupy.uint8)
            (array + array).sum()
        assert free_before - cupy.cuda.runtime.memGetInfo()[0] <= taken + 64 * MIB
        assert pool.current_bytes == 50 * MIB
    del array, pool
    assert abs(free_before - cupy.cuda.runtime.memGetInfo()[0]) <= 64 * MIB


def test_an_arena_larger_than_the_gpu_is_one_clear_error(cupy: Any) -> None:
    from dynamemo.allocator import cupy_memory

    with pytest.raises(OutOfMemoryError, match="arena"):
        cupy_memory.new_pool(1 << 50)
    cupy.ones(10).sum()


def test_a_block_is_reused_on_another_stream_only_behind_the_first(cupy: Any) -> None:
    """Freed on one stream while it still works, taken on another: values stay right."""
    from dynamemo.allocator import cupy_memory

    with cupy_memory.using_cupy_pool(cupy_memory.new_pool(64 * MIB)):
        slow, fast = cupy.cuda.Stream(non_blocking=True), cupy.cuda.Stream(non_blocking=True)
        matrix = cupy.ones((1500, 1500), cupy.float32)
        cupy.cuda.Device().synchronize()
        for _ in range(20):
            with slow:
                source = cupy.full(4 * MIB, 7, cupy.uint8)
                for _ in range(5):
                    matrix @ matrix
                result = source + cupy.uint8(1)
                del source
            with fast:
                other = cupy.zeros(4 * MIB, cupy.uint8)
            cupy.cuda.Device().synchronize()
            assert bool((result == 8).all())
            assert not bool(other.any())
            del result, other


def test_streams_that_are_gone_are_waited_for(cupy: Any) -> None:
    from dynamemo.allocator import cupy_memory

    with cupy_memory.using_cupy_pool(cupy_memory.new_pool(64 * MIB)) as pool:
        stream = cupy.cuda.Stream(non_blocking=True)
        with stream:
            array = cupy.ones(MIB)
        del stream
        pool.settle()
        del array
        assert bool((cupy.zeros(MIB) == 0).all())
        pool.validate()


def test_pinned_slabs(cupy: Any) -> None:
    from dynamemo.allocator import cupy_copier

    slab = cupy_copier.PinnedSlabs()(MIB)
    assert slab.capacity_bytes == MIB
    assert slab.address % 512 == 0
    slab.close()
    slab.close()
