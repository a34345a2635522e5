"""Random programs give the same bits within any budget that can be met (Invariants 1, 2, 3, 6)."""

import gc

import chainer
import hypothesis
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.runtime.programs import programs, run
from tests.runtime.training import PLENTY, no_collector, run_from, run_within

POLICIES = (
    "cost-aware",
    "lru",
    "speed-centric",
    "memory-centric",
    "recompute",
    "offload",
    "liveness",
)


def _peak_bytes(training):
    result, figures = run_within(training, PLENTY, policy="none")
    return result, figures.peak_bytes


@settings(max_examples=25, suppress_health_check=[hypothesis.HealthCheck.too_slow])
@given(program=programs(), share=st.floats(0, 1), policy=st.sampled_from(POLICIES))
def test_same_bits_within_any_budget(program, share, policy):
    def training():
        return run(program)

    reference = training()
    accounted, peak = _peak_bytes(training)
    assert accounted == reference
    result, figures = run_from(training, peak // 6, step=0.25, policy=policy)
    assert result == reference
    assert figures.peak_bytes <= figures.budget_bytes
    budget = figures.budget_bytes + int(share * max(0, peak - figures.budget_bytes))
    result, figures = run_from(training, budget, policy=policy, verify=True)
    assert result == reference
    assert figures.peak_bytes <= figures.budget_bytes


@settings(max_examples=60, suppress_health_check=[hypothesis.HealthCheck.too_slow])
@given(program=programs())
def test_same_bits_when_everything_is_evicted_after_every_function(program):
    reference = run(program)
    result, figures = run_within(lambda: run(program), PLENTY, policy="torture", verify=True)
    assert result == reference
    assert figures.offloaded_bytes + figures.dropped_bytes > 0


@settings(max_examples=20, suppress_health_check=[hypothesis.HealthCheck.too_slow])
@given(program=programs())
def test_nothing_outlives_the_program(program):
    run(program)  # caches of Chainer and NumPy
    chainer.get_function_hooks()
    with no_collector():
        before = _live_nodes()
        run(program)
        stock_growth = _live_nodes() - before
        before = _live_nodes()
        run_within(lambda: run(program), PLENTY, policy="torture")
        assert _live_nodes() - before <= stock_growth


def _live_nodes():
    kinds = (chainer.FunctionNode, chainer.variable.VariableNode)
    return sum(isinstance(thing, kinds) for thing in gc.get_objects())
