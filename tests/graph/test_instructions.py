"""Test the actions around steps, and that the check refuses what must not be."""

from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynamemo.graph.errors import InternalError
from dynamemo.graph.forecast import forecast
from dynamemo.graph.instructions import (
    Action,
    CopyOut,
    Drop,
    Prefetch,
    Recompute,
    StepActions,
    check,
    instructions,
)
from dynamemo.graph.problem import Technique
from tests.graph.problems import MIB, random_problem, random_techniques
from tests.graph.test_forecast import chain

KEEP, RECOMPUTE, OFFLOAD = Technique.KEEP, Technique.RECOMPUTE, Technique.OFFLOAD


@given(seed=st.integers(0, 1 << 32), functions=st.integers(2, 12))
def test_actions_are_well_formed_and_complete(seed: int, functions: int) -> None:
    random = Random(seed)
    problem = random_problem(random, functions)
    techniques = random_techniques(random, problem)
    begun = forecast(problem, techniques, 40 * MIB).begun
    for actions in (
        instructions(problem, techniques),
        instructions(problem, techniques, begun=begun),
    ):
        left = [a for around in actions for a in around.after]
        assert {a.tensor for a in left if isinstance(a, Drop)} == _chosen(techniques, RECOMPUTE)
        assert {a.tensor for a in left if isinstance(a, CopyOut)} == _chosen(techniques, OFFLOAD)
        assert len(left) == len([a for around in actions for a in around.before])


def _chosen(techniques: tuple[Technique, ...], wanted: Technique) -> set[int]:
    return {index for index, technique in enumerate(techniques) if technique is wanted}


def test_actions_in_order() -> None:
    assert instructions(chain(), (OFFLOAD, RECOMPUTE)) == (
        StepActions(),
        StepActions(after=(CopyOut(0),)),
        StepActions(after=(Drop(1),)),
        StepActions(before=(Prefetch(0), Recompute(1))),
        StepActions(),
        StepActions(),
    )


@pytest.mark.parametrize(
    ("before", "after", "message"),
    [
        ({}, {1: Drop(0)}, "read at step 4 while they are away"),
        ({4: Recompute(0)}, {}, "it left by None"),
        ({4: Prefetch(0)}, {1: Drop(0)}, "it left by"),
        ({3: Recompute(1), 4: Prefetch(0)}, {1: CopyOut(0), 2: Drop(1)}, "read at step 3"),
        ({2: Recompute(0), 4: Recompute(0)}, {1: Drop(0), 2: Drop(0)}, "once more"),
        ({}, {5: Drop(0)}, "never needed again"),
        ({}, {0: Drop(1)}, "not there"),
        ({}, {0: Recompute(0)}, "nothing allows"),
    ],
)
def test_the_check_refuses(
    before: dict[int, Action], after: dict[int, Action], message: str
) -> None:
    actions = tuple(
        StepActions(
            (before[step],) if step in before else (), (after[step],) if step in after else ()
        )
        for step in range(6)
    )
    with pytest.raises(InternalError, match=message):
        check(chain(), actions)
