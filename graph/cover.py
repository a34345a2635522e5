"""Choose techniques so that memory stays within a budget, quickly and without a clock.

What memory exceeds the budget by at each step has to be covered by tensors that are away at that
step. Covers two moves: copy out what the link hides, the dearest to rebuild first; and drop what is
cheapest to rebuild per byte. Does not cover judging what came out: that is `forecast`.

A dropped tensor is rebuilt once, whatever its sources are, so seconds add up. What chains cost is
memory: its dropped sources come back with it. Where that is too much, a source in the middle of the
chain is pinned: kept, or copied out.

Invariants
----------
1. What comes back allows only what the problem allows.
2. Bounded: at most `MAX_ROUNDS` layouts.
"""

from dataclasses import dataclass

import numpy as np

from dynamemo.graph.problem import Technique
from dynamemo.graph.problem_tables import Codes, Flags, ProblemTables, Seconds
from dynamemo.graph.residency import Residency, lay_out

#: Layouts that covering one budget may take.
MAX_ROUNDS = 48

#: Parts of the time in which copies are counted against the link.
_PARTS = 32

_KEEP, _RECOMPUTE, _OFFLOAD = np.int8(0), np.int8(1), np.int8(2)


@dataclass(frozen=True, slots=True)
class Covered:
    """Hold techniques and how they are laid out.

    Attributes
    ----------
    codes
        One technique a tensor.
    residency
        Their layout.
    is_enough
        Whether they stay within the budget.
    """

    codes: Codes
    residency: Residency
    is_enough: bool


def cover(
    tables: ProblemTables, codes: Codes, budget_bytes: int, *, pinned: Flags | None = None
) -> Covered:
    """Send away more, cheapest first, until memory stays within a budget.

    Parameters
    ----------
    tables
        Of the problem.
    codes
        Where to begin; not changed.
    budget_bytes
        What memory must not exceed.
    pinned
        Tensors whose technique stays as it is.

    Returns
    -------
    Covered
        The best that was found; `is_enough` tells whether it is.
    """
    covering = _Covering(tables, codes, budget_bytes, pinned)
    for _ in range(MAX_ROUNDS):
        if covering.excess_bytes() <= 0 or not covering.improve():
            break
    return Covered(covering.codes, covering.residency, covering.excess_bytes() <= 0)


class _Covering:
    """Improve techniques round by round; mutable, used once."""

    def __init__(
        self, tables: ProblemTables, codes: Codes, budget_bytes: int, pinned: Flags | None
    ) -> None:
        self.codes = codes.copy()
        self.residency = lay_out(tables, codes)
        self._tables = tables
        self._budget_bytes = budget_bytes
        self._pinned = np.zeros(len(codes), bool) if pinned is None else pinned.copy()
        self._price = price_per_byte(tables)
        self._levels = self.residency.step_levels()

    def excess_bytes(self) -> int:
        """Return by how much the worst step exceeds the budget."""
        return int(self._levels.max()) - self._budget_bytes

    def improve(self) -> bool:
        """Cover the worst step; False where nothing is left to try."""
        step = int(self._levels.argmax())
        excess = int(self._levels[step]) - self._budget_bytes
        if not (
            self._send(step, excess, self._tables.may_drop, _RECOMPUTE)
            or self._send(step, excess, self._tables.may_move, _OFFLOAD)
            or self._pin(step, excess)
        ):
            return False
        self.residency = lay_out(self._tables, self.codes)
        self._levels = self.residency.step_levels()
        return True

    def _send(self, step: int, excess: int, allowed: Flags, technique: np.int8) -> bool:
        """Send the cheapest kept tensors away that cover a step, as many as are needed."""
        tables = self._tables
        inside = (tables.last_forward_use < step) & (self.residency.first_demand > step)
        chosen = np.flatnonzero(allowed & ~self._pinned & (self.codes == _KEEP) & inside)
        if not len(chosen):
            return False
        order = chosen[np.argsort(self._price[chosen], kind="stable")]
        enough = int(np.searchsorted(np.cumsum(tables.nbytes[order]), excess)) + 1
        self.codes[order[:enough]] = technique
        return True

    def _pin(self, step: int, excess: int) -> bool:
        """Break a chain whose sources are at a step only because something is rebuilt from them."""
        tables, residency = self._tables, self.residency
        early = (residency.first_demand <= step) & (tables.first_use > step)
        held = np.flatnonzero(early & (self.codes == _RECOMPUTE) & ~self._pinned)
        if not len(held):
            return self._move_rebuilt(step)
        below = np.cumsum(tables.nbytes[held])
        middle = min(int(np.searchsorted(below, excess)) + 1, len(held) - 1)
        tensor = int(held[middle])
        self.codes[tensor] = _OFFLOAD if tables.may_move[tensor] else _KEEP
        self._pinned[tensor] = True
        return True

    def _move_rebuilt(self, step: int) -> bool:
        """Copy out instead what is rebuilt in front of a step and needs transients there."""
        tables = self._tables
        rebuilt = (self.residency.first_demand == step) & (self.codes == _RECOMPUTE)
        chosen = np.flatnonzero(rebuilt & ~self._pinned)
        if not len(chosen):
            return False
        movable = chosen[tables.may_move[chosen]]
        self.codes[chosen] = _KEEP
        self.codes[movable] = _OFFLOAD
        self._pinned[chosen] = True
        return True


def price_per_byte(tables: ProblemTables) -> Seconds:
    """Compute what rebuilding each tensor costs per byte; infinite where it must not be."""
    price: Seconds = tables.rebuild_s / np.maximum(tables.nbytes, 1)
    return price


def offload_hidden(
    tables: ProblemTables, codes: Codes, budget_bytes: int, *, share: float
) -> Codes:
    """Copy out what the link hides, the dearest to rebuild first.

    Parameters
    ----------
    tables
        Of the problem.
    codes
        Where to begin; not changed.
    budget_bytes
        Nothing is copied out that covers no excess over it.
    share
        Share of the link's time to use: 1 for what should just be hidden.

    Returns
    -------
    Codes
        With OFFLOAD for the tensors chosen.
    """
    codes = codes.copy()
    residency = lay_out(tables, codes)
    excess = residency.step_levels() - budget_bytes
    first_demand = residency.first_demand
    chosen = np.flatnonzero(tables.may_move & (codes == _KEEP))
    price = tables.rebuild_s[chosen] / np.maximum(tables.out_s[chosen], 1e-12)
    order = chosen[np.lexsort((tables.last_forward_use[chosen], -price))]
    link = _LinkTime(tables, int(excess.argmax()), share)
    for tensor in order.tolist():
        begin, end = int(tables.last_forward_use[tensor]) + 1, int(first_demand[tensor])
        inside = excess[begin:end]
        if begin < end and inside.max() > 0 and link.take(tensor):
            inside -= tables.nbytes[tensor]
            codes[tensor] = _OFFLOAD
            if int(excess.max()) <= 0:
                break
    return codes


class _LinkTime:
    """Count copies against the time that the link has for them, each way; mutable.

    Of the copies out that begin behind any moment, no more fit than there is time until the peak;
    of those in that end before any moment, no more than since the peak.
    """

    def __init__(self, tables: ProblemTables, peak: int, share: float) -> None:
        self._tables = tables
        begin_s = tables.begin_s
        ends = np.linspace(0.0, begin_s[-1], _PARTS + 1)
        self._out_part = self._parts(begin_s[tables.last_forward_use + 1], ends)
        first_use = np.minimum(tables.first_use, len(tables.step_s) - 1)
        self._in_part = self._parts(begin_s[first_use], ends)
        self._out_left: list[float] = (share * np.maximum(0.0, begin_s[peak] - ends[:-1])).tolist()
        self._in_left: list[float] = (
            share * np.maximum(0.0, ends[1:] - begin_s[peak + 1])
        ).tolist()

    @staticmethod
    def _parts(at_s: Seconds, ends: Seconds) -> list[int]:
        parts = np.searchsorted(ends, at_s, side="right") - 1
        indices: list[int] = np.clip(parts, 0, _PARTS - 1).tolist()
        return indices

    def take(self, tensor: int) -> bool:
        """Take the time of one tensor's copies, if it is there."""
        out_parts = range(self._out_part[tensor] + 1)
        in_parts = range(self._in_part[tensor], _PARTS)
        out_s, in_s = float(self._tables.out_s[tensor]), float(self._tables.in_s[tensor])
        if min(self._out_left[: out_parts.stop]) < out_s:
            return False
        if min(self._in_left[in_parts.start :]) < in_s:
            return False
        for part in out_parts:
            self._out_left[part] -= out_s
        for part in in_parts:
            self._in_left[part] -= in_s
        return True


def prune(tables: ProblemTables, covered: Covered, budget_bytes: int) -> Covered:
    """Keep what need not be away, the dearest first.

    Parameters
    ----------
    tables
        Of the problem.
    covered
        Techniques that stay within the budget.
    budget_bytes
        The budget.

    Returns
    -------
    Covered
        Techniques that stay within it too.
    """
    codes = covered.codes.copy()
    left = budget_bytes - covered.residency.step_levels()
    away = np.flatnonzero(codes != _KEEP)
    cost = np.where(codes[away] == _RECOMPUTE, tables.rebuild_s[away], tables.out_s[away])
    first_demand = covered.residency.first_demand
    for tensor in away[np.argsort(-cost, kind="stable")].tolist():
        inside = left[tables.last_forward_use[tensor] + 1 : first_demand[tensor]]
        nbytes = tables.nbytes[tensor]
        if not len(inside) or inside.min() >= nbytes:
            inside -= nbytes
            codes[tensor] = _KEEP
    residency = lay_out(tables, codes)
    is_enough = int(residency.level.max()) <= budget_bytes
    return Covered(codes, residency, True) if is_enough else covered


def all_away(tables: ProblemTables) -> Codes:
    """Return techniques with everything away that may be, moved rather than rebuilt."""
    codes = np.where(tables.may_drop, _RECOMPUTE, _KEEP)
    return np.where(tables.may_move, np.int8(Technique.OFFLOAD), codes)
