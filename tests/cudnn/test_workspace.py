"""Which plan is chosen, for every list of candidates, measurement and limit."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from dynamemo.cudnn.workspace import MEASURED_AT_MOST, Candidate, Chooser

BYTES = st.sampled_from([0, 0, 1, 512, 4096, 1 << 20, 100 << 20])
LIMITS = st.one_of(BYTES, st.integers(0, 200 << 20), st.just(math.inf))


def chooser_of(workspaces: list[int]) -> Chooser:
    return Chooser([Candidate(f"plan {i}", nbytes) for i, nbytes in enumerate(workspaces)])


WORKSPACES = st.lists(BYTES, min_size=1, max_size=20)


@given(WORKSPACES, LIMITS)
def test_a_choice_is_within_the_limit_wherever_any_candidate_is(workspaces, limit):
    index = chooser_of(workspaces).choose(limit)

    if min(workspaces) <= limit:
        assert workspaces[index] <= limit
    else:
        assert workspaces[index] == min(workspaces)


@given(WORKSPACES, LIMITS)
def test_unmeasured_candidates_are_taken_in_the_order_of_the_heuristics(workspaces, limit):
    fitting = [i for i, nbytes in enumerate(workspaces) if nbytes <= limit]

    if fitting:
        assert chooser_of(workspaces).choose(limit) == fitting[0]


@given(WORKSPACES, LIMITS, LIMITS, st.data())
def test_a_larger_limit_never_gives_a_slower_plan(workspaces, limit, other, data):
    chooser = chooser_of(workspaces)
    for index in range(len(workspaces)):
        chooser.note_seconds(index, data.draw(st.floats(0.1, 10)))
    low, high = sorted((limit, other))

    if min(workspaces) <= low:
        assert chooser.seconds(chooser.best(high)) <= chooser.seconds(chooser.best(low))


@given(WORKSPACES, LIMITS)
def test_what_is_measured_fits_and_contains_the_leanest(workspaces, limit):
    chooser = chooser_of(workspaces)

    measured = chooser.to_measure(limit)

    assert len(measured) == len(set(measured)) <= MEASURED_AT_MOST
    assert all(workspaces[index] <= limit for index in measured)
    if measured:
        assert min(workspaces[i] for i in measured) == min(b for b in workspaces if b <= limit)
        assert measured[0] == next(i for i, b in enumerate(workspaces) if b <= limit)


def test_what_was_timed_is_not_timed_again():
    chooser = chooser_of([100, 0])
    chooser.note_seconds(1, 1.0)

    assert chooser.to_measure(math.inf) == (0,)
    assert chooser.to_measure(0) == ()


def test_the_measured_fastest_within_the_limit_is_chosen():
    chooser = chooser_of([100, 50, 0])
    for index, seconds in enumerate((1.0, 2.0, 3.0)):
        chooser.note_seconds(index, seconds)

    assert [chooser.best(limit) for limit in (100, 99, 49, 0)] == [0, 1, 2, 2]


def test_without_candidates_there_is_nothing_to_choose():
    with pytest.raises(ValueError, match="no candidates"):
        Chooser([])


def test_when_all_are_rejected_choosing_fails():
    chooser = chooser_of([0])
    chooser.reject(0)

    with pytest.raises(LookupError):
        chooser.choose(math.inf)


def test_a_plan_that_needs_more_than_expected_loses_its_place():
    chooser = chooser_of([0, 10])
    assert chooser.choose(10) == 0

    chooser.note_workspace(0, 20)

    assert chooser.choose(10) == 1


class ChoosingMachine(RuleBasedStateMachine):
    """A chooser against the plain rule: keep what is admitted, else the best that is."""

    @initialize(workspaces=WORKSPACES)
    def start(self, workspaces):
        self.chooser = chooser_of(workspaces)
        self.workspaces = list(workspaces)
        self.seconds = {}
        self.rejected = set()
        self.in_force = None

    def usable(self):
        return [i for i in range(len(self.workspaces)) if i not in self.rejected]

    @precondition(lambda self: self.usable())
    @rule(limit=LIMITS)
    def choose(self, limit):
        if self.in_force is None or self.workspaces[self.in_force] > limit:
            fitting = [i for i in self.usable() if self.workspaces[i] <= limit]
            if fitting:
                self.in_force = min(fitting, key=lambda i: (self.seconds.get(i, math.inf), i))
            else:
                self.in_force = min(self.usable(), key=lambda i: (self.workspaces[i], i))
        assert self.chooser.choose(limit) == self.in_force

    @precondition(lambda self: self.usable())
    @rule(seconds=st.floats(0.1, 10), data=st.data())
    def measure(self, seconds, data):
        index = data.draw(st.sampled_from(self.usable()))
        self.seconds[index] = seconds
        self.chooser.note_seconds(index, seconds)

    @precondition(lambda self: self.usable())
    @rule(data=st.data())
    def reject(self, data):
        index = data.draw(st.sampled_from(self.usable()))
        self.rejected.add(index)
        self.chooser.reject(index)
        if self.in_force == index:
            self.in_force = None

    @rule()
    def reconsider(self):
        self.in_force = None
        self.chooser.reconsider()

    @precondition(lambda self: self.usable())
    @rule(nbytes=BYTES, data=st.data())
    def learn_workspace(self, nbytes, data):
        index = data.draw(st.sampled_from(self.usable()))
        self.workspaces[index] = nbytes
        self.chooser.note_workspace(index, nbytes)

    @invariant()
    def is_valid(self):
        self.chooser.validate()
        assert self.chooser.assigned == self.in_force
        assert self.chooser.usable() == self.usable()


TestChoosing = ChoosingMachine.TestCase
