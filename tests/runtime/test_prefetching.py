"""A prefetch leaves to the functions that run meanwhile what they took the last time."""

import math

import chainer
import chainer.functions as F
import numpy
import pytest

from dynamemo import Runtime
from dynamemo.allocator import HostArena, Pool
from dynamemo.prefetching import Appetite, Need
from tests.runtime.late import LateDevice

KIB = 1024


@pytest.fixture
def pool():
    pool = Pool(HostArena(1024 * KIB))
    yield pool
    pool.close()


@pytest.fixture
def appetite(pool):
    return Appetite(pool)


def run(pool, appetite, signature, *, keep_bytes=0, most_bytes=0):
    """Let a backward take some memory, and keep some of it; return what it kept."""
    appetite.begin(signature)
    if most_bytes:
        pool.free(pool.allocate(most_bytes))
    return [pool.allocate(keep_bytes)] if keep_bytes else []


def free(pool, blocks):
    for block in blocks:
        pool.free(block)


def test_what_is_kept_and_what_comes_on_top_are_both_left(pool, appetite):
    kept = run(pool, appetite, "a", keep_bytes=8 * KIB, most_bytes=4 * KIB)
    kept += run(pool, appetite, "b", most_bytes=16 * KIB)
    appetite.begin("end")
    assert appetite.of_both("a", "b") == Need(24 * KIB, 0)
    assert appetite.of_both("b", "b") == Need(16 * KIB, 0)
    free(pool, kept)


def test_it_follows_the_last_time_and_not_the_worst(pool, appetite):
    run(pool, appetite, "a", most_bytes=64 * KIB)
    appetite.note_request(64 * KIB)
    run(pool, appetite, "a", most_bytes=8 * KIB)
    assert appetite.of_both("a", "a") == Need(64 * KIB, 64 * KIB)
    appetite.begin("end")
    assert appetite.of_both("a", "a") == Need(8 * KIB, 8 * KIB)


def test_what_was_not_seen_yet_is_taken_for_the_hungriest(pool, appetite):
    run(pool, appetite, "a", most_bytes=64 * KIB)
    run(pool, appetite, "b", most_bytes=8 * KIB)
    appetite.begin("new")
    assert appetite.of_both("new", "b").nbytes == 64 * KIB
    assert appetite.of_both(None, None).nbytes == 64 * KIB


def test_the_hungriest_is_forgotten_in_time(pool, appetite):
    run(pool, appetite, "a", most_bytes=64 * KIB)
    appetite.begin("b")
    for _ in range(7):
        appetite.forgo()  # the first of each forward; the others change nothing
        appetite.forgo()
        appetite.begin("b")
    assert appetite.of_both("new", "new").nbytes == 64 * KIB >> 7


def test_what_is_moved_out_or_back_meanwhile_is_not_counted(pool, appetite):
    evicted = pool.allocate(32 * KIB)
    appetite.begin("a")
    pool.free(evicted)
    pool.note_moved_out(32 * KIB)
    taken = pool.allocate(16 * KIB)
    pool.note_moved_out(-32 * KIB)
    back = pool.allocate(32 * KIB)
    appetite.begin("end")
    assert appetite.of_both("a", "none").nbytes == 32 * KIB  # its own, and as much behind it
    pool.free(taken)
    pool.free(back)


def test_other_work_between_two_backwards_is_not_counted(pool, appetite):
    run(pool, appetite, "a", most_bytes=8 * KIB)
    appetite.begin("a")
    appetite.forgo()
    pool.free(pool.allocate(64 * KIB))
    appetite.begin("a")
    assert appetite.of_both("a", "a").nbytes == 8 * KIB


def test_what_nobody_will_read_takes_at_most_half_of_the_tier():
    with Runtime("1MiB", device=LateDevice(), host_budget=200 * KIB) as runtime:
        manager = runtime._manager
        x = chainer.Variable(numpy.ones((64, 256), "f"))  # 64 KiB
        outputs = [F.tanh(x), F.tanh(x)]
        first, second = (manager.storage_of(y.array) for y in outputs)
        assert manager.transfers.copy_out_aside(first)
        assert not manager.transfers.copy_out_aside(second)
        assert manager.transfers.copy_out(second)


def test_a_recipe_that_is_blocked_now_is_asked_for_again(monkeypatch):
    """The function that runs holds its parameters; what it made can be dropped afterwards."""
    with Runtime("1MiB", device=LateDevice()) as runtime:
        manager = runtime._manager
        y = F.tanh(F.tanh(chainer.Variable(numpy.ones((64, 256), "f"))))
        storage = max(manager.storages(), key=lambda storage: storage.storage_id)  # of y, unread
        with monkeypatch.context() as patch:
            patch.setattr(manager, "_plan", lambda storage: None)
            assert not manager._drop(storage)
            assert math.isinf(storage.recompute_s)
        manager._offers()
        assert math.isinf(storage.recompute_s)
        F.tanh(y)
        manager._offers()
        assert not math.isinf(storage.recompute_s)
