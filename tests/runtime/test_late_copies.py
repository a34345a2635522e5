"""Copies that end as late as they may, or at random moments, change no bit (Invariants 1, 3)."""

import random

import hypothesis
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.runtime.late import LateDevice
from tests.runtime.programs import programs, run
from tests.runtime.training import PLENTY, run_from, run_within

SLOW = [hypothesis.HealthCheck.too_slow]


def late_device(seed):
    return LateDevice(None if seed is None else random.Random(seed))


@settings(max_examples=40, suppress_health_check=SLOW)
@given(
    program=programs(),
    policy=st.sampled_from(("offload", "lru", "cost-aware", "memory-centric")),
    share=st.floats(0, 1),
    seed=st.none() | st.integers(0, 1000),
)
def test_same_bits_within_a_budget(program, policy, share, seed):
    def training():
        return run(program)

    reference = training()
    _, figures = run_within(training, PLENTY, policy="none")
    peak = figures.peak_bytes
    options = {"device": late_device(seed), "policy": policy, "verify": True}
    result, figures = run_from(training, int(peak * (0.2 + 0.6 * share)), step=0.25, **options)
    assert result == reference
    assert figures.peak_bytes <= figures.budget_bytes


@settings(max_examples=60, suppress_health_check=SLOW)
@given(program=programs(), seed=st.none() | st.integers(0, 1000))
def test_same_bits_when_everything_moves(program, seed):
    reference = run(program)
    result, figures = run_within(
        lambda: run(program), PLENTY, device=late_device(seed), policy="torture", verify=True
    )
    assert result == reference
    assert figures.offloaded_bytes > 0
