"""Test the planner: within the budget, above the bound, never worse with a larger budget."""

from dataclasses import replace
from itertools import pairwise
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dynamemo.graph.bounds import lower_bound_s
from dynamemo.graph.forecast import forecast
from dynamemo.graph.instructions import instructions
from dynamemo.graph.lowering import lower
from dynamemo.graph.network import Network
from dynamemo.graph.networks import alexnet, resnet
from dynamemo.graph.plan_frontier import MAX_PLANS, PlanFrontier
from dynamemo.graph.planner import BudgetError, Planner, plan, smallest_feasible_budget
from dynamemo.graph.problem import LinkRate, Problem, Technique
from dynamemo.graph.problem_of_trace import problem_of
from tests.graph.problems import joined, random_problem, random_techniques

SEEDS = st.integers(0, 1 << 32)


def kept_peak(problem: Problem) -> int:
    return forecast(problem, (Technique.KEEP,) * len(problem.tensors), 1 << 60).peak_bytes


@settings(max_examples=30)
@given(seed=SEEDS, functions=st.integers(2, 12), share=st.floats(0.0, 1.1))
def test_a_plan_is_what_it_says(seed: int, functions: int, share: float) -> None:
    problem = random_problem(Random(seed), functions)
    least = smallest_feasible_budget(problem)
    budget = int(least + share * (kept_peak(problem) - least))
    schedule = Planner(problem).plan(budget, forecasts=60)
    again = forecast(problem, schedule.techniques, schedule.forecast.budget_bytes)
    assert again == schedule.forecast
    assert again.peak_bytes <= budget
    assert schedule.bound_s <= again.elapsed_s * (1 + 1e-12)
    instructions(problem, schedule.techniques, begun=again.begun)


@settings(max_examples=10)
@given(seed=SEEDS)
def test_over_twenty_budgets_memory_and_time_are_monotone(seed: int) -> None:
    random = Random(seed)
    problem = random_problem(random, 12)
    planner = Planner(problem)
    least, most = planner.smallest_feasible_budget(), kept_peak(problem)
    budgets = [least + i * (most - least) // 19 for i in range(20)]
    for budget in random.sample(budgets, 20):
        planner.plan(budget, forecasts=40)
    found = [planner.plan(budget).forecast for budget in budgets]
    for smaller, larger in pairwise(found):
        assert smaller.peak_bytes <= larger.peak_bytes
        assert smaller.elapsed_s >= larger.elapsed_s
    assert found[-1].elapsed_s == pytest.approx(found[-1].compute_s)


@given(seed=SEEDS, functions=st.integers(2, 10), share=st.floats(0.1, 1.1))
def test_no_techniques_beat_the_bound(seed: int, functions: int, share: float) -> None:
    random = Random(seed)
    problem = random_problem(random, functions, rate=1e9)
    if seed % 3 == 0:
        problem = joined(problem, random_problem(random, functions, rate=1e9))
    budget = int(share * kept_peak(problem))
    bound = lower_bound_s(problem, budget)
    for _ in range(30):
        got = forecast(problem, random_techniques(random, problem), budget)
        if got.is_feasible:
            assert got.elapsed_s >= bound * (1 - 1e-12)


@settings(max_examples=30)
@given(seed=SEEDS, functions=st.integers(2, 8))
def test_no_techniques_fit_below_the_smallest_budget_where_all_may_move(
    seed: int, functions: int
) -> None:
    random = Random(seed)
    problem = random_problem(random, functions)
    smallest = smallest_feasible_budget(problem)
    assert plan(problem, smallest).forecast.peak_bytes == smallest
    with pytest.raises(BudgetError, match=f"{smallest:,}"):
        plan(problem, smallest - 1)
    if all(tensor.is_movable for tensor in problem.tensors if tensor.uses):
        for _ in range(30):
            got = forecast(problem, random_techniques(random, problem), smallest)
            assert got.peak_bytes >= smallest


@pytest.mark.parametrize("network", [alexnet(8), resnet((3, 4, 6, 3), 4)], ids=lambda n: n.name)
def test_refining_never_makes_worse(network: Network) -> None:
    trace = lower(network)
    problem = problem_of(trace, LinkRate(1e10), LinkRate(1e10))
    movable = replace(
        problem, tensors=tuple(replace(tensor, is_movable=True) for tensor in problem.tensors)
    )
    planner = Planner(movable)
    budget = (planner.smallest_feasible_budget() + kept_peak(movable)) // 2
    first = planner.plan(budget, forecasts=4)
    refined = planner.refine(budget, forecasts=30)
    assert refined.forecast.elapsed_s <= first.forecast.elapsed_s


def test_asking_again_is_answered_from_the_frontier() -> None:
    problem = random_problem(Random(5), 10)
    planner = Planner(problem)
    budget = (planner.smallest_feasible_budget() + kept_peak(problem)) // 2
    assert planner.plan(budget) == planner.plan(budget) == planner.known(budget)


def test_nothing_to_plan() -> None:
    problem = Problem((), (), 0, LinkRate(1.0), LinkRate(1.0))
    assert plan(problem, 0).forecast.elapsed_s == 0.0
    assert smallest_feasible_budget(problem) == 0


@given(seed=SEEDS)
def test_the_frontier_keeps_what_nothing_beats(seed: int) -> None:
    random = Random(seed)
    problem = random_problem(random, 8)
    frontier = PlanFrontier()
    seen = []
    for _ in range(40):
        got = forecast(problem, random_techniques(random, problem), 1 << 60)
        frontier.add(None, got)  # type: ignore[arg-type]  # the techniques do not matter here
        seen.append(got)
    assert len(frontier) <= MAX_PLANS
    for budget in sorted({got.peak_bytes for got in seen} | {0}):
        fitting = [got.elapsed_s for got in seen if got.peak_bytes <= budget]
        best = frontier.best(budget)
        assert (best[1].elapsed_s if best else None) == min(fitting, default=None)
