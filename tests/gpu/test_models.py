"""Whole models on a GPU are bit-equal at half their peak and when all is evicted."""

import functools

import pytest

from tests.runtime.models import train
from tests.runtime.training import run_from, run_within

pytestmark = pytest.mark.gpu

PLENTY = 2 << 30
NAMES = ["lenet", "vgg", "resnet50", "lstm", "transformer"]


@functools.cache
def reference(name):
    stock = train(name, 3, "@cupy:0")
    accounted, figures = run_within(
        lambda: train(name, 3, "@cupy:0"), PLENTY, device="cuda", policy="none"
    )
    assert accounted == stock
    return stock, figures.peak_bytes


@pytest.mark.parametrize("name", NAMES)
def test_bit_equal_at_half_of_the_peak(name):
    stock, peak = reference(name)
    result, figures = run_from(lambda: train(name, 3, "@cupy:0"), peak // 2, device="cuda")
    assert result == stock
    assert figures.peak_bytes <= figures.budget_bytes


@pytest.mark.parametrize("name", NAMES)
def test_bit_equal_when_everything_is_evicted_after_every_function(name):
    stock, _ = reference(name)
    result, figures = run_within(
        lambda: train(name, 3, "@cupy:0"), PLENTY, device="cuda", policy="torture", verify=True
    )
    assert result == stock
    assert figures.recomputed_bytes > 0
