"""Test estimates of seconds: fallback, first samples, outliers, drift, links, bounds."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynamemo.graph import cost_model
from dynamemo.graph.cost_model import FIRST_SAMPLES, SAMPLE_PERIOD, CostModel, Link


def settled(elapsed_s: float) -> CostModel:
    """Return a model that has settled on `elapsed_s` for the signature "f"."""
    model = CostModel()
    for _ in range(FIRST_SAMPLES):
        model.observe("f", elapsed_s)
    return model


def test_falls_back_to_bytes_over_bandwidth() -> None:
    model = CostModel(assumed_bytes_per_s=1e9, assumed_latency_s=0.5)
    assert model.estimate("f", nbytes=2_000_000_000) == pytest.approx(2.5)
    assert not model.is_measured("f")


def test_a_slow_first_call_does_not_count() -> None:
    model = CostModel()
    for elapsed_s in (9.0, 1.0, 1.1, 0.9, 1.0):
        model.observe("f", elapsed_s)
    assert model.estimate("f", nbytes=0) == 1.0
    assert model.is_measured("f")


def test_one_outlier_moves_a_settled_estimate_by_a_bounded_step() -> None:
    model = settled(1.0)
    model.observe("f", 100.0)
    assert model.estimate("f", nbytes=0) == 1.25


def test_follows_a_slow_drift() -> None:
    model = settled(1.0)
    for _ in range(40):
        model.observe("f", 1.3)
    assert model.estimate("f", nbytes=0) == pytest.approx(1.3, rel=1e-3)


def test_measures_anew_after_a_sudden_lasting_change() -> None:
    model = settled(1.0)
    for _ in range(3):
        model.observe("f", 10.0)
    assert model.estimate("f", nbytes=0) == 10.0
    assert model.wants_sample("f")


def test_samples_densely_at_first_then_sparsely() -> None:
    model = CostModel()
    wanted = 0
    for _ in range(10 * SAMPLE_PERIOD):
        if model.wants_sample("f"):
            wanted += 1
            model.observe("f", 1.0)
    assert FIRST_SAMPLES + 9 <= wanted <= FIRST_SAMPLES + 10


@pytest.mark.parametrize("elapsed_s", [-1.0, float("nan"), float("inf")])
def test_ignores_what_no_clock_says(elapsed_s: float) -> None:
    model = CostModel()
    model.observe("f", elapsed_s)
    assert len(model) == 0


def test_a_signature_too_fast_for_the_clock_is_estimated_as_zero() -> None:
    model = CostModel()
    for _ in range(10 * FIRST_SAMPLES):
        model.observe("f", 0.0)
    assert model.estimate("f", nbytes=10**9) == 0.0


def test_forgets_the_oldest_signature_when_full(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cost_model, "MAX_SIGNATURES", 3)
    model = CostModel()
    for signature in range(5):
        model.observe(signature, 1.0)
    assert len(model) == 3
    assert not model.is_measured(0)
    assert model.is_measured(4)


@given(st.lists(st.floats(0.0, 1e3), max_size=40))
def test_an_estimate_lies_within_the_samples(samples: list[float]) -> None:
    model = CostModel()
    for elapsed_s in samples:
        model.observe("f", elapsed_s)
    estimate_s = model.estimate("f", nbytes=0)
    if samples:
        assert min(samples) <= estimate_s <= max(samples)
    else:
        assert estimate_s > 0.0


def test_a_link_learns_bandwidth_and_latency() -> None:
    link = Link(bytes_per_s=1e9, latency_s=1e-5)
    assert link.seconds(10**9) == pytest.approx(1.00001)
    for _ in range(100):
        link.observe(0, 2e-5)
        link.observe(1 << 30, 2e-5 + (1 << 30) / 5e10)
    assert link.bytes_per_s == pytest.approx(5e10, rel=0.01)
    assert link.latency_s == pytest.approx(2e-5, rel=0.01)


def test_a_link_ignores_what_no_clock_says() -> None:
    link = Link(bytes_per_s=1e9)
    for elapsed_s in (0.0, -1.0, float("nan"), float("inf")):
        link.observe(1 << 30, elapsed_s)
    assert link.bytes_per_s == 1e9


def test_refuses_a_bandwidth_that_is_not_positive() -> None:
    with pytest.raises(ValueError, match="positive bandwidth"):
        CostModel(assumed_bytes_per_s=0.0)
    with pytest.raises(ValueError, match="positive bandwidth"):
        Link(bytes_per_s=-1.0)
