"""Answer from one recorded iteration what a larger batch would need.

Assumes that seconds and bytes grow with the batch, parameters and what else lasts excepted. That
holds where functions keep the device busy; for small batches it takes too much time off. Links,
latencies and the order of steps stay as they are.
"""

from dataclasses import replace
from math import ceil, inf

from dynamemo.graph.planner import BudgetError, Planner
from dynamemo.graph.problem import Problem, ProblemError, Step, Tensor

#: Relative difference at which the search for a factor ends.
_TOLERANCE = 0.005
#: Factors that are looked at, at least and at most.
_SMALLEST, _LARGEST = 2.0**-20, 2.0**20


def scaled(problem: Problem, factor: float) -> Problem:
    """Scale a problem as a batch `factor` times as large would.

    Parameters
    ----------
    problem
        A well-formed problem.
    factor
        Above 0.

    Returns
    -------
    Problem
        With seconds and bytes scaled, bytes rounded up; `Problem.lasting_bytes` are as before.

    Raises
    ------
    ProblemError
        If the factor is not above 0 and finite.
    """
    if not 0.0 < factor < inf:
        raise ProblemError(f"a batch cannot be {factor} times as large")
    return replace(
        problem,
        steps=tuple(_scaled_step(step, problem.lasting_bytes, factor) for step in problem.steps),
        tensors=tuple(_scaled_tensor(tensor, factor) for tensor in problem.tensors),
    )


def largest_factor(problem: Problem, budget_bytes: int, most_loss: float) -> float:
    """Find how many times as large the batch may be.

    Parameters
    ----------
    problem
        A well-formed problem.
    budget_bytes
        What memory must not exceed.
    most_loss
        Share of the seconds without a budget that may be added: 0.2 for 20 %.

    Returns
    -------
    float
        The largest factor found, within half a per cent; 0 where none fits, and infinite where no
        factor is too large.

    Raises
    ------
    ProblemError
        If the loss is negative.
    """
    if not most_loss >= 0.0:
        raise ProblemError(f"a loss of {most_loss} is not possible, expected 0 or more")
    fitting, failing = _bracket(problem, budget_bytes, most_loss)
    while fitting and failing < inf and failing > fitting * (1.0 + _TOLERANCE):
        middle = (fitting * failing) ** 0.5
        if _fits(problem, middle, budget_bytes, most_loss):
            fitting = middle
        else:
            failing = middle
    return fitting if failing < inf else inf


def _bracket(problem: Problem, budget_bytes: int, most_loss: float) -> tuple[float, float]:
    """Find a factor that fits and one, at most twice as large, that does not."""
    factor = 1.0
    if _fits(problem, factor, budget_bytes, most_loss):
        while factor < _LARGEST:
            if not _fits(problem, 2 * factor, budget_bytes, most_loss):
                return factor, 2 * factor
            factor *= 2
        return factor, inf
    while factor > _SMALLEST:
        if _fits(problem, factor / 2, budget_bytes, most_loss):
            return factor / 2, factor
        factor /= 2
    return 0.0, factor


def _fits(problem: Problem, factor: float, budget_bytes: int, most_loss: float) -> bool:
    """Tell whether a plan for the scaled problem is within the budget and the loss."""
    try:
        forecast = Planner(scaled(problem, factor)).plan(budget_bytes).forecast
    except BudgetError:
        return False
    return forecast.elapsed_s <= forecast.compute_s * (1.0 + most_loss) * (1.0 + 1e-9)


def _scaled_step(step: Step, lasting_bytes: int, factor: float) -> Step:
    """Scale a step; what lasts is not scaled."""
    lasting = min(step.own_bytes, lasting_bytes)
    own_bytes = lasting + ceil((step.own_bytes - lasting) * factor)
    return replace(step, elapsed_s=step.elapsed_s * factor, own_bytes=own_bytes)


def _scaled_tensor(tensor: Tensor, factor: float) -> Tensor:
    """Scale a tensor and its rebuild."""
    rebuild = tensor.rebuild
    if rebuild is not None:
        rebuild = replace(
            rebuild,
            elapsed_s=rebuild.elapsed_s * factor,
            transient_bytes=ceil(rebuild.transient_bytes * factor),
        )
    return replace(tensor, nbytes=ceil(tensor.nbytes * factor), rebuild=rebuild)
