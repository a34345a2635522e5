"""Whole models, five steps, are bit-equal at 100 %, 50 %, 30 % of the peak and at the smallest.

Where a share is less than what one function of the model needs at once (a convolution on the CPU
unfolds its input ninefold), the smallest feasible budget stands in for it.
"""

import functools

import pytest

from tests.runtime.models import MODELS, train
from tests.runtime.training import PLENTY, run_from, run_within

#: How far above the smallest feasible budget a run may end up: placement depends on measured times.
SLACK = 1.25


@functools.cache
def reference(name):
    """Return the fingerprint without dynamemo and the peak of a run that only accounts."""
    stock = train(name)
    accounted, figures = run_within(lambda: train(name), PLENTY, policy="none")
    assert accounted == stock
    return stock, figures.peak_bytes


@functools.cache
def smallest(name):
    """Return result and statistics at the smallest budget that the errors lead to."""
    return run_from(lambda: train(name), reference(name)[1] // 4, step=0.2)


@pytest.mark.parametrize("name", sorted(MODELS))
def test_bit_equal_at_the_smallest_feasible_budget(name):
    stock, peak = reference(name)
    result, figures = smallest(name)
    assert result == stock
    assert figures.peak_bytes <= figures.budget_bytes < peak


@pytest.mark.parametrize("share", [1.0, 0.5, 0.3])
@pytest.mark.parametrize("name", sorted(MODELS))
def test_bit_equal_at_a_share_of_the_peak(name, share):
    stock, peak = reference(name)
    budget = max(int(peak * share), smallest(name)[1].budget_bytes)
    result, figures = run_from(lambda: train(name), budget)
    assert result == stock
    assert figures.peak_bytes <= figures.budget_bytes <= budget * SLACK


@pytest.mark.parametrize("policy", ["lru", "speed-centric", "memory-centric", "offload"])
def test_every_policy_is_bit_equal(policy):
    stock, peak = reference("vgg")
    result, figures = run_from(lambda: train("vgg"), int(peak * 0.7), policy=policy)
    assert result == stock
    assert figures.peak_bytes <= figures.budget_bytes <= peak
    assert figures.offloaded_bytes + figures.dropped_bytes > 0
