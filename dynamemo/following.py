"""Follow a plan: what an iteration like the last one should drop or copy out, and where.

Covers when a plan is made and what it says in the terms of a running iteration; the plan itself is
the graph package's. After an iteration in which memory was short, the recorded iteration is planned
as a whole, and the plan is filed under the paths of the program that it speaks of (see
`foresight`). An iteration that takes another path meets no plan from there on and is left to what
the policy decides when memory is short.

Invariants kept here (numbers of the design's list):
  5. A plan that was wrong costs seconds, never a value.
  6. At most `MOST_PLANS` plans are kept, the newest.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from dynamemo.foresight import Foresight, Key, Ran
from dynamemo.graph import BudgetError, LinkRate, Planner, Problem, Trace, problem_of
from dynamemo.graph import Technique as Planned
from dynamemo.policies import Technique

#: Plans that are kept.
MOST_PLANS = 32
#: Occurrences of one program after which it is planned (again): costs are better known by then.
_PLANNED_AFTER = frozenset({1, 3, 8, 64, 512})
#: Part of the memory that no plan uses: what lies between blocks, and what is not recorded.
_MARGIN = 0.03

_TECHNIQUES = {Planned.RECOMPUTE: Technique.RECOMPUTE, Planned.OFFLOAD: Technique.OFFLOAD}


@dataclass(frozen=True, slots=True)
class Recorded:
    """A complete iteration, as the runtime knows it."""

    trace: Trace
    #: The recorder's id of each operation of the trace; a backward has its forward's.
    op_ids: tuple[int, ...]
    outward: LinkRate
    inward: LinkRate
    #: Bytes of the arena.
    capacity_bytes: int
    #: Bytes in use by what is no tensor of a graph: parameters, gradients, optimizer state, data.
    lasting_bytes: int


class Follower:
    """Makes plans between iterations and hands them to the foresight.

    Parameters
    ----------
    foresight : Foresight
        Told what is due where.
    look_back : callable
        Returns the last complete iteration.
    """

    def __init__(self, foresight: Foresight, look_back: Callable[[], Recorded]) -> None:
        self._foresight = foresight
        self._look_back = look_back
        #: How often the program that ended at a path ran short of memory; the newest last.
        self._seen: dict[int, int] = {}

    def end_iteration(self, ran: dict[int, Ran], keys: dict[int, Key]) -> None:
        """Plan the iteration that has just ended, if it is time to; memory was short in it.

        Parameters
        ----------
        ran : dict
            Path and signature of each function, by op id.
        keys : dict
            What each storage is called from one iteration to the next, by its id.
        """
        if not ran:
            return
        end = ran[max(ran)][0]
        count = self._seen.pop(end, 0) + 1
        self._seen[end] = count
        if len(self._seen) > MOST_PLANS:
            del self._seen[next(iter(self._seen))]
        if count in _PLANNED_AFTER:
            self._foresight.follow(end, self._plan(ran, keys), most=MOST_PLANS)

    def _plan(
        self, ran: dict[int, Ran], keys: dict[int, Key]
    ) -> dict[int, dict[Key, Technique | None]]:
        recorded = self._look_back()
        problem = problem_of(recorded.trace, recorded.outward, recorded.inward)
        unrecorded_bytes = max(0, recorded.lasting_bytes - problem.lasting_bytes)
        budget_bytes = int(recorded.capacity_bytes * (1 - _MARGIN)) - unrecorded_bytes
        techniques = _techniques(problem, budget_bytes)
        due: dict[int, dict[Key, Technique | None]] = {}
        for tensor, technique in zip(problem.tensors, techniques, strict=True):
            key = keys.get(tensor.key) if isinstance(tensor.key, int) else None
            last = ran.get(recorded.op_ids[tensor.last_forward_use])
            if key is not None and last is not None and tensor.uses:
                due.setdefault(last[0], {})[key] = _TECHNIQUES.get(technique)
        return due


def _techniques(problem: Problem, budget_bytes: int) -> tuple[Planned, ...]:
    """Plan for a budget, or for the smallest that a plan is found for."""
    planner = Planner(problem)
    try:
        return planner.plan(budget_bytes).techniques
    except BudgetError as error:
        return planner.plan(error.smallest_bytes).techniques
