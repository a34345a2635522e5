"""Search around a plan: give one or two tensors another technique, and see what is forecast.

Covers small problems well and large ones as far as the number of forecasts goes. Where all pairs
have been tried, a few tensors are changed at random (from a fixed seed), the rest is covered anew,
and the search goes on from there.

Invariants
----------
1. Deterministic, and at most as many layouts as it was given forecasts, plus one cover a restart.
2. Every feasible plan that it sees goes into the frontier.
"""

from collections.abc import Iterator
from itertools import combinations
from math import inf
from random import Random

import numpy as np

from dynamemo.graph.cover import cover, prune
from dynamemo.graph.forecast import forecast_laid_out
from dynamemo.graph.plan_frontier import PlanFrontier
from dynamemo.graph.problem import Technique
from dynamemo.graph.problem_tables import Codes, ProblemTables
from dynamemo.graph.residency import lay_out

#: Most tensors changed at random before a new search.
_MOST_CHANGES = 4
#: Tensors beyond which pairs are not tried.
_MOST_PAIRED = 60
#: Restarts in a row without a plan that was not seen before, after which nothing is left to find.
_MOST_FRUITLESS = 40
#: Share by which a plan has to be quicker to count as better.
_TOLERANCE = 1e-9

#: A tensor and the technique to give it.
_Change = tuple[int, np.int8]


class Exchange:
    """Search within one budget; mutable, used once.

    Parameters
    ----------
    tables
        Of the problem.
    frontier
        Takes in what is seen.
    budget_bytes
        What memory must not exceed.
    enough_s
        Seconds at which to stop.
    """

    def __init__(
        self, tables: ProblemTables, frontier: PlanFrontier, budget_bytes: int, enough_s: float
    ) -> None:
        self._tables = tables
        self._frontier = frontier
        self._budget_bytes = budget_bytes
        self._enough_s = enough_s * (1.0 + _TOLERANCE)
        self._compute_s = float(tables.begin_s[-1])
        self._rebuild_s = np.where(np.isfinite(tables.rebuild_s), tables.rebuild_s, 0.0)
        self._seen: set[bytes] = set()
        self._left = 0
        self._choices: list[_Change] = []

    def run(self, codes: Codes, forecasts: int) -> None:
        """Search from `codes`, which fit, with at most so many forecasts."""
        self._left = forecasts
        self._choices = self._all_choices()
        random = Random(0)
        best, best_s = self._descend(codes, self._seconds(codes, inf))
        fruitless = 0
        while self._left > 0 and best_s > self._enough_s and fruitless < _MOST_FRUITLESS:
            start = self._disturbed(best, random)
            fruitless += 1
            if start is None or start.tobytes() in self._seen:
                continue
            fruitless = 0
            found, found_s = self._descend(start, self._seconds(start, inf))
            if found_s < best_s * (1.0 - _TOLERANCE):
                best, best_s = found, found_s

    def _all_choices(self) -> list[_Change]:
        """List what each tensor may be given, the dearest to rebuild first."""
        tables = self._tables
        price = np.where(tables.may_drop, tables.rebuild_s, 0.0) + tables.out_s
        choices = []
        for tensor in np.argsort(-price, kind="stable").tolist():
            if not (tables.may_drop[tensor] or tables.may_move[tensor]):
                continue
            choices.append((tensor, np.int8(Technique.KEEP)))
            if tables.may_move[tensor]:
                choices.append((tensor, np.int8(Technique.OFFLOAD)))
            if tables.may_drop[tensor]:
                choices.append((tensor, np.int8(Technique.RECOMPUTE)))
        return choices

    def _descend(self, codes: Codes, seconds: float) -> tuple[Codes, float]:
        """Follow the first change that is better until none is."""
        is_better = True
        while is_better and self._left > 0 and seconds > self._enough_s:
            is_better = False
            for changed in self._neighbours(codes):
                found_s = self._seconds(changed, seconds)
                if found_s < seconds * (1.0 - _TOLERANCE):
                    codes, seconds, is_better = changed, found_s, True
                    break
                if self._left <= 0:
                    break
        return codes, seconds

    def _neighbours(self, codes: Codes) -> Iterator[Codes]:
        """Yield techniques that differ in one tensor, then in two."""
        changes = [change for change in self._choices if codes[change[0]] != change[1]]
        for tensor, technique in changes:
            changed = codes.copy()
            changed[tensor] = technique
            yield changed
        if len(codes) > _MOST_PAIRED:
            return
        for (first, one), (second, other) in combinations(changes, 2):
            if first != second:
                changed = codes.copy()
                changed[first] = one
                changed[second] = other
                yield changed

    def _seconds(self, codes: Codes, limit_s: float) -> float:
        """Forecast techniques; infinite where they were seen, do not fit, or cannot be better."""
        recompute_s = float(self._rebuild_s[codes == Technique.RECOMPUTE].sum())
        if self._compute_s + recompute_s >= limit_s:
            return inf
        key = codes.tobytes()
        if key in self._seen:
            return inf
        self._seen.add(key)
        self._left -= 1
        residency = lay_out(self._tables, codes)
        if int(residency.level.max()) > self._budget_bytes:
            return inf
        forecast = forecast_laid_out(self._tables, residency, self._budget_bytes)
        self._frontier.add(codes, forecast)
        return forecast.elapsed_s

    def _disturbed(self, codes: Codes, random: Random) -> Codes | None:
        """Change a few tensors at random and cover the rest anew; None where it does not fit."""
        if not self._choices:
            return None
        codes = codes.copy()
        pinned = np.zeros(len(codes), bool)
        for tensor, technique in random.sample(
            self._choices, min(len(self._choices), random.randint(1, _MOST_CHANGES))
        ):
            codes[tensor] = technique
            pinned[tensor] = True
        covered = cover(self._tables, codes, self._budget_bytes, pinned=pinned)
        if not covered.is_enough:
            return None
        return prune(self._tables, covered, self._budget_bytes).codes
