"""Forecast one iteration under given techniques and a budget: seconds, peak, stalls.

One compute stream and one queue for each direction of the link, which works one copy at a time, in
order. Covers copies that overlap the work, and what waits for them. Does not cover fragmentation,
rounding by an allocator, and the host's own time.

The rules:

- A copy out is enqueued when the step of the tensor's last use in forward ends; its bytes are free
  when it has ended. Where a moment (a step or a rebuild) needs room, compute waits for the oldest
  copies out until there is room or none is left.
- Copies in begin at moments, in the order of first demand, from `first_backward` on, each as early
  as its own copy out has ended and its bytes fit beside what is known to be needed at every moment
  until its demand; what is still being copied out counts at the moment where it begins. At the
  demand it begins in any case, and compute waits for its end.
- A rebuild runs in front of the step that first demands its tensor (`residency`).

Invariants
----------
1. `elapsed_s` is the sum of `compute_s`, `recompute_s`, `stalled_out_s` and `stalled_in_s`.
2. No memory exceeds the budget where no level of the residency does.
3. Deterministic: the same arguments give the same forecast.
"""

from collections import deque
from dataclasses import dataclass

import numpy as np

from dynamemo.graph.problem import Problem, Technique
from dynamemo.graph.problem_tables import Codes, ProblemTables, tables_of
from dynamemo.graph.residency import Residency, effective, lay_out


@dataclass(frozen=True, slots=True)
class Forecast:
    """Tell what an iteration will take.

    Attributes
    ----------
    budget_bytes
        The budget it was made for.
    peak_bytes
        The most bytes in use at any moment.
    elapsed_s
        Seconds in all.
    compute_s
        Seconds of the steps alone, as without a budget.
    recompute_s
        Seconds of rebuilds.
    stalled_out_s, stalled_in_s
        Seconds that compute waits for copies out and in.
    dropped_bytes, moved_bytes
        Bytes of tensors dropped, and copied out.
    memory
        The most bytes in use at each step or at a rebuild in front of it.
    begun
        Pairs (step, tensor) in the order of copies in: each begins in front of its step.
    is_feasible
        Whether the peak is within the budget.
    """

    budget_bytes: int
    peak_bytes: int
    elapsed_s: float
    compute_s: float
    recompute_s: float
    stalled_out_s: float
    stalled_in_s: float
    dropped_bytes: int
    moved_bytes: int
    memory: tuple[int, ...]
    begun: tuple[tuple[int, int], ...]
    is_feasible: bool


def forecast(problem: Problem, techniques: tuple[Technique, ...], budget_bytes: int) -> Forecast:
    """Forecast an iteration.

    Parameters
    ----------
    problem
        A well-formed problem.
    techniques
        One a tensor.
    budget_bytes
        What memory must not exceed.

    Returns
    -------
    Forecast
        Also where the budget is too small: `is_feasible` tells.

    Raises
    ------
    ProblemError
        If a tensor does not allow its technique.
    """
    problem.validate_techniques(techniques)
    codes = np.array(techniques, np.int8)
    return forecast_of(tables_of(problem), codes, budget_bytes)


def forecast_of(tables: ProblemTables, codes: Codes, budget_bytes: int) -> Forecast:
    """Forecast from tables and codes that are known to be well formed."""
    codes = effective(tables, codes)
    if not len(tables.step_s):
        return Forecast(budget_bytes, 0, 0.0, 0.0, 0.0, 0.0, 0.0, 0, 0, (), (), budget_bytes >= 0)
    return forecast_laid_out(tables, lay_out(tables, codes), budget_bytes)


def forecast_laid_out(tables: ProblemTables, residency: Residency, budget_bytes: int) -> Forecast:
    """Forecast what is laid out already."""
    clock = Clock(tables, residency, budget_bytes)
    clock.run()
    peak_bytes = int(clock.memory.max())
    begins = np.concatenate(([0], residency.step_moment[:-1] + 1))
    step_of = np.searchsorted(residency.step_moment, np.array(clock.begun_at, np.int64))
    return Forecast(
        budget_bytes,
        peak_bytes,
        clock.now_s,
        float(tables.begin_s[-1]),
        float(tables.rebuild_s[residency.rebuilt].sum()),
        clock.stalled_out_s,
        clock.stalled_in_s,
        int(tables.nbytes[residency.rebuilt].sum()),
        int(tables.nbytes[residency.moved_out].sum()),
        tuple(np.maximum.reduceat(clock.memory, begins).tolist()),
        tuple(zip(step_of.tolist(), residency.moved_in.tolist(), strict=True)),
        peak_bytes <= budget_bytes,
    )


class Clock:
    """Walk the moments with a clock; mutable, used once.

    Attributes
    ----------
    now_s
        Where the clock stands; after `run` the end of the iteration.
    stalled_out_s, stalled_in_s
        Seconds waited so far.
    memory
        Bytes in use at each moment.
    begun_at
        The moment at which each copy in began, in the order of `Residency.moved_in`.
    """

    def __init__(self, tables: ProblemTables, residency: Residency, budget_bytes: int) -> None:
        self.now_s = 0.0
        self.stalled_out_s = 0.0
        self.stalled_in_s = 0.0
        self.memory = residency.level.copy()
        self.begun_at: list[int] = []
        self._budget_bytes = budget_bytes
        self._moments = len(residency.level)
        self._level: list[int] = residency.level.tolist()
        self._elapsed_s: list[float] = residency.elapsed_s.tolist()
        self._begin_s: list[float] = np.concatenate(
            ([0.0], np.cumsum(residency.elapsed_s))
        ).tolist()
        moved = residency.moved_out
        self._out = list(
            zip(
                residency.step_moment[tables.last_forward_use[moved]].tolist(),
                moved.tolist(),
                tables.nbytes[moved].tolist(),
                tables.out_s[moved].tolist(),
                strict=True,
            )
        )
        self._next_out = 0
        self._out_free_s = 0.0
        #: Copies out that are not known to have ended: (seconds of the end, bytes).
        self._leaving: deque[tuple[float, int]] = deque()
        self._leaving_bytes = 0
        self._out_end_s: dict[int, float] = {}
        self._in: list[int] = residency.moved_in.tolist()
        self._in_bytes: list[int] = tables.nbytes[residency.moved_in].tolist()
        self._in_s: list[float] = tables.in_s[residency.moved_in].tolist()
        self._demanded: list[int] = residency.demanded.tolist()
        self._earliest = _earliest(tables, residency, budget_bytes)
        self._in_free_s = 0.0
        self._in_end_s: list[float] = []
        #: Bytes of copies in that have begun and are not demanded yet, and the next to be so.
        self._early_bytes = 0
        self._next_demand = 0

    def run(self) -> None:
        """Walk all moments."""
        moment = self._run_outward(min([self._moments, *self._earliest[:1]]))
        while moment < self._moments:
            self._settle_demands(moment)
            self._make_room(moment)
            self._begin_copies(moment)
            extra_bytes = self._early_bytes + self._leaving_bytes
            self._wait_for_demanded()
            following = self._next_event(moment)
            if extra_bytes:
                self.memory[moment:following] += extra_bytes
            if following == moment + 1:
                self.now_s += self._elapsed_s[moment]
            else:
                self.now_s += self._begin_s[following] - self._begin_s[moment]
            self._enqueue(following - 1)
            moment = following

    def _run_outward(self, end: int) -> int:
        """Walk the moments before any copy in may begin, where only copies out matter."""
        leaving, level, elapsed_s = self._leaving, self._level, self._elapsed_s
        extra = [0] * end
        next_out_at = self._out[0][0] if self._out else end
        for moment in range(end):
            if leaving:
                if leaving[0][0] <= self.now_s:
                    self._drain()
                if level[moment] + self._leaving_bytes > self._budget_bytes:
                    self._make_room(moment)
                extra[moment] = self._leaving_bytes
            self.now_s += elapsed_s[moment]
            if moment == next_out_at:
                self._enqueue(moment)
                is_last = self._next_out == len(self._out)
                next_out_at = end if is_last else self._out[self._next_out][0]
        self.memory[:end] += np.array(extra, np.int64)
        return end

    def _settle_demands(self, moment: int) -> None:
        """Count no longer as early what a level counts from this moment on."""
        next_demand = self._next_demand
        while next_demand < len(self.begun_at) and self._demanded[next_demand] <= moment:
            self._early_bytes -= self._in_bytes[next_demand]
            next_demand += 1
        self._next_demand = next_demand

    def _make_room(self, moment: int) -> None:
        """Wait for copies out, oldest first, until the moment fits or none is left."""
        leaving = self._leaving
        if not leaving:
            return
        self._drain()
        most = self._budget_bytes - self._level[moment] - self._early_bytes
        if self._leaving_bytes <= most:
            return
        began_s = self.now_s
        while leaving and self._leaving_bytes > most:
            self.now_s, nbytes = leaving.popleft()
            self._leaving_bytes -= nbytes
        self.stalled_out_s += self.now_s - began_s

    def _drain(self) -> None:
        """Forget the copies out that have ended."""
        leaving = self._leaving
        while leaving and leaving[0][0] <= self.now_s:
            self._leaving_bytes -= leaving.popleft()[1]

    def _begin_copies(self, moment: int) -> None:
        """Begin the copies in that may begin here, in their order."""
        index = len(self.begun_at)
        while index < len(self._in) and self._earliest[index] <= moment:
            nbytes = self._in_bytes[index]
            out_end_s = self._out_end_s[self._in[index]]
            if self._demanded[index] == moment:
                self._wait_for_out(out_end_s)
                self._next_demand += 1
            else:
                in_use = self._level[moment] + self._early_bytes + self._leaving_bytes
                if out_end_s > self.now_s or in_use + nbytes > self._budget_bytes:
                    return
                self._early_bytes += nbytes
            self._in_free_s = max(self._in_free_s, self.now_s) + self._in_s[index]
            self._in_end_s.append(self._in_free_s)
            self.begun_at.append(moment)
            index += 1

    def _wait_for_out(self, end_s: float) -> None:
        """Wait for a tensor's own copy out, which is demanded back already."""
        if end_s > self.now_s:
            self.stalled_out_s += end_s - self.now_s
            self.now_s = end_s
            self._drain()

    def _wait_for_demanded(self) -> None:
        """Wait for the copies in that the moment demands; the last of them ends last."""
        if self._next_demand:
            end_s = self._in_end_s[self._next_demand - 1]
            if end_s > self.now_s:
                self.stalled_in_s += end_s - self.now_s
                self.now_s = end_s

    def _next_event(self, moment: int) -> int:
        """Return the next moment at which anything but the passing of time can happen."""
        following = self._moments
        if self._leaving:
            return moment + 1
        if self._next_out < len(self._out):
            following = min(following, self._out[self._next_out][0] + 1)
        begun = len(self.begun_at)
        if begun < len(self._in):
            following = min(following, self._earliest[begun])
        if self._next_demand < begun:
            following = min(following, self._demanded[self._next_demand])
        return max(following, moment + 1)

    def _enqueue(self, moment: int) -> None:
        """Enqueue the copies out that begin when a moment has ended."""
        while self._next_out < len(self._out) and self._out[self._next_out][0] == moment:
            _, tensor, nbytes, elapsed_s = self._out[self._next_out]
            self._out_free_s = max(self._out_free_s, self.now_s) + elapsed_s
            self._leaving.append((self._out_free_s, nbytes))
            self._leaving_bytes += nbytes
            self._out_end_s[tensor] = self._out_free_s
            self._next_out += 1


def _earliest(tables: ProblemTables, residency: Residency, budget_bytes: int) -> list[int]:
    """Find the first moment from which each copy in has room until its demand, one by one."""
    level = residency.level.copy()
    moved = residency.moved_in
    lowest = residency.step_moment[tables.last_forward_use[moved]] + 1
    first_backward = min(tables.problem.first_backward, len(tables.step_s) - 1)
    before = int(residency.step_moment[first_backward - 1]) + 1 if first_backward else 0
    earliest = []
    for demanded, least, nbytes in zip(
        residency.demanded.tolist(), lowest.tolist(), tables.nbytes[moved].tolist(), strict=True
    ):
        before = max(before, least)
        full = level[before:demanded] > budget_bytes - nbytes
        if full.any():
            before = demanded - int(full[::-1].argmax())
        level[before:demanded] += nbytes
        earliest.append(before)
    return earliest
