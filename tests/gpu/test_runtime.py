"""What a user meets on a GPU: allocators, errors, the device's own count of bytes."""

import gc

import chainer
import chainer.functions as F
import numpy
import pytest

import dynamemo
from dynamemo import DynamemoError, OutOfMemoryError, Runtime

pytestmark = pytest.mark.gpu


def deep_loss(cupy, depth=12):
    x = chainer.Variable(cupy.random.standard_normal((256, 1024)).astype("f"))
    h = x * 1
    for _ in range(depth):
        h = F.tanh(h) * 1.5
    return x, F.sum(h)


def before_bytes(cupy):
    """Return what CuPy's own pool holds in arrays that are alive: it counts."""
    gc.collect()
    cupy.get_default_memory_pool().free_all_blocks()
    return cupy.get_default_memory_pool().total_bytes()


def test_the_allocator_is_put_back(cupy):
    before = cupy.cuda.get_allocator()
    with Runtime("64MiB", device="cuda"):
        assert cupy.cuda.get_allocator() is not before
        kept = cupy.arange(1000)
    assert cupy.cuda.get_allocator() == before
    assert int(kept.sum()) == 499500


def test_a_budget_that_cannot_be_met_is_one_error_of_both_kinds(cupy):
    with Runtime(before_bytes(cupy) + (12 << 20), device="cuda"):
        x = chainer.Variable(cupy.ones((1024, 1024), "f"))
        with pytest.raises(cupy.cuda.memory.OutOfMemoryError) as caught:
            F.tanh(F.concat([x, x, x, x]))
        assert isinstance(caught.value, OutOfMemoryError)
        assert caught.value.function == "Concat"
        assert caught.value.feasible_bytes > 12 << 20
        assert float(F.sum(F.tanh(x)).array) > 0


def test_gradients_are_equal_within_a_budget(cupy):
    cupy.random.seed(0)
    x, loss = deep_loss(cupy)
    loss.backward()
    expected = x.grad.get()
    del x, loss
    budget = before_bytes(cupy) + (10 << 20)
    cupy.random.seed(0)
    with Runtime(budget, device="cuda") as runtime:
        x, loss = deep_loss(cupy)
        loss.backward()
        assert (x.grad.get() == expected).all()
    figures = runtime.statistics()
    assert figures.device.startswith("cuda:")
    assert figures.dropped_bytes + figures.offloaded_bytes > 0
    assert figures.peak_bytes <= budget


def test_the_device_never_shows_more_than_the_budget(cupy):
    x, loss = deep_loss(cupy)
    loss.backward()
    del x, loss
    cupy.get_default_memory_pool().free_all_blocks()
    free_before = cupy.cuda.runtime.memGetInfo()[0]
    with Runtime("64MiB", device="cuda"):
        for _ in range(3):
            _, loss = deep_loss(cupy)
            loss.backward()
            taken = free_before - cupy.cuda.runtime.memGetInfo()[0]
            assert taken <= 64 << 20


def test_arrays_made_before_count(cupy):
    cupy.get_default_memory_pool().free_all_blocks()
    held = cupy.ones(16 << 20, "u1")
    with Runtime(before_bytes(cupy) + (48 << 20), device="cuda") as runtime:
        assert runtime.statistics().current_bytes >= held.nbytes
        with pytest.raises(OutOfMemoryError):
            cupy.ones(56 << 20, "u1")
    with pytest.raises(DynamemoError, match="before the runtime"), Runtime("8MiB", device="cuda"):
        pass


def test_a_device_that_does_not_exist():
    with pytest.raises(DynamemoError, match="does not exist"), Runtime("8MiB", device="cuda:99"):
        pass


def test_backward_works_after_leaving(cupy):
    cupy.random.seed(0)
    x, loss = deep_loss(cupy)
    loss.backward()
    expected = x.grad.get()
    cupy.random.seed(0)
    with Runtime("64MiB", device="cuda", policy="torture"):
        x, loss = deep_loss(cupy)
    loss.backward()
    assert (x.grad.get() == expected).all()


def test_host_memory_is_bounded_and_flat(cupy):
    budget = before_bytes(cupy) + (10 << 20)
    with Runtime(budget, device="cuda", host_budget="64MiB", policy="offload") as runtime:
        held = []
        for _ in range(20):
            _, loss = deep_loss(cupy)
            loss.backward()
            del loss
            held.append(sum(runtime.statistics().tier_bytes.values()))
    assert max(held) <= 64 << 20
    assert held[-1] <= max(held[:5])


def test_using_pool_alone(cupy):
    with dynamemo.using_pool("16MiB", device="cuda") as pool:
        a = cupy.ones((1024, 1024), numpy.float32)
        assert pool.current_bytes >= a.nbytes
        with pytest.raises(cupy.cuda.memory.OutOfMemoryError):
            cupy.ones((4096, 1024), numpy.float32)
    assert float(a.sum()) == 1024 * 1024
