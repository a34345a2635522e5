"""Turn techniques into what a runtime does: per step, what before it and what after it.

Covers the order of actions and a check that nothing is read while it is away and nothing is away
twice. Does not cover doing it, nor what a runtime does when a prediction turns out to be wrong.

Invariants
----------
1. Before a step come first the copies in, then the rebuilds, each after what it reads.
2. What passed `check` reads only what is resident, and everything that goes away comes back once.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np

from dynamemo.graph.errors import InternalError
from dynamemo.graph.problem import Problem, Technique
from dynamemo.graph.problem_tables import tables_of
from dynamemo.graph.residency import effective, lay_out


@dataclass(frozen=True, slots=True)
class Drop:
    """Free a tensor that will be rebuilt."""

    tensor: int


@dataclass(frozen=True, slots=True)
class CopyOut:
    """Copy a tensor out, and free its block when that has ended."""

    tensor: int


@dataclass(frozen=True, slots=True)
class Prefetch:
    """Begin to copy a tensor in; whoever reads it waits for the end."""

    tensor: int


@dataclass(frozen=True, slots=True)
class Recompute:
    """Rebuild a tensor."""

    tensor: int


#: One thing that a runtime does.
Action: TypeAlias = Drop | CopyOut | Prefetch | Recompute


@dataclass(frozen=True, slots=True)
class StepActions:
    """List what surrounds one step, in order.

    Attributes
    ----------
    before
        Prefetch and Recompute.
    after
        Drop and CopyOut.
    """

    before: tuple[Action, ...] = ()
    after: tuple[Action, ...] = ()


def instructions(
    problem: Problem,
    techniques: tuple[Technique, ...],
    *,
    begun: Iterable[tuple[int, int]] = (),
) -> tuple[StepActions, ...]:
    """List the actions around each step.

    Parameters
    ----------
    problem
        A well-formed problem.
    techniques
        One a tensor.
    begun
        `Forecast.begun`: the steps in front of which copies in begin. Those that it does not name
        begin in front of the step that demands them.

    Returns
    -------
    tuple of StepActions
        One a step; it passes `check`.

    Raises
    ------
    ProblemError
        If a tensor does not allow its technique.
    """
    problem.validate_techniques(techniques)
    tables = tables_of(problem)
    codes = effective(tables, np.array(techniques, np.int8))
    if not problem.steps:
        return ()
    residency = lay_out(tables, codes)
    before: list[list[Action]] = [[] for _ in problem.steps]
    after: list[list[Action]] = [[] for _ in problem.steps]
    step_of = {tensor: step for step, tensor in begun}
    for tensor in residency.moved_in.tolist():
        demanded = int(residency.first_demand[tensor])
        before[step_of.get(tensor, demanded)].append(Prefetch(tensor))
    for tensor in residency.rebuilt.tolist():
        before[int(residency.first_demand[tensor])].append(Recompute(tensor))
        after[problem.tensors[tensor].last_forward_use].append(Drop(tensor))
    for tensor in residency.moved_out.tolist():
        after[problem.tensors[tensor].last_forward_use].append(CopyOut(tensor))
    actions = tuple(map(_of_step, before, after))
    check(problem, actions)
    return actions


def check(problem: Problem, actions: tuple[StepActions, ...]) -> None:
    """Check actions step by step.

    Raises
    ------
    InternalError
        If a step or a rebuild reads a tensor that is away, a tensor goes away that is not there or
        has been away before, or comes back that is not away or in another way than it went.
    """
    if len(actions) != len(problem.steps):
        raise InternalError(f"actions for {len(actions)} steps of {len(problem.steps)}")
    checker = _Checker(problem)
    reads: list[list[int]] = [[] for _ in problem.steps]
    for index, tensor in enumerate(problem.tensors):
        for step in {tensor.made_at, tensor.last_forward_use, *tensor.uses}:
            reads[step].append(index)
    for step, (around, read) in enumerate(zip(actions, reads, strict=True)):
        for action in around.before:
            checker.bring_back(action, step)
        checker.check_present(read, step)
        for action in around.after:
            checker.send_away(action, step)
    checker.check_end()


class _Checker:
    """Follow what is away while actions are walked; mutable."""

    def __init__(self, problem: Problem) -> None:
        self._problem = problem
        #: How each tensor that is away left.
        self._away: dict[int, type[Drop] | type[CopyOut]] = {}
        self._was_away: set[int] = set()

    def bring_back(self, action: Action, step: int) -> None:
        """Take in what comes back in front of a step."""
        left = self._away.pop(action.tensor, None)
        expected = {Drop: Recompute, CopyOut: Prefetch}.get(left) if left else None
        if expected is None or not isinstance(action, expected):
            raise InternalError(f"{action} in front of step {step}: it left by {left}")
        rebuild = self._problem.tensors[action.tensor].rebuild
        if isinstance(action, Recompute) and rebuild is not None:
            self.check_present(rebuild.sources, step)

    def send_away(self, action: Action, step: int) -> None:
        """Take in what leaves after a step."""
        tensor = self._problem.tensors[action.tensor]
        if not isinstance(action, Drop | CopyOut) or action.tensor in self._was_away:
            raise InternalError(f"{action} after step {step}, which nothing allows, or once more")
        if not tensor.made_at <= step < max(tensor.uses, default=-1):
            raise InternalError(f"{action} after step {step}: not there, or never needed again")
        self._was_away.add(action.tensor)
        self._away[action.tensor] = type(action)

    def check_present(self, tensors: Iterable[int], step: int) -> None:
        """Check that nothing is read while it is away."""
        missing = [tensor for tensor in tensors if tensor in self._away]
        if missing:
            raise InternalError(f"tensors {missing} are read at step {step} while they are away")

    def check_end(self) -> None:
        """Check that everything came back."""
        if self._away:
            raise InternalError(f"tensors {sorted(self._away)} never come back")


def _of_step(before: list[Action], after: list[Action]) -> StepActions:
    """Order the actions of one step: copies in come before rebuilds."""
    return StepActions(
        tuple(sorted(before, key=lambda action: isinstance(action, Recompute))), tuple(after)
    )
