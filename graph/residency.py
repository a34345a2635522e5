"""Lay out when each tensor has to be resident, for given techniques; no clock is needed for that.

A *moment* is a step, or a rebuild in front of one. Rebuilds in front of a step run in the order of
their tensors, so a source comes before what is rebuilt from it. Covers the order of moments and the
bytes that are in use at each, whatever the link does. Does not cover what is resident longer
because a copy out has not ended, or earlier because a copy in began ahead of need: `forecast`.

Invariants
----------
1. A tensor that is away is resident over two runs of moments: from the step that makes it to its
   last use in forward, and from its first demand to its last.
2. `level` is the least that these techniques need at each moment: a budget is feasible for them if
   and only if no level exceeds it.
"""

from dataclasses import dataclass

import numpy as np

from dynamemo.graph.problem import Technique
from dynamemo.graph.problem_tables import Codes, Flags, Integers, ProblemTables, Seconds


@dataclass(frozen=True, slots=True)
class Residency:
    """Tell what each moment is and what it needs.

    Attributes
    ----------
    step_moment
        The moment at which each step itself runs.
    rebuilt
        Tensors that are rebuilt, in that order.
    rebuilt_moment
        The moment of each.
    elapsed_s, level
        Seconds of each moment, and bytes in use at it.
    moved_out
        Tensors that are copied out, in the order of their last use in forward.
    moved_in
        The same tensors in the order of `demanded`.
    demanded
        The moment that first needs each of `moved_in`.
    first_demand, last_demand
        Of each tensor, as steps.
    """

    step_moment: Integers
    rebuilt: Integers
    rebuilt_moment: Integers
    elapsed_s: Seconds
    level: Integers
    moved_out: Integers
    moved_in: Integers
    demanded: Integers
    first_demand: Integers
    last_demand: Integers

    def step_levels(self) -> Integers:
        """Return the most bytes in use at each step or at a rebuild in front of it."""
        begins = np.concatenate(([0], self.step_moment[:-1] + 1))
        levels: Integers = np.maximum.reduceat(self.level, begins)
        return levels


def effective(tables: ProblemTables, codes: Codes) -> Codes:
    """Return the codes with KEEP for every tensor that backward never reads."""
    has_uses = tables.first_use < len(tables.step_s)
    return np.where(has_uses, codes, np.int8(Technique.KEEP))


def lay_out(tables: ProblemTables, codes: Codes) -> Residency:
    """Lay out moments and levels.

    Parameters
    ----------
    tables
        Of the problem; at least one step.
    codes
        One technique a tensor, each allowed; see `effective`.

    Returns
    -------
    Residency
        Arrays that nobody else holds.
    """
    steps = len(tables.step_s)
    dropped = np.flatnonzero(codes == Technique.RECOMPUTE)
    first_demand, last_demand = demands(tables, codes, dropped)
    order = np.argsort(first_demand[dropped], kind="stable")
    rebuilt = dropped[order]
    rebuilt_step = first_demand[rebuilt]
    rebuilt_moment = rebuilt_step + np.arange(len(rebuilt))
    step_moment = np.arange(steps) + np.searchsorted(rebuilt_step, np.arange(steps), side="right")
    moments = steps + len(rebuilt)
    elapsed_s = np.empty(moments)
    elapsed_s[step_moment] = tables.step_s
    elapsed_s[rebuilt_moment] = tables.rebuild_s[rebuilt]
    own = np.empty(moments, np.int64)
    own[step_moment] = tables.own_bytes
    own[rebuilt_moment] = tables.own_bytes[rebuilt_step] + tables.transient_bytes[rebuilt]
    needed_at = step_moment[np.minimum(first_demand, steps - 1)]
    needed_at[rebuilt] = rebuilt_moment
    moved = np.flatnonzero(codes == Technique.OFFLOAD)
    if len(moved):
        _need_sources(tables, codes, first_demand, rebuilt, rebuilt_moment, needed_at)
    is_away = codes != Technique.KEEP
    level = own + _resident_bytes(tables, is_away, step_moment, needed_at, last_demand, moments)
    moved_in = moved[np.argsort(needed_at[moved], kind="stable")]
    return Residency(
        step_moment,
        rebuilt,
        rebuilt_moment,
        elapsed_s,
        level,
        moved[np.argsort(tables.last_forward_use[moved], kind="stable")],
        moved_in,
        needed_at[moved_in],
        first_demand,
        last_demand,
    )


def demands(tables: ProblemTables, codes: Codes, dropped: Integers) -> tuple[Integers, Integers]:
    """Find the steps that first and last need each tensor, rebuilds of others included.

    What is rebuilt from a tensor is listed behind it, so one pass from the end is enough.
    """
    if not tables.has_sources[dropped].any():
        return tables.first_use.copy(), tables.last_use.copy()
    first: list[int] = tables.first_use.tolist()
    last: list[int] = tables.last_use.tolist()
    forward: list[int] = tables.last_forward_use.tolist()
    sources = tables.sources
    for tensor in reversed(dropped.tolist()):
        step = first[tensor]
        for source in sources[tensor]:
            if forward[source] < step < first[source]:
                first[source] = step
            if step > last[source]:
                last[source] = step
    return np.array(first, np.int64), np.array(last, np.int64)


def _need_sources(
    tables: ProblemTables,
    codes: Codes,
    first_demand: Integers,
    rebuilt: Integers,
    rebuilt_moment: Integers,
    needed_at: Integers,
) -> None:
    """Move the first demand of an offloaded source from its step to the rebuild that reads it."""
    for tensor, moment in zip(rebuilt.tolist(), rebuilt_moment.tolist(), strict=True):
        for source in tables.sources[tensor]:
            if (
                codes[source] == Technique.OFFLOAD
                and first_demand[source] == first_demand[tensor]
                and moment < needed_at[source]
            ):
                needed_at[source] = moment


def _resident_bytes(
    tables: ProblemTables,
    is_away: Flags,
    step_moment: Integers,
    needed_at: Integers,
    last_demand: Integers,
    moments: int,
) -> Integers:
    """Sum the bytes of resident tensors at each moment."""
    change = np.zeros(moments + 1, np.int64)
    np.add.at(change, step_moment[tables.made_at], tables.nbytes)
    np.subtract.at(change, step_moment[last_demand] + 1, tables.nbytes)
    away = np.flatnonzero(is_away)
    np.subtract.at(change, step_moment[tables.last_forward_use[away]] + 1, tables.nbytes[away])
    np.add.at(change, needed_at[away], tables.nbytes[away])
    levels: Integers = np.cumsum(change[:-1])
    return levels
