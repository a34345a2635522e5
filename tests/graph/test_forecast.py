"""Test the forecast against a plain reference under random problems, and by hand on small ones."""

from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynamemo.graph.forecast import Forecast, forecast
from dynamemo.graph.problem import LinkRate, Problem, ProblemError, Rebuild, Step, Technique, Tensor
from tests.graph.problems import MIB, joined, random_problem, random_techniques
from tests.graph.reference_forecast import Reference

KEEP, RECOMPUTE, OFFLOAD = Technique.KEEP, Technique.RECOMPUTE, Technique.OFFLOAD


@given(
    seed=st.integers(0, 1 << 32),
    functions=st.integers(2, 12),
    share=st.floats(0.2, 1.1),
    passes=st.integers(1, 2),
)
def test_agrees_with_the_reference(seed: int, functions: int, share: float, passes: int) -> None:
    random = Random(seed)
    problem = random_problem(random, functions)
    if passes == 2:
        problem = joined(problem, random_problem(random, functions))
    problem.validate()
    techniques = random_techniques(random, problem)
    kept = forecast(problem, (KEEP,) * len(problem.tensors), 1 << 60)
    budget = int(share * kept.peak_bytes)
    got = forecast(problem, techniques, budget)
    expected = Reference(problem, techniques, budget).run()
    assert got.begun == tuple(expected.begun)
    assert list(got.memory) == expected.memory
    assert got.peak_bytes == expected.peak_bytes
    assert got.elapsed_s == pytest.approx(expected.elapsed_s, abs=1e-9)
    assert got.stalled_out_s == pytest.approx(expected.stalled_out_s, abs=1e-9)
    assert got.stalled_in_s == pytest.approx(expected.stalled_in_s, abs=1e-9)
    assert got.elapsed_s == pytest.approx(_sum_s(got), abs=1e-9)


def _sum_s(got: Forecast) -> float:
    return got.compute_s + got.recompute_s + got.stalled_out_s + got.stalled_in_s


def chain(*, rate: float = MIB, latency_s: float = 0.0) -> Problem:
    """Make three functions of a second each, and backward; one tensor of 1 MiB between two."""
    steps = tuple(Step(label, 1.0, 0) for label in ("f0", "f1", "f2", "b2", "b1", "b0"))
    tensors = (
        Tensor(MIB, 0, 1, (4, 5), Rebuild(1.0), True, "y0"),
        Tensor(MIB, 1, 2, (3, 4), Rebuild(1.0, (0,), MIB), True, "y1"),
    )
    link = LinkRate(rate, latency_s)
    return Problem(steps, tensors, 3, link, link)


def test_kept_tensors_are_resident_from_their_maker_to_their_last_use() -> None:
    got = forecast(chain(), (KEEP, KEEP), 2 * MIB)
    assert got.memory == (MIB, 2 * MIB, 2 * MIB, 2 * MIB, 2 * MIB, MIB)
    assert (got.elapsed_s, got.is_feasible) == (6.0, True)


def test_a_rebuild_brings_its_dropped_source_back_in_front_of_the_step() -> None:
    got = forecast(chain(), (RECOMPUTE, RECOMPUTE), 3 * MIB)
    # In front of b2: y0 is rebuilt, then y1 beside it and 1 MiB of transients.
    assert got.memory == (MIB, 2 * MIB, MIB, 3 * MIB, 2 * MIB, MIB)
    assert (got.elapsed_s, got.recompute_s, got.dropped_bytes) == (8.0, 2.0, 2 * MIB)


def test_copies_hide_behind_the_work() -> None:
    got = forecast(chain(), (OFFLOAD, KEEP), 2 * MIB)
    # Out from 2 s to 3 s; in from 3 s, when backward begins.
    assert got.memory == (MIB, 2 * MIB, 2 * MIB, 2 * MIB, 2 * MIB, MIB)
    assert got.begun == ((3, 0),)
    assert got.elapsed_s == 6.0


def test_compute_waits_for_a_slow_link_both_ways() -> None:
    got = forecast(chain(rate=MIB / 4), (OFFLOAD, KEEP), MIB)
    assert not got.is_feasible
    got = forecast(chain(rate=MIB / 4), (OFFLOAD, OFFLOAD), 2 * MIB)
    # y0 leaves from 2 s to 6 s, y1 from 3 s to 10 s; y1 is demanded at 3 s and back at 14 s.
    assert got.stalled_out_s == 7.0
    assert got.stalled_in_s == 4.0 + 3.0


def test_latency_counts_once_a_copy() -> None:
    quick = forecast(chain(rate=1e30), (OFFLOAD, OFFLOAD), 2 * MIB)
    slow = forecast(chain(rate=1e30, latency_s=0.5), (OFFLOAD, OFFLOAD), 2 * MIB)
    assert quick.elapsed_s == 6.0
    assert slow.elapsed_s == 6.0 + 0.5 + 0.5  # y1 is demanded as soon as it is used


def test_a_tensor_without_uses_is_never_away() -> None:
    problem = Problem((Step("f", 1.0),), (Tensor(MIB, 0, 0),), 1, LinkRate(1.0), LinkRate(1.0))
    assert forecast(problem, (OFFLOAD,), MIB).elapsed_s == 1.0


def test_a_problem_without_steps_takes_no_time() -> None:
    problem = Problem((), (), 0, LinkRate(1.0), LinkRate(1.0))
    assert forecast(problem, (), 0).is_feasible


def test_a_technique_that_a_tensor_does_not_allow_is_refused() -> None:
    problem = Problem(
        (Step("f", 1.0), Step("b", 1.0)), (Tensor(1, 0, 0, (1,)),), 1, LinkRate(1.0), LinkRate(1.0)
    )
    with pytest.raises(ProblemError, match="does not allow"):
        forecast(problem, (RECOMPUTE,), 1)
    with pytest.raises(ProblemError, match="2 techniques for 1 tensors"):
        forecast(problem, (KEEP, KEEP), 1)
