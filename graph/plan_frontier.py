"""Keep the plans of one problem that no other beats in both memory and time.

Covers what the planner has evaluated so far, whatever budget it was asked for. Does not cover other
problems, nor finding plans.

Invariants
----------
1. Sorted: peaks ascend strictly and seconds descend strictly.
2. `best` is monotone at every moment: a larger budget never gives more seconds (Invariant 7 of the
   project) nor a lower peak.
3. At most `MAX_PLANS` plans; beyond it, the one whose loss costs least is forgotten.
"""

from bisect import bisect_right

from dynamemo.graph.forecast import Forecast
from dynamemo.graph.problem_tables import Codes

#: Plans kept of one problem.
MAX_PLANS = 256


class PlanFrontier:
    """Hold non-dominated plans."""

    def __init__(self) -> None:
        self._peaks: list[int] = []
        self._plans: list[tuple[Codes, Forecast]] = []

    def __len__(self) -> int:
        """Count the plans kept."""
        return len(self._plans)

    def add(self, codes: Codes, forecast: Forecast) -> bool:
        """Take in an evaluated plan; tell whether it is kept, so better than what was known.

        Parameters
        ----------
        codes
            Not changed by anybody afterwards.
        forecast
            What was forecast for it, under any budget that it fits in.
        """
        peak_bytes = forecast.peak_bytes
        place = bisect_right(self._peaks, peak_bytes)
        if not forecast.is_feasible or (
            place and self._plans[place - 1][1].elapsed_s <= forecast.elapsed_s
        ):
            return False
        begin = place - (place > 0 and self._peaks[place - 1] == peak_bytes)
        end = place
        while end < len(self._plans) and self._plans[end][1].elapsed_s >= forecast.elapsed_s:
            end += 1
        self._peaks[begin:end] = [peak_bytes]
        self._plans[begin:end] = [(codes, forecast)]
        if len(self._plans) > MAX_PLANS:
            self._forget_one()
        return True

    def best(self, budget_bytes: int) -> tuple[Codes, Forecast] | None:
        """Return the quickest plan whose peak is within a budget; None where there is none."""
        place = bisect_right(self._peaks, budget_bytes)
        return self._plans[place - 1] if place else None

    def _forget_one(self) -> None:
        """Forget the inner plan whose place the one before it takes at the least loss."""
        seconds = [forecast.elapsed_s for _, forecast in self._plans]
        inner = range(1, len(seconds) - 1)
        least = min(inner, key=lambda index: seconds[index - 1] - seconds[index])
        del self._peaks[least], self._plans[least]
