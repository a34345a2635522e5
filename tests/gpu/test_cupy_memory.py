"""CuPy's arrays in a pool (cases A-19 and A-20)."""

from __future__ import annotations

import gc
import pickle
import threading
import weakref
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from dynamemo.allocator import AllocatorError, OutOfMemoryError, Pool, using_pool
from tests.allocator.contracts import MIB

pytestmark = pytest.mark.gpu


@pytest.fixture
def memory() -> Any:
    from dynamemo.allocator import cupy_memory

    return cupy_memory


@pytest.fixture
def entered(memory: Any) -> Iterator[Pool]:
    with memory.using_cupy_pool(memory.new_pool(256 * MIB)) as pool:
        yield pool


def test_operations_give_the_same_results(cupy: Any, entered: Pool) -> None:
    draw = np.random.default_rng(0)
    a, b = draw.standard_normal((2, 300, 200))
    x, y = cupy.asarray(a), cupy.asarray(b)
    np.testing.assert_array_equal((x + y).get(), a + b)
    np.testing.assert_array_equal(cupy.sort(x, axis=1).get(), np.sort(a, axis=1))
    np.testing.assert_array_equal(cupy.argsort(x, axis=0).get(), np.argsort(a, axis=0))
    np.testing.assert_allclose((x @ y.T).get(), a @ b.T)
    np.testing.assert_allclose(cupy.cumsum(x).get(), np.cumsum(a))
    np.testing.assert_array_equal(x[:, ::3].T.copy().get(), a[:, ::3].T)
    np.testing.assert_array_equal(cupy.concatenate([x, y]).get(), np.concatenate([a, b]))
    np.testing.assert_allclose(cupy.fft.fft(x).get(), np.fft.fft(a))
    assert not cupy.zeros(MIB).any()
    entered.validate()


def test_each_array_has_memory_of_its_own(cupy: Any, memory: Any, entered: Pool) -> None:
    first, second = cupy.ones(1000, cupy.float32), cupy.ones(3, cupy.float32)
    for array in (first, second):
        assert array.data.ptr == array.data.mem.ptr
        assert array.data.mem.size == array.nbytes
    block = memory.root_block(first[5:])
    assert block is memory.root_block(first)
    assert entered.block_at(first.data.ptr) is block
    empty = cupy.empty(0)
    assert empty.size == 0
    assert entered.live_blocks == 3


def test_rebuilt_pointers_see_the_right_bytes(cupy: Any, entered: Pool) -> None:
    """What Chainer's `F.as_strided` does."""
    array = cupy.arange(32, dtype=cupy.float32)
    pointer = cupy.cuda.MemoryPointer(array.data.mem, 8)
    view = cupy.ndarray((2, 2), cupy.float32, pointer, strides=(8, 4))
    del array, pointer
    assert view.get().tolist() == [[2, 3], [4, 5]]
    assert entered.live_blocks == 1
    del view
    assert entered.live_blocks == 0


def test_arrays_outlive_the_context_and_the_pool_goes_with_the_last(cupy: Any, memory: Any) -> None:
    pool = memory.new_pool(16 * MIB)
    reference = weakref.ref(pool)
    with memory.using_cupy_pool(pool):
        kept = cupy.arange(1000)
    del pool
    assert int(kept.sum()) == 999 * 500
    gc.disable()
    try:
        del kept
        assert reference() is None
    finally:
        gc.enable()


def test_out_of_memory_is_cupys_too(cupy: Any, entered: Pool) -> None:
    with pytest.raises(cupy.cuda.memory.OutOfMemoryError) as caught:
        cupy.ones(1 << 30)
    assert isinstance(caught.value, OutOfMemoryError)
    assert caught.value.budget_bytes == 256 * MIB
    twin = pickle.loads(pickle.dumps(caught.value))
    assert (type(twin), str(twin)) == (type(caught.value), str(caught.value))
    assert int(cupy.ones(10).sum()) == 10


def test_limit_counts_only_what_is_alive(cupy: Any, entered: Pool) -> None:
    """Case A-09, also with a reference cycle."""
    array = cupy.ones(128 * MIB, cupy.uint8)
    del array
    holder: list[Any] = [cupy.ones(128 * MIB, cupy.uint8)]
    holder.append(holder)
    del holder
    assert cupy.ones(192 * MIB, cupy.uint8).size


def test_a_b_a_pattern(cupy: Any, entered: Pool) -> None:
    """Case A-08."""
    unit = 32 * MIB
    first = cupy.empty(unit, cupy.uint8)
    cupy.empty(4 * unit, cupy.uint8)
    rest = [cupy.empty(unit, cupy.uint8) for _ in range(2)]
    assert cupy.empty(4 * unit, cupy.uint8).size
    del first, rest


def test_nesting_restores_exactly(cupy: Any, memory: Any) -> None:
    """Case A-19."""
    before = cupy.cuda.get_allocator()
    other = cupy.cuda.MemoryPool()
    arrays = []
    for _ in range(2):
        with memory.using_cupy_pool(memory.new_pool(16 * MIB)) as pool:
            inside = cupy.cuda.get_allocator()
            arrays.append(cupy.ones(1000))
            with cupy.cuda.using_allocator(other.malloc):
                arrays.append(cupy.ones(1000))
                with pytest.raises(ValueError, match="using_allocator"):
                    cupy.cuda.set_allocator(before)
            assert cupy.cuda.get_allocator() is inside
            arrays.append(arrays[-1] + 1)
            assert pool.live_blocks == 2
        assert cupy.cuda.get_allocator() == before
    with pytest.raises(KeyError), memory.using_cupy_pool(memory.new_pool(MIB)):
        raise KeyError
    assert cupy.cuda.get_allocator() == before
    assert [int(a.sum()) for a in arrays] == [1000, 1000, 2000] * 2


def test_inside_using_allocator(cupy: Any, memory: Any) -> None:
    other = cupy.cuda.MemoryPool()
    with cupy.cuda.using_allocator(other.malloc):
        inside = cupy.cuda.get_allocator()
        with memory.using_cupy_pool(memory.new_pool(MIB)) as pool:
            array = cupy.ones(10)
            assert pool.live_blocks == 1
        assert cupy.cuda.get_allocator() == inside
    assert int(array.sum()) == 10


def test_managed_memory_is_refused(cupy: Any, memory: Any) -> None:
    """Case A-18."""
    managed = cupy.cuda.MemoryPool(cupy.cuda.malloc_managed)
    pool = memory.new_pool(MIB)
    for allocator in (managed.malloc, cupy.cuda.malloc_managed):
        with (
            cupy.cuda.using_allocator(allocator),
            pytest.raises(AllocatorError, match="managed"),
            memory.using_cupy_pool(pool),
        ):
            pass


def test_threads_share_a_pool_under_pressure(cupy: Any, memory: Any) -> None:
    """Case A-20: every thread sees only its own data, and calls on CuPy's pool stay harmless."""
    failures: list[BaseException] = []

    def work(number: int) -> None:
        try:
            for step in range(100):
                try:
                    array = cupy.full(1 + (number * 7919 + step * 104729) % MIB, number + 1, "u1")
                    assert bool((array == number + 1).all())
                except OutOfMemoryError:
                    continue
                cupy.get_default_memory_pool().free_all_blocks()
                assert cupy.get_default_memory_pool().used_bytes() >= 0
        except BaseException as error:
            failures.append(error)

    with memory.using_cupy_pool(memory.new_pool(6 * MIB)) as pool:
        threads = [threading.Thread(target=work, args=(n,)) for n in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not failures
        pool.validate()
        assert pool.live_blocks == 0


def test_using_pool_takes_the_gpu(cupy: Any) -> None:
    with using_pool("16MiB") as pool:
        array = cupy.ones(MIB)
        assert pool.current_bytes == 8 * MIB
    assert int(array.sum()) == MIB
    with pytest.raises(ValueError, match="no device"), using_pool("1MiB", device="cuda:999"):
        pass
