"""Bound from below what any plan of a problem needs: bytes, and seconds within a budget.

Covers every plan whose seconds `forecast` predicts. The bound of seconds looks at one step at a
time and relaxes the rest, so it is not tight where several steps are short of memory in different
ways.

At a step where all kept tensors together exceed the budget by some bytes, tensors of that many
bytes are away. What is dropped costs the seconds of its rebuild after the step, at best those that
are cheapest per byte. What is moved has to be out before the step, since its last use in forward,
and to come in after it, until its first use; whatever exceeds that time is waited for. Rebuilds
hide copies in, never copies out. Tensors are divisible, and latencies count only in the smallest
seconds per byte of a copy.
"""

from math import inf

import numpy as np

from dynamemo.graph.problem import Problem
from dynamemo.graph.problem_tables import Flags, Integers, ProblemTables, Seconds, tables_of

#: Steps that are looked at, those with the most bytes too much.
_STEPS = 48


def lower_bound_s(problem: Problem, budget_bytes: int) -> float:
    """Bound the seconds of every plan within a budget.

    Parameters
    ----------
    problem
        A well-formed problem.
    budget_bytes
        The budget.

    Returns
    -------
    float
        Seconds; infinite where it is certain that no plan fits.
    """
    return lower_bound_of(tables_of(problem), budget_bytes)


def lower_bound_of(tables: ProblemTables, budget_bytes: int) -> float:
    """Bound the seconds of every plan within a budget, from tables."""
    if not len(tables.step_s):
        return 0.0
    compute_s = float(tables.begin_s[-1])
    excess = _kept_levels(tables) - budget_bytes
    worst = np.argsort(-excess, kind="stable")[:_STEPS]
    added_s = 0.0
    for step in worst[excess[worst] > 0].tolist():
        added_s = max(added_s, _added_s(tables, step, int(excess[step])))
    return compute_s + added_s


def least_level(tables: ProblemTables) -> int:
    """Bound the bytes that every plan needs: as if everything were away whenever it may be."""
    return int(_levels(tables, tables.may_drop | tables.may_move).max())


def _kept_levels(tables: ProblemTables) -> Integers:
    """Compute the bytes in use at each step if all is kept."""
    return _levels(tables, np.zeros(len(tables.nbytes), bool))


def _levels(tables: ProblemTables, is_away: Flags) -> Integers:
    """Compute the bytes in use at each step, of rebuilds nothing but their result."""
    change = np.zeros(len(tables.step_s) + 1, np.int64)
    np.add.at(change, tables.made_at, tables.nbytes)
    np.subtract.at(change, tables.last_use + 1, tables.nbytes)
    away = np.flatnonzero(is_away)
    np.subtract.at(change, tables.last_forward_use[away] + 1, tables.nbytes[away])
    np.add.at(change, tables.first_use[away], tables.nbytes[away])
    levels: Integers = tables.own_bytes + np.cumsum(change[:-1])
    return levels


def _added_s(tables: ProblemTables, step: int, excess: int) -> float:
    """Bound the seconds that covering an excess at one step adds."""
    inside = (tables.last_forward_use < step) & (tables.first_use > step)
    dropped = np.flatnonzero(inside & tables.may_drop)
    moved = np.flatnonzero(inside & tables.may_move)
    either = inside & (tables.may_drop | tables.may_move)
    if int(tables.nbytes[either].sum()) < excess:
        return inf
    dropped = dropped[tables.nbytes[dropped] > 0]
    moved = moved[tables.nbytes[moved] > 0]
    bytes_of_rebuilds, seconds_of_rebuilds = _cheapest(tables, dropped)
    most_moved = min(excess, int(tables.nbytes[moved].sum()))
    least_moved = max(0.0, excess - bytes_of_rebuilds[-1])
    # Convex and linear between these: the least lies on one of them, or where two lines cross.
    corners = excess - bytes_of_rebuilds
    knots = np.unique(np.concatenate((corners, (least_moved, most_moved))))
    knots = knots[(knots >= least_moved) & (knots <= most_moved)]
    rebuild_s = np.interp(excess - knots, bytes_of_rebuilds, seconds_of_rebuilds)
    out_s, in_s = _waits(tables, step, moved, knots)
    return _least(knots, np.maximum(out_s, 0.0), out_s, rebuild_s, in_s)


def _cheapest(tables: ProblemTables, dropped: Integers) -> tuple[Seconds, Seconds]:
    """Sum bytes and seconds of rebuilds, the cheapest per byte first."""
    order = dropped[np.argsort(tables.rebuild_s[dropped] / tables.nbytes[dropped])]
    nbytes = np.concatenate(([0.0], np.cumsum(tables.nbytes[order])))
    seconds = np.concatenate(([0.0], np.cumsum(tables.rebuild_s[order])))
    return nbytes, seconds


def _waits(
    tables: ProblemTables, step: int, moved: Integers, nbytes: Seconds
) -> tuple[Seconds, Seconds]:
    """Compute copies out and in of some bytes less the time there is for each; may be negative."""
    if not len(moved):
        return -np.ones_like(nbytes), -np.ones_like(nbytes)
    sizes = tables.nbytes[moved]
    out_rate = float((tables.out_s[moved] / sizes).min())
    in_rate = float((tables.in_s[moved] / sizes).min())
    first_out = float(tables.begin_s[tables.last_forward_use[moved].min() + 1])
    last_in = float(tables.begin_s[tables.first_use[moved].max()])
    out_s = nbytes * out_rate - (tables.begin_s[step] - first_out)
    in_s = nbytes * in_rate - (last_in - tables.begin_s[step + 1])
    return out_s, in_s


def _least(
    knots: Seconds, waits: Seconds, out_s: Seconds, rebuild_s: Seconds, in_s: Seconds
) -> float:
    """Find the least of waits + max(rebuild_s, in_s), given at knots and linear between."""
    least = float((waits + np.maximum(rebuild_s, in_s)).min())
    for line in (out_s, in_s - rebuild_s):
        left, right = line[:-1], line[1:]
        crossed = np.flatnonzero(left * right < 0.0)
        share = left[crossed] / (left[crossed] - right[crossed])
        out, rebuild, inward = (
            x[crossed] + share * (x[crossed + 1] - x[crossed]) for x in (out_s, rebuild_s, in_s)
        )
        totals = np.maximum(out, 0.0) + np.maximum(rebuild, inward)
        least = min(least, float(totals.min(initial=inf)))
    return max(0.0, least)
