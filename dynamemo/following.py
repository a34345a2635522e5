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

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from dynamemo.foresight import Foresight, Key, Plan, Ran
from dynamemo.graph import BudgetError, LinkRate, Planner, Problem, Trace, problem_of
from dynamemo.graph import Technique as Planned
from dynamemo.policies import Technique

#: Plans that are kept.
MOST_PLANS = 32
#: Occurrences of one program after which it is planned (again): costs are better known by then.
_PLANNED_AFTER = frozenset({1, 3, 8, 64, 512})
#: Part of the memory that a plan leaves: what lies between blocks, and what is not recorded. It
#: grows by a step after each iteration in which more than `_TOLERATED` of it had to be freed
#: besides what the plan says, and that many times at most.
_MARGIN, _MARGIN_STEP = 0.04, 0.02
_TOLERATED = 0.005
_MOST_STEPS = 10

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


@dataclass(slots=True)
class _Seen:
    """What is known of one program."""

    #: In which memory was short.
    iterations: int = 0
    #: By how many steps the margin has grown.
    steps: int = 0
    is_planned: bool = False


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
        #: What is known of the program that ended at a path; the newest last.
        self._seen: dict[int, _Seen] = {}

    def end_iteration(
        self, ran: dict[int, Ran], keys: dict[int, Key], unplanned_share: float
    ) -> None:
        """Plan the iteration that has just ended, if it is time to; memory was short in it.

        Parameters
        ----------
        ran : dict
            Path and signature of each function, by op id.
        keys : dict
            What each storage is called from one iteration to the next, by its id.
        unplanned_share : float
            How much was freed besides what a plan says, as a part of the memory.
        """
        if not ran:
            return
        end = ran[max(ran)][0]
        seen = self._seen[end] = self._seen.pop(end, _Seen())
        if len(self._seen) > MOST_PLANS:
            del self._seen[next(iter(self._seen))]
        seen.iterations += 1
        is_too_much = seen.is_planned and unplanned_share > _TOLERATED
        if is_too_much and seen.steps < _MOST_STEPS:
            seen.steps += 1
        elif seen.iterations not in _PLANNED_AFTER:
            return
        margin = _MARGIN + seen.steps * _MARGIN_STEP
        self._foresight.follow(end, self._plan(ran, keys, margin), most=MOST_PLANS)
        seen.is_planned = True

    def _plan(self, ran: dict[int, Ran], keys: dict[int, Key], margin: float) -> Plan:
        recorded = self._look_back()
        problem = problem_of(recorded.trace, recorded.outward, recorded.inward)
        unrecorded_bytes = max(0, recorded.lasting_bytes - problem.lasting_bytes)
        budget_bytes = int(recorded.capacity_bytes * (1 - margin)) - unrecorded_bytes
        techniques = _techniques(problem, budget_bytes)
        plan = Plan({}, {})
        path_before = dict(_paths_before(ran))
        for tensor, technique in zip(problem.tensors, techniques, strict=True):
            key = keys.get(tensor.key) if isinstance(tensor.key, int) else None
            last = ran.get(recorded.op_ids[tensor.last_forward_use])
            if key is None or last is None or not tensor.uses:
                continue
            plan.due.setdefault(last[0], {})[key] = _TECHNIQUES.get(technique)
            behind = path_before.get(recorded.op_ids[tensor.made_at])
            if technique is Planned.KEEP and behind is not None:
                lengths = plan.kept_behind.get(behind, frozenset())
                plan.kept_behind[behind] = lengths | {tensor.nbytes}
        return plan


def _paths_before(ran: dict[int, Ran]) -> Iterator[tuple[int, int]]:
    """Give the op id of each function, and the path that led to it, itself not included."""
    path = 0
    for op_id in sorted(ran):
        yield op_id, path
        path = ran[op_id][0]


def _techniques(problem: Problem, budget_bytes: int) -> tuple[Planned, ...]:
    """Plan for a budget, or for the smallest that a plan is found for."""
    planner = Planner(problem)
    try:
        return planner.plan(budget_bytes).techniques
    except BudgetError as error:
        return planner.plan(error.smallest_bytes).techniques
