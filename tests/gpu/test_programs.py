"""The same random programs on a GPU: same bits within any budget, and when all is evicted."""

import hypothesis
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.runtime.programs import programs, run
from tests.runtime.training import run_from, run_within

pytestmark = pytest.mark.gpu

PLENTY = 256 << 20
CHECKS = [hypothesis.HealthCheck.too_slow]


@settings(max_examples=25, suppress_health_check=CHECKS)
@given(program=programs(), policy=st.sampled_from(("cost-aware", "lru", "recompute")))
def test_same_bits_within_a_budget(program, policy):
    def training():
        return run(program, "@cupy:0")

    reference = training()
    accounted, figures = run_within(training, PLENTY, device="cuda", policy="none")
    assert accounted == reference
    peak = figures.peak_bytes
    # CuPy keeps some memory of its own from before, and that counts.
    budget = figures.pool.reserved_bytes + peak // 8
    result, figures = run_from(
        training, budget, step=0.3, device="cuda", policy=policy, verify=True
    )
    assert result == reference
    assert figures.peak_bytes <= figures.budget_bytes


@settings(max_examples=25, suppress_health_check=CHECKS)
@given(program=programs())
def test_same_bits_when_everything_is_evicted_after_every_function(program):
    reference = run(program, "@cupy:0")
    result, figures = run_within(
        lambda: run(program, "@cupy:0"), PLENTY, device="cuda", policy="torture", verify=True
    )
    assert result == reference
    assert figures.offloaded_bytes + figures.dropped_bytes > 0
