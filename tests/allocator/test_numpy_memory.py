"""NumPy's arrays in a pool."""

from __future__ import annotations

import contextvars
import gc
import os
import pickle
import subprocess
import sys
import textwrap
import threading
import weakref
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy._core import multiarray

from dynamemo.allocator import (
    HostArena,
    OutOfMemoryError,
    Pool,
    numpy_capi,
    root_array,
    using_numpy_pool,
    using_pool,
)
from dynamemo.allocator import numpy_handler as handler_module
from dynamemo.allocator import numpy_records as records_module
from tests.allocator.contracts import MIB, Evictor

BIG = 4000  # bytes: from here on the pool serves


@pytest.fixture
def pool() -> Pool:
    return Pool(HostArena(16 * MIB))


@pytest.fixture
def entered(pool: Pool) -> Iterator[Pool]:
    with using_numpy_pool(pool):
        yield pool


def run_script(body: str) -> None:
    """Run a script in a fresh interpreter; it must end well and say nothing."""
    script = "import numpy as np\nfrom dynamemo.allocator import *\n" + textwrap.dedent(body)
    done = subprocess.run(
        [sys.executable, "-X", "faulthandler", "-c", script],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
    )
    assert (done.returncode, done.stderr) == (0, ""), done.stderr


OPERATIONS: dict[str, Any] = {
    "add": lambda a: a + a.astype(np.float64)[::-1],
    "copy": lambda a: a.copy(),
    "sort": lambda a: np.sort(a, axis=0),
    "argsort": lambda a: np.argsort(a, axis=0, kind="stable"),
    "argsort strided": lambda a: np.argsort(np.repeat(a, 2, axis=0)[::2], axis=0, kind="stable"),
    "transpose": lambda a: np.ascontiguousarray(a.T),
    "zeros": lambda a: np.zeros_like(a),
    "concatenate": lambda a: np.concatenate([a, a]),
    "pickle": lambda a: pickle.loads(pickle.dumps(a)),
    "iterator": lambda a: np.fromiter((int(x) for x in a.ravel()[:500]), np.int64),
    "where": lambda a: np.argwhere(a > 0),
    "unique": lambda a: np.unique(a),
    "sum": lambda a: a.sum(axis=0),
    "dot": lambda a: a.reshape(len(a), -1).astype(np.float32).T @ a.reshape(len(a), -1),
    "records": lambda a: np.sort(
        np.rec.fromarrays([a.ravel().astype("i1"), a.ravel().astype(">i4")], dtype="i1,>i4")
    ),
}


@given(
    dtype=st.sampled_from(["u1", "i4", ">i4", "f4", "f8"]),
    shape=st.lists(st.integers(1, 12), min_size=1, max_size=3),
    names=st.lists(st.sampled_from(sorted(OPERATIONS)), min_size=1, max_size=8),
)
@settings(max_examples=60, deadline=None)
def test_programs_give_the_same_results(dtype: str, shape: list[int], names: list[str]) -> None:
    start = (np.arange(np.prod(shape)) * 37 % 101).reshape(shape).astype(dtype)
    plain = [OPERATIONS[name](start) for name in names]
    pool = Pool(HostArena(16 * MIB))
    with using_numpy_pool(pool, small_bytes=1):
        mine = [OPERATIONS[name](start) for name in names]
        for ours, theirs in zip(mine, plain, strict=True):
            assert (ours.dtype, ours.strides) == (theirs.dtype, theirs.strides)
            assert ours.tobytes() == theirs.tobytes()
        pool.validate()
        del mine, ours, theirs
    assert pool.live_blocks == 0
    assert pool.outside_bytes == 0


def test_large_arrays_are_in_the_pool_and_small_ones_count(entered: Pool) -> None:
    large, small = np.ones(BIG, np.uint8), np.ones(100, np.uint8)
    block = root_array(large)[1]
    assert block is not None
    assert block.requested_bytes == BIG
    assert root_array(small) == (small, None)
    assert entered.outside_bytes == 100
    del small
    assert entered.outside_bytes == 0
    del large, block
    assert entered.live_blocks == 0


def test_root_array_goes_through_views(entered: Pool) -> None:
    owner = np.zeros((50, 60))
    views = [owner[3:, ::2].T, owner.reshape(-1)[5:], np.frombuffer(memoryview(owner), "u1")]
    for view in views:
        root, block = root_array(view)
        assert root is owner
        assert block is entered.block_at(owner.ctypes.data)
    foreign = np.frombuffer(bytearray(5000), "u1")[3:]
    assert root_array(foreign)[1] is None


def test_strides_are_kept(entered: Pool) -> None:
    array = np.ones((6, 7, 8)).transpose(2, 0, 1)
    assert np.empty_like(array).strides == array.strides
    assert array.copy("K").strides == array.strides


def test_arrays_outlive_the_context_and_the_pool_goes_with_the_last() -> None:
    pool = Pool(HostArena(MIB))
    reference = weakref.ref(pool)
    with using_numpy_pool(pool):
        first, second = np.arange(1000), np.arange(2000)
        small = np.arange(5)
    del pool
    first += 1
    del first
    assert reference() is not None
    assert second.sum() == 1999 * 1000
    gc.disable()
    try:
        del second
        assert reference() is None  # unmapped at once
    finally:
        gc.enable()
    assert small.tolist() == [0, 1, 2, 3, 4]


def test_a_left_pool_that_is_kept_shows_each_free(pool: Pool) -> None:
    with using_numpy_pool(pool):
        arrays = [np.ones(BIG) for _ in range(5)]
    for left in range(5, 0, -1):
        assert pool.live_blocks == left
        arrays.pop()
    assert pool.live_blocks == 0


def test_a_free_while_an_exception_is_raised_keeps_the_exception(pool: Pool) -> None:
    def fail() -> None:
        raise LookupError("the original")

    def provoke() -> None:
        with pytest.raises(LookupError, match="the original"):
            print(np.ones(BIG), fail())

    with using_numpy_pool(pool):
        provoke()
        kept = [np.ones(BIG)]
        assert pool.live_blocks == 1

    def drop_and_fail(array: Any) -> None:
        del array
        fail()

    with pytest.raises(LookupError, match="the original"):
        print(kept.pop(), fail())
    assert pool.live_blocks == 0


def test_results_of_a_sort_stay_alive(entered: Pool) -> None:
    """Sorts free NULL by the handler that made their result: that must free nothing."""
    results = [np.argsort(np.arange(3000) * 7919 % 3001) for _ in range(20)]
    others = [np.full(3000, n) for n in range(20)]
    for result in results:
        assert sorted(result) == list(range(3000))
    assert entered.live_blocks == 40
    del results, result, others
    assert entered.live_blocks == 0


def test_zeros_are_zero_on_used_memory(entered: Pool) -> None:
    for _ in range(3):
        np.full(BIG, 255, np.uint8)
        zeros = np.zeros(BIG, np.uint8)
        assert not zeros.any()
        del zeros


@pytest.mark.parametrize("old", [3, 100, 2000, 50_000])
@pytest.mark.parametrize("new", [1, 90, 1900, 2048, 60_000])
def test_resize_keeps_the_contents(entered: Pool, old: int, new: int) -> None:
    array = np.arange(old, dtype=np.uint8)
    array.resize(new, refcheck=False)
    common = min(old, new)
    assert array[:common].tolist() == list(np.arange(common, dtype=np.uint8))
    assert not array[common:].any()
    entered.validate()
    del array
    assert (entered.live_blocks, entered.outside_bytes) == (0, 0)


def test_resize_after_leaving(pool: Pool) -> None:
    with using_numpy_pool(pool):
        array = np.arange(1000.0)
    array.resize(5000, refcheck=False)
    assert array[:1000].sum() == 999 * 500
    assert pool.live_blocks == 1
    del array
    assert pool.live_blocks == 0


def test_contexts_nest_and_restore_exactly() -> None:
    outer, inner = Pool(HostArena(MIB)), Pool(HostArena(MIB))
    before = numpy_capi.set_handler(numpy_capi.default_handler)
    numpy_capi.set_handler(before)
    with using_numpy_pool(outer):
        a = np.ones(BIG)
        with using_numpy_pool(inner):
            b = np.ones(BIG)
            with pytest.raises(KeyError), using_numpy_pool(outer):
                c = np.ones(BIG)
                raise KeyError
        d = np.ones(BIG)
        assert (outer.live_blocks, inner.live_blocks) == (3, 1)
    now = numpy_capi.set_handler(before)
    assert now is before
    assert multiarray.get_handler_name() == "default_allocator"
    del a, b, c, d
    assert (outer.live_blocks, inner.live_blocks) == (0, 0)


def test_a_request_that_does_not_fit_is_a_clean_memory_error(entered: Pool) -> None:
    kept = np.ones(MIB)
    for _ in range(3):
        with pytest.raises(MemoryError):
            np.ones(20 * MIB, np.uint8)
        assert isinstance(entered.last_error, OutOfMemoryError)
        assert entered.last_error.requested_bytes == 20 * MIB
        assert entered.last_error.__traceback__ is None
    assert np.ones(BIG).sum() == BIG
    entered.validate()
    assert entered.live_blocks == 1
    del kept


def test_small_requests_are_bound_by_the_budget_too() -> None:
    pool = Pool(HostArena(4096))
    with using_numpy_pool(pool):
        kept = np.ones(3500, np.uint8)
        with pytest.raises(MemoryError):
            np.ones(600, np.uint8)
        np.ones(500, np.uint8)
        pool.validate()
    del kept


def test_garbage_arrays_are_collected_before_giving_up(entered: Pool) -> None:
    """Case A-09."""
    entered.free(entered.allocate(8 * MIB))
    holder: list[Any] = [np.ones(8 * MIB, np.uint8)]
    holder.append(holder)
    del holder
    assert np.ones(12 * MIB, np.uint8).all()


def test_a_b_a_pattern(entered: Pool) -> None:
    """Case A-08."""
    unit = 2 * MIB

    def make(units: int) -> Any:
        return np.empty(units * unit - 512, np.uint8)

    first = make(1)
    make(4)
    second, third = make(1), make(1)
    assert make(4).size
    del first, second, third


def test_reclaim_inside_numpy_may_use_numpy(entered: Pool) -> None:
    arrays = [np.full(MIB, n, np.uint8) for n in range(14)]
    saved: list[bytes] = []

    class Saving:
        def reclaim(self, pool: Pool, requested_bytes: int) -> bool:
            if not arrays:
                return False
            array = arrays.pop()
            saved.append(b"" if saved else (array + np.uint8(0)).tobytes())
            return True

    entered.reclaimer = Saving()
    big = np.ones(4 * MIB - 5000, np.uint8)
    assert big.all()
    assert len(arrays) == 12
    assert len(saved) == 2
    entered.validate()
    entered.reclaimer = None


def test_an_interrupt_while_memory_is_reclaimed_comes_through(entered: Pool) -> None:
    class Interrupted:
        def reclaim(self, pool: Pool, requested_bytes: int) -> bool:
            raise KeyboardInterrupt

    def later() -> None:
        """Give the interpreter a chance to notice."""

    entered.reclaimer = Interrupted()
    with pytest.raises(KeyboardInterrupt):
        try:
            np.ones(20 * MIB, np.uint8)
        except MemoryError:
            assert isinstance(entered.last_error, KeyboardInterrupt)
            for _ in range(100):
                later()
    entered.reclaimer = None
    entered.validate()
    assert np.ones(BIG).all()


def test_an_error_while_memory_is_reclaimed_is_told_and_keeps_no_array(entered: Pool) -> None:
    class Broken:
        def reclaim(self, pool: Pool, requested_bytes: int) -> bool:
            local = np.ones(BIG)
            assert local.all()
            try:
                {}["missing"]
            except KeyError as error:
                raise OSError("the disk is gone") from error
            return True

    entered.reclaimer = Broken()
    with pytest.raises(MemoryError):
        np.ones(20 * MIB, np.uint8)
    entered.reclaimer = None
    assert isinstance(entered.last_error, OSError)
    assert "reclaim" in entered.last_error.__notes__[0]
    assert entered.live_blocks == 0


def test_arrays_are_freed_from_other_threads(entered: Pool) -> None:
    arrays = [np.ones(BIG) for _ in range(200)]

    def drop() -> None:
        while True:
            try:
                arrays.pop()
            except IndexError:
                return

    threads = [threading.Thread(target=drop) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert entered.live_blocks == 0
    entered.validate()


def test_threads_enter_for_themselves(entered: Pool) -> None:
    names: list[str] = []
    sums: list[float] = []

    def work() -> None:
        names.append(multiarray.get_handler_name())
        with using_numpy_pool(entered):
            names.append(multiarray.get_handler_name())
            for n in range(300):
                sums.append(float(np.full(BIG, n).sum()) - n * BIG)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(names) == ["default_allocator"] * 4 + ["dynamemo"] * 4
    assert not any(sums)
    assert entered.live_blocks == 0
    entered.validate()


def test_a_copied_context_shares_the_pool(pool: Pool) -> None:
    with using_numpy_pool(pool):
        context = contextvars.copy_context()
        mine = np.ones(BIG)
        theirs = context.run(np.ones, BIG)
        more = context.run(np.ones, BIG)
        assert pool.live_blocks == 3
        del theirs, more
        del mine
    late = context.run(np.ones, BIG)
    assert late.all()
    context.run(np.argsort, np.arange(3000))
    assert late.all()
    del late, context
    pool.settle()
    pool.validate()
    assert pool.live_blocks == 0


def test_very_many_arrays(entered: Pool) -> None:
    """More than one look goes through: each free is found in the end, and none is missed."""
    entered_bytes = entered.current_bytes
    arrays = [np.ones(2, np.float64) for _ in range(5000)]
    assert entered.outside_bytes == 5000 * 16
    del arrays[::2]
    assert entered.outside_bytes == 2500 * 16
    arrays.clear()
    assert entered.outside_bytes == 0
    assert entered.current_bytes == entered_bytes


def test_a_steady_loop_makes_no_new_records(entered: Pool) -> None:
    def step() -> None:
        a = np.ones(BIG)
        b = a + 1
        np.argsort(b)
        b[::3].sort()

    for _ in range(20):
        step()
    count = len(records_module.records)
    gc.disable()
    try:
        for _ in range(500):
            step()
    finally:
        gc.enable()
    assert len(records_module.records) == count
    assert entered.live_blocks == 0


def test_entering_often_grows_nothing() -> None:
    def enter() -> None:
        with using_pool(MIB, device="cpu") as pool:
            array = np.ones(BIG)
        assert pool.live_blocks == 1
        del array

    for _ in range(10):
        enter()
    counts = len(records_module.records), len(handler_module.bound_pools)
    for _ in range(50):
        enter()
    assert (len(records_module.records), len(handler_module.bound_pools)) == counts


def test_memory_is_given_back_to_the_machine_with_the_pool() -> None:
    def resident_pages() -> int:
        with open("/proc/self/statm", encoding="ascii") as file:
            return int(file.read().split()[1])

    if not os.path.exists("/proc/self/statm"):
        pytest.skip("no /proc on this system")
    before = resident_pages()
    with using_pool("64MiB", device="cpu"):
        array = np.ones(48 * MIB, np.uint8)
        during = resident_pages()
    del array
    assert during - before > 40 * MIB // 4096 > resident_pages() - before


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this system")
def test_a_forked_child_falls_back_and_frees() -> None:
    run_script(
        """
        import os
        from numpy._core.multiarray import get_handler_name
        pool = Pool(HostArena(1 << 20))
        with using_numpy_pool(pool):
            old = np.arange(5000)
            child = os.fork()
            if child == 0:
                code = 1
                try:
                    new = np.ones(1 << 20)  # larger than the pool
                    assert get_handler_name() == "default_allocator"
                    assert old.sum() == 4999 * 2500
                    old[:] = 0
                    del old
                    assert pool.live_blocks == 0
                    pool.validate()
                    code = 0
                finally:
                    os._exit(code)
            assert os.waitpid(child, 0)[1] == 0
            assert old.sum() == 4999 * 2500
            assert pool.live_blocks == 1
        """
    )


def test_arrays_alive_at_exit() -> None:
    run_script(
        """
        import atexit, sys
        pool = Pool(HostArena(1 << 22))
        with using_numpy_pool(pool):
            keep = [np.ones(5000), np.ones(3)]
            class Cycle: pass
            c = Cycle(); c.me = c; c.array = np.ones(5000)
            np.kept_by_module = np.ones(5000)
            sys.kept_by_sys = np.ones(6)
        atexit.register(lambda: np.ones(5000).sum())
        """
    )


def test_exit_inside_the_context() -> None:
    run_script(
        """
        import sys, threading
        context = using_numpy_pool(Pool(HostArena(1 << 22)))
        context.__enter__()
        sys.kept = [np.ones(5000), np.ones(3), context]
        def work():
            with using_numpy_pool(Pool(HostArena(1 << 22))):
                sys.kept.append(np.ones(5000) + 1)
        thread = threading.Thread(target=work); thread.start(); thread.join()
        kept = np.ones(7000)
        sys.exit(0)
        """
    )


def test_a_full_stack_is_an_error_and_no_crash() -> None:
    run_script(
        """
        def dive(depth):
            try:
                array = np.empty(5000)
                array[:] = depth
            except (MemoryError, RecursionError):
                return depth
            return dive(depth + 1)
        with using_pool("64MiB", device="cpu") as pool:
            for _ in range(3):
                try:
                    dive(0)
                except RecursionError:
                    pass
            assert np.ones(5000).all()
            pool.validate()
            assert pool.live_blocks == 0
        """
    )


def test_eviction_by_windows(entered: Pool) -> None:
    """The pool frees blocks whose arrays are dropped by the reclaimer, and ends contiguous."""
    evictor = Evictor({})
    blocks = [entered.allocate(MIB) for _ in range(12)]
    evictor.costs.update({b.offset: float(n) for n, b in enumerate(blocks)})
    entered.reclaimer = evictor
    large = np.ones(6 * MIB, np.uint8)
    assert large.all()
    entered.reclaimer = None
    assert entered.live_blocks == 7
    assert len(evictor.costs) == 6  # the six cheapest in a row went
