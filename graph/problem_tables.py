"""Hold a problem as arrays, made once and read by everything that judges many plans for it.

Not covered: anything that depends on the techniques chosen; that is `residency`.

Invariants
----------
1. `last_use[i] >= last_forward_use[i]`; `first_use[i]` is the number of steps where there is none.
"""

from dataclasses import dataclass
from math import inf
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from dynamemo.graph.problem import Problem

Integers: TypeAlias = NDArray[np.int64]
Seconds: TypeAlias = NDArray[np.float64]
Flags: TypeAlias = NDArray[np.bool_]
#: One `Technique` a tensor.
Codes: TypeAlias = NDArray[np.int8]


@dataclass(frozen=True, slots=True)
class ProblemTables:
    """Hold one array a column: of the problem's tensors, then of its steps.

    Attributes
    ----------
    problem
        What they were made from.
    nbytes, made_at, last_forward_use, first_use, last_use
        Of tensors.
    rebuild_s, transient_bytes, sources
        Of their rebuilds; infinite, 0 and empty where there is none.
    has_sources
        Whether the rebuild reads other tensors.
    may_drop, may_move
        Whether a tensor has uses and may be rebuilt, or copied out.
    out_s, in_s
        Seconds of a copy each way.
    step_s, own_bytes
        Of steps.
    begin_s
        Seconds from the first step's beginning to each step's, and to the end, if none ever waits.
    """

    problem: Problem
    nbytes: Integers
    made_at: Integers
    last_forward_use: Integers
    first_use: Integers
    last_use: Integers
    rebuild_s: Seconds
    transient_bytes: Integers
    sources: list[tuple[int, ...]]
    has_sources: Flags
    may_drop: Flags
    may_move: Flags
    out_s: Seconds
    in_s: Seconds
    step_s: Seconds
    own_bytes: Integers
    begin_s: Seconds


def tables_of(problem: Problem) -> ProblemTables:
    """Make the tables of a well-formed problem."""
    tensors = problem.tensors
    steps = len(problem.steps)
    has_uses = np.array([bool(t.uses) for t in tensors], bool)
    rebuilds = [t.rebuild for t in tensors]
    nbytes = np.array([t.nbytes for t in tensors], np.int64)
    step_s = np.array([s.elapsed_s for s in problem.steps], np.float64)
    sources = [r.sources if r is not None else () for r in rebuilds]
    return ProblemTables(
        problem,
        nbytes,
        np.array([t.made_at for t in tensors], np.int64),
        np.array([t.last_forward_use for t in tensors], np.int64),
        np.array([t.uses[0] if t.uses else steps for t in tensors], np.int64),
        np.array([t.uses[-1] if t.uses else t.last_forward_use for t in tensors], np.int64),
        np.array([inf if r is None else r.elapsed_s for r in rebuilds], np.float64),
        np.array([0 if r is None else r.transient_bytes for r in rebuilds], np.int64),
        sources,
        np.array([bool(s) for s in sources], bool),
        has_uses & np.array([r is not None for r in rebuilds], bool),
        has_uses & np.array([t.is_movable for t in tensors], bool),
        problem.outward.latency_s + nbytes / problem.outward.bytes_per_s,
        problem.inward.latency_s + nbytes / problem.inward.bytes_per_s,
        step_s,
        np.array([s.own_bytes for s in problem.steps], np.int64),
        np.concatenate(([0.0], np.cumsum(step_s))),
    )
