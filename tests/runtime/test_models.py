"""Whole models, five steps, are bit-equal at 100 %, 50 %, 30 % of the peak and at the smallest."""

import functools

import pytest

from tests.runtime.models import MODELS, train
from tests.runtime.training import PLENTY, run_within, smallest_feasible


@functools.cache
def reference(name):
    """Return the fingerprint without dynamemo and the peak of a run that only accounts."""
    stock = train(name)
    accounted, figures = run_within(lambda: train(name), PLENTY, policy="none")
    assert accounted == stock
    return stock, figures.peak_bytes


@functools.cache
def smallest(name):
    """Return the smallest budget that the errors lead to, tried on one step, then on all."""
    first = smallest_feasible(lambda: train(name, 1), reference(name)[1] // 20)
    return smallest_feasible(lambda: train(name), first)


@pytest.mark.parametrize("share", [1.0, 0.5, 0.3])
@pytest.mark.parametrize("name", sorted(MODELS))
def test_bit_equal_at_a_share_of_the_peak(name, share):
    stock, peak = reference(name)
    budget = max(int(peak * share), smallest(name))
    result, figures = run_within(lambda: train(name), budget)
    assert result == stock
    assert figures.peak_bytes <= budget


@pytest.mark.parametrize("name", sorted(MODELS))
def test_bit_equal_at_the_smallest_feasible_budget(name):
    stock, peak = reference(name)
    budget = smallest(name)
    result, figures = run_within(lambda: train(name), budget)
    assert result == stock
    assert figures.peak_bytes <= budget < peak


@pytest.mark.parametrize("policy", ["lru", "speed-centric", "memory-centric", "offload"])
def test_every_policy_is_bit_equal(policy):
    stock, peak = reference("vgg")
    budget = smallest_feasible(lambda: train("vgg"), int(peak * 0.5), policy=policy)
    result, figures = run_within(lambda: train("vgg"), budget, policy=policy)
    assert result == stock
    assert figures.peak_bytes <= budget
