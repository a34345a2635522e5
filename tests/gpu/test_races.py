"""Late copies, late kernels and poisoned memory change no bit of any step (Invariants 1, 2)."""

import contextlib
import gc

import pytest

import dynamemo
from tests.gpu.racing import first_difference, steps

pytestmark = pytest.mark.gpu

STEPS = 40


@pytest.fixture(scope="module")
def expected():
    return list(steps(STEPS))


@pytest.fixture(scope="module")
def peak_bytes(expected):
    """The most that a step has in use, once all plans are chosen, without what garbage keeps."""
    with dynamemo.Runtime("4GiB", device="cuda", policy="none") as runtime:
        for _ in steps(4):
            gc.collect()
    return runtime.statistics().peak_bytes


@pytest.mark.parametrize("late", ["compute", "out", "in", "all"])
@pytest.mark.parametrize("policy", ["offload", "cost-aware", "torture"])
def test_every_step_is_bit_equal(policy, late, expected, peak_bytes):
    from tests.gpu import delayed

    device = delayed.DelayedDevice(
        1, delays_out=late in ("out", "all"), delays_in=late in ("in", "all")
    )
    budget = 4 << 30 if policy == "torture" else int(0.85 * peak_bytes)
    hook = delayed.DelayedFunctions(2) if late in ("compute", "all") else contextlib.nullcontext()
    with (
        delayed.DeviceSampler() as sampler,
        dynamemo.Runtime(budget, device=device, policy=policy) as runtime,
        delayed.poisoned_memory(),
        hook,
    ):
        for number, step in enumerate(steps(STEPS)):
            different = first_difference(step, expected[number])
            assert different is None, f"step {number}: the {different} differs"
    figures = runtime.statistics()
    assert policy == "torture" or figures.peak_bytes > peak_bytes // 2, "the peak is not the peak"
    assert figures.offloaded_bytes + figures.dropped_bytes > 0
    assert figures.peak_bytes <= figures.budget_bytes
    assert sampler.most_bytes <= budget


def test_the_delays_and_the_poison_are_there(expected, peak_bytes, monkeypatch):
    """Without the waits for copies the very same run goes wrong."""
    from dynamemo.allocator import cupy_copier
    from tests.gpu import delayed

    monkeypatch.setattr(cupy_copier._CudaMark, "hold_compute", lambda mark: None)
    device = delayed.DelayedDevice(1)
    with (
        dynamemo.Runtime(int(0.85 * peak_bytes), device=device, policy="offload"),
        delayed.poisoned_memory(),
    ):
        assert list(steps(STEPS)) != expected
