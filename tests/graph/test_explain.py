"""Test what is told of a plan, and what is answered about larger batches."""

from math import inf
from random import Random

import pytest

from dynamemo.graph.explain import explain
from dynamemo.graph.forecast import forecast
from dynamemo.graph.planner import BudgetError, Planner, plan
from dynamemo.graph.problem import LinkRate, Problem, ProblemError, Step, Technique, Tensor
from dynamemo.graph.scaling import largest_factor, scaled
from tests.graph.problems import MIB, random_problem
from tests.graph.test_forecast import chain


@pytest.mark.parametrize("seed", range(20))
def test_the_decisions_add_up_to_what_the_budget_costs(seed: int) -> None:
    problem = random_problem(Random(seed), 10, rate=5e8)
    planner = Planner(problem)
    budget = (planner.smallest_feasible_budget() + planner.kept_peak_bytes()) // 2
    explanation = explain(problem, budget)
    got = explanation.schedule.forecast
    added_s = sum(decision.added_s for decision in explanation.decisions)
    assert added_s == pytest.approx(got.elapsed_s - got.compute_s, abs=1e-12)
    assert explanation.smallest_bytes <= got.peak_bytes <= budget
    assert len(str(explanation).splitlines()) <= 28


def test_the_text() -> None:
    # y1 cannot be away at the same time as y0 is read: 2 MiB are the least.
    assert str(explain(chain(rate=1e30), 2 * MIB)).splitlines() == [
        "budget                  2.0 MiB",
        "smallest feasible       2.0 MiB",
        "without a budget        2.0 MiB    6000.000 ms",
        "predicted               2.0 MiB    6000.000 ms  +0.0%",
        "lower bound                        6000.000 ms  gap 0.0%",
    ]


def test_scaling_leaves_what_lasts() -> None:
    problem = Problem(
        (Step("f", 1.0, 30), Step("b", 2.0, 10)),
        (Tensor(7, 0, 0, (1,), None, True),),
        1,
        LinkRate(1.0),
        LinkRate(1.0),
        20,
    )
    twice = scaled(problem, 2)
    assert [(step.elapsed_s, step.own_bytes) for step in twice.steps] == [(2.0, 40), (4.0, 10)]
    assert twice.tensors[0].nbytes == 14
    assert scaled(problem, 1) == problem
    for factor in (0, -1, inf, float("nan")):
        with pytest.raises(ProblemError):
            scaled(problem, factor)


@pytest.mark.parametrize("most_loss", [0.0, 0.1, 0.5])
def test_the_largest_factor_is_where_the_loss_begins(most_loss: float) -> None:
    problem = random_problem(Random(3), 10)
    budget = forecast(problem, (Technique.KEEP,) * len(problem.tensors), 1 << 60).peak_bytes
    factor = largest_factor(problem, budget, most_loss)
    assert factor >= 1.0
    got = plan(scaled(problem, factor), budget).forecast
    assert got.elapsed_s <= got.compute_s * (1 + most_loss) * (1 + 1e-6)
    try:
        more = plan(scaled(problem, factor * 1.01), budget).forecast
    except BudgetError:
        return
    assert more.elapsed_s > more.compute_s * (1 + most_loss)


def test_factors_at_the_ends() -> None:
    nothing = Problem((Step("f", 1.0),), (), 1, LinkRate(1.0), LinkRate(1.0))
    assert largest_factor(nothing, 1, 0.0) == inf
    lasting = Problem((Step("f", 1.0, 10),), (), 1, LinkRate(1.0), LinkRate(1.0), 10)
    assert largest_factor(lasting, 9, 0.0) == 0.0
    with pytest.raises(ProblemError):
        largest_factor(nothing, 1, -0.1)
