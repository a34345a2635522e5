"""Decide ahead: the techniques with the least predicted seconds within a budget.

Covers first plans (`cover`), their refinement (`exchange`), and the smallest budget. Everything
that was evaluated for a problem goes into one `PlanFrontier`, and what is answered comes from
there, so asking again with another budget is cheap and never gets worse.

Effort is given as a number of forecasts, not by a clock: the same question has the same answer on
every machine.

Invariants
----------
1. A schedule's peak is within the budget that was asked for.
2. At any moment a larger budget has an answer that is at least as quick (Invariant 7 of the
   project). A schedule may have been made for another budget; its forecast says which, and a
   runtime follows it as it stands.

Source: the seed (Wang et al., PPoPP 2018) chooses by the type of a layer. We differ: by measured
seconds, by the bytes that are too much at each step, and judged by a simulation of both.
"""

from dataclasses import dataclass

import numpy as np

from dynamemo.graph.bounds import least_level, lower_bound_of
from dynamemo.graph.cover import Covered, all_away, cover, offload_hidden, prune
from dynamemo.graph.exchange import Exchange
from dynamemo.graph.forecast import Forecast, forecast_of
from dynamemo.graph.plan_frontier import PlanFrontier
from dynamemo.graph.problem import Problem, ProblemError, Technique
from dynamemo.graph.problem_tables import Codes, tables_of
from dynamemo.graph.residency import lay_out

#: Steps and tensors that a plan's forecasts may walk in all; what counts for large problems.
_EFFORT = 24_000
#: Most and fewest forecasts of a first plan, whatever the problem's size.
_MOST_FORECASTS = 600
_FEWEST_FORECASTS = 3
#: Shares of the link's time to fill with copies out, the most promising first.
_SHARES = (1.0, 0.6, 1.5, 0.0, 0.8, 1e9, 0.3, 1.2)
#: Gap to the bound from which a first plan is good enough.
_SMALL_GAP = 1e-3
#: Halvings of the range in which the smallest budget lies.
_HALVINGS = 12


class BudgetError(ProblemError):
    """Report a budget in which no plan fits.

    Attributes
    ----------
    smallest_bytes
        The smallest budget for which one was found.
    """

    def __init__(self, budget_bytes: int, smallest_bytes: int) -> None:
        super().__init__(
            f"a budget of {budget_bytes:,} bytes is not feasible; the smallest that is found to be "
            f"is {smallest_bytes:,}"
        )
        self.smallest_bytes = smallest_bytes


@dataclass(frozen=True, slots=True)
class Schedule:
    """Hold a plan and what it is predicted to take.

    Attributes
    ----------
    techniques
        One a tensor.
    forecast
        Made for `Forecast.budget_bytes`; the peak is within the budget that was asked for.
    bound_s
        Seconds that no plan within the budget can beat.
    """

    techniques: tuple[Technique, ...]
    forecast: Forecast
    bound_s: float

    @property
    def gap(self) -> float:
        """Seconds predicted over the bound, as a share of the bound."""
        return self.forecast.elapsed_s / self.bound_s - 1.0 if self.bound_s else 0.0


class Planner:
    """Plan one problem, for any budgets.

    Parameters
    ----------
    problem
        A well-formed problem.
    """

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.frontier = PlanFrontier()
        self._tables = tables_of(problem)
        self._smallest_bytes: int | None = None
        #: Budgets for which a first plan was made, and their bounds.
        self._planned: set[int] = set()
        self._bounds_s: dict[int, float] = {}

    @property
    def default_forecasts(self) -> int:
        """Forecasts of a first plan where no number is given."""
        size = len(self.problem.steps) + len(self.problem.tensors)
        return max(_FEWEST_FORECASTS, min(_MOST_FORECASTS, _EFFORT // max(1, size)))

    def plan(self, budget_bytes: int, *, forecasts: int | None = None) -> Schedule:
        """Plan for a budget; a budget asked for before is answered from the frontier.

        Parameters
        ----------
        budget_bytes
            What memory must not exceed.
        forecasts
            Most forecasts to spend; default: by the problem's size, so that a plan takes about as
            long whatever the size.

        Returns
        -------
        Schedule
            The quickest known.

        Raises
        ------
        BudgetError
            If no plan fits into the budget.
        """
        if budget_bytes not in self._planned and len(self.problem.steps):
            self._planned.add(budget_bytes)
            self._search(budget_bytes, forecasts or self.default_forecasts)
        return self.known(budget_bytes)

    def refine(self, budget_bytes: int, *, forecasts: int) -> Schedule:
        """Plan on from the best that is known, off the critical path.

        Parameters and what is raised are those of `plan`.
        """
        best = self.frontier.best(budget_bytes)
        if best is None:
            return self.plan(budget_bytes, forecasts=forecasts)
        bound_s = self.lower_bound_s(budget_bytes)
        self._exchange(best[0], budget_bytes, forecasts, bound_s)
        return self.known(budget_bytes)

    def known(self, budget_bytes: int) -> Schedule:
        """Return the quickest known schedule; raises BudgetError where none fits."""
        if not len(self.problem.steps):
            return Schedule((), forecast_of(self._tables, np.zeros(0, np.int8), budget_bytes), 0.0)
        best = self.frontier.best(budget_bytes)
        if best is None:
            raise BudgetError(budget_bytes, self.smallest_feasible_budget())
        codes, forecast = best
        bound_s = self.lower_bound_s(budget_bytes)
        return Schedule(tuple(map(Technique, codes.tolist())), forecast, bound_s)

    def lower_bound_s(self, budget_bytes: int) -> float:
        """Return seconds that no plan within a budget can beat."""
        if budget_bytes not in self._bounds_s:
            self._bounds_s[budget_bytes] = lower_bound_of(self._tables, budget_bytes)
        return self._bounds_s[budget_bytes]

    def smallest_feasible_budget(self) -> int:
        """Find the smallest budget for which a plan is found.

        It is exact where everything that may be away may be copied out. Where chains of rebuilds
        decide, it is the smallest that `cover` manages.
        """
        if not len(self.problem.steps):
            return 0
        if self._smallest_bytes is None:
            self._smallest_bytes = self._find_smallest()
        return self._smallest_bytes

    def kept_peak_bytes(self) -> int:
        """Compute the peak if everything is kept."""
        if not len(self.problem.steps):
            return 0
        kept = np.zeros(len(self.problem.tensors), np.int8)
        return int(lay_out(self._tables, kept).level.max())

    def _find_smallest(self) -> int:
        """Halve the range between what every plan needs and what one needs."""
        tables = self._tables
        least, found = least_level(tables), self._away()
        most = int(found.residency.level.max())
        for _ in range(_HALVINGS):
            if least >= most:
                break
            middle = (least + most) // 2
            covered = self._cover_somehow(middle)
            if covered.is_enough:
                found, most = covered, int(covered.residency.level.max())
            else:
                least = middle + 1
        self._evaluate(found.codes, most)
        return most

    def _away(self) -> Covered:
        """Lay out everything away."""
        codes = all_away(self._tables)
        return Covered(codes, lay_out(self._tables, codes), True)

    def _cover_somehow(self, budget_bytes: int) -> Covered:
        """Cover a tight budget: from everything moved, else from nothing."""
        tables = self._tables
        moved = np.where(tables.may_move, np.int8(Technique.OFFLOAD), np.int8(Technique.KEEP))
        covered = cover(tables, moved, budget_bytes)
        if covered.is_enough:
            return covered
        return cover(tables, np.zeros_like(moved), budget_bytes)

    def _search(self, budget_bytes: int, forecasts: int) -> None:
        """Make first plans, and exchange from the best of them with what is left."""
        kept = np.zeros(len(self.problem.tensors), np.int8)
        if self.kept_peak_bytes() <= budget_bytes:
            self._evaluate(kept, budget_bytes)
            return
        left = forecasts - self._search_shares(kept, budget_bytes, max(2, forecasts // 2))
        best = self.frontier.best(budget_bytes)
        if best is None:
            covered = self._cover_somehow(budget_bytes)
            self._evaluate((covered if covered.is_enough else self._away()).codes, budget_bytes)
            best = self.frontier.best(budget_bytes)
        if best is not None and left > 0:
            self._exchange(best[0], budget_bytes, left, self._good_s(budget_bytes))

    def _search_shares(self, kept: Codes, budget_bytes: int, most: int) -> int:
        """Make first plans that fill the link more or less; return how many were forecast."""
        tables = self._tables
        good_s = self._good_s(budget_bytes)
        tried = 0
        for share in _SHARES[:most]:
            codes = offload_hidden(tables, kept, budget_bytes, share=share)
            covered = cover(tables, codes, budget_bytes)
            if not covered.is_enough:
                continue
            tried += 1
            covered = prune(tables, covered, budget_bytes)
            if self._evaluate(covered.codes, budget_bytes) <= good_s:
                break
        return tried

    def _evaluate(self, codes: Codes, budget_bytes: int) -> float:
        """Forecast techniques and keep them if they are good; return their seconds."""
        forecast = forecast_of(self._tables, codes, budget_bytes)
        self.frontier.add(codes, forecast)
        return forecast.elapsed_s

    def _exchange(self, codes: Codes, budget_bytes: int, forecasts: int, enough_s: float) -> None:
        """Search around techniques that fit."""
        Exchange(self._tables, self.frontier, budget_bytes, enough_s).run(codes, forecasts)

    def _good_s(self, budget_bytes: int) -> float:
        """Return the seconds at which a first plan is good enough."""
        return self.lower_bound_s(budget_bytes) * (1.0 + _SMALL_GAP)


def plan(problem: Problem, budget_bytes: int) -> Schedule:
    """Plan a problem for one budget.

    Parameters
    ----------
    problem
        A well-formed problem.
    budget_bytes
        What memory must not exceed.

    Returns
    -------
    Schedule
        The quickest that was found.

    Raises
    ------
    BudgetError
        If no plan fits into the budget.
    """
    return Planner(problem).plan(budget_bytes)


def smallest_feasible_budget(problem: Problem) -> int:
    """Find the smallest budget for which a plan is found; see `Planner`."""
    return Planner(problem).smallest_feasible_budget()
