"""Policies are pure: numbers in, a technique and its cost out."""

import dataclasses
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynamemo.policies import POLICIES, Candidate, Suggestion, Technique, policy_named

RECOMPUTE, OFFLOAD = Technique.RECOMPUTE, Technique.OFFLOAD
INF = math.inf


def candidate(**changes):
    """A storage of 1 MiB, used 10 operations ago, needed in 4, and both techniques possible."""
    plain = Candidate(
        nbytes=1 << 20,
        distance=4,
        staleness=10,
        is_expired=False,
        is_checkpoint=False,
        recompute_s=8.0,
        offload_s=1.0,
        fetch_s=2.0,
    )
    return dataclasses.replace(plain, **changes)


def technique(name, **changes):
    suggestion = policy_named(name).suggest(candidate(**changes))
    return None if suggestion is None else suggestion.technique


def cost(name, **changes):
    return policy_named(name).suggest(candidate(**changes)).cost_s


class TestNames:
    def test_a_policy_is_found_by_its_own_name(self):
        assert {name: policy.name for name, policy in POLICIES.items()} == {
            name: name for name in POLICIES
        }

    def test_an_unknown_name_lists_the_known(self):
        with pytest.raises(ValueError) as caught:
            policy_named("best")
        assert "'best'" in str(caught.value)
        assert all(name in str(caught.value) for name in POLICIES)

    def test_only_torture_evicts_without_need(self):
        assert [name for name, policy in POLICIES.items() if policy.is_eager] == ["torture"]

    def test_only_memory_centric_drops_rebuilt_sources_again(self):
        drops = [name for name, policy in POLICIES.items() if not policy.keeps_rebuilt_sources]
        assert drops == ["memory-centric"]


@pytest.mark.parametrize(
    ("name", "changes", "expected"),
    [
        ("none", {}, None),
        ("none", {"is_expired": True}, None),
        ("liveness", {}, None),
        ("liveness", {"is_expired": True}, RECOMPUTE),
        ("liveness", {"is_expired": True, "recompute_s": INF}, OFFLOAD),
        ("lru", {}, OFFLOAD),
        ("lru", {"recompute_s": 0.0}, OFFLOAD),
        ("lru", {"offload_s": INF}, None),
        ("speed-centric", {}, RECOMPUTE),
        ("speed-centric", {"is_checkpoint": True}, OFFLOAD),
        ("speed-centric", {"is_checkpoint": True, "offload_s": INF}, None),
        ("speed-centric", {"recompute_s": INF}, OFFLOAD),
        ("memory-centric", {}, RECOMPUTE),
        ("memory-centric", {"is_checkpoint": True}, OFFLOAD),
        ("memory-centric", {"is_checkpoint": True, "is_expired": True}, RECOMPUTE),
        ("recompute", {"recompute_s": 1e9}, RECOMPUTE),
        ("recompute", {"recompute_s": INF}, None),
        ("offload", {"recompute_s": 0.0}, OFFLOAD),
        ("offload", {"offload_s": INF}, None),
        ("cost-aware", {"recompute_s": 2.9}, RECOMPUTE),
        ("cost-aware", {"recompute_s": 3.0}, RECOMPUTE),
        ("cost-aware", {"recompute_s": 3.1}, OFFLOAD),
        ("cost-aware", {"recompute_s": INF}, OFFLOAD),
        ("cost-aware", {"offload_s": INF}, RECOMPUTE),
        ("cost-aware", {"offload_s": INF, "recompute_s": INF}, None),
        ("torture", {"recompute_s": 1e9}, RECOMPUTE),
        ("torture", {"recompute_s": INF}, OFFLOAD),
        ("torture", {"recompute_s": INF, "offload_s": INF}, None),
    ],
)
def test_which_technique(name, changes, expected):
    assert technique(name, **changes) is expected


class TestCost:
    def test_cost_aware_pays_for_both_ways_over_the_distance(self):
        assert cost("cost-aware") == (1.0 + 2.0) / 4
        assert cost("cost-aware", recompute_s=1.0) == 1.0 / 4
        assert cost("cost-aware", distance=100) == (1.0 + 2.0) / 100

    def test_offload_alone_pays_for_both_ways(self):
        assert cost("offload", distance=1) == 3.0

    def test_lru_takes_the_longest_unused_first(self):
        costs = [cost("lru", staleness=age) for age in (0, 1, 5, 50)]
        assert costs == sorted(costs, reverse=True)
        assert len(set(costs)) == 4

    def test_centric_drops_before_it_copies(self):
        assert cost("speed-centric") < cost("speed-centric", is_checkpoint=True)

    def test_what_is_expired_costs_less_than_what_is_needed_in_the_end(self):
        needed = candidate(distance=1_000_000)
        expired = candidate(is_expired=True, distance=1)
        policy = policy_named("cost-aware")
        assert policy.suggest(expired).cost_s < policy.suggest(needed).cost_s

    def test_an_expired_copy_is_not_charged_for_its_way_back(self):
        assert cost("cost-aware", is_expired=True, recompute_s=INF) == 1.0

    def test_among_expired_the_shortest_is_dropped_first(self):
        short = cost("cost-aware", is_expired=True, nbytes=1 << 12)
        assert short < cost("cost-aware", is_expired=True, nbytes=1 << 20)


seconds = st.one_of(st.floats(0, 1e6), st.just(INF))
candidates = st.builds(
    Candidate,
    nbytes=st.integers(1, 1 << 40),
    distance=st.integers(1, 1 << 20),
    staleness=st.integers(0, 1 << 20),
    is_expired=st.booleans(),
    is_checkpoint=st.booleans(),
    recompute_s=seconds,
    offload_s=seconds,
    fetch_s=st.floats(0, 1e6),
)


@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)
class TestEvery:
    @given(candidate=candidates)
    def test_suggests_only_what_can_be_done_at_a_finite_cost(self, policy, candidate):
        suggestion = policy.suggest(candidate)
        if suggestion is None:
            return
        assert 0 <= suggestion.cost_s < INF
        is_drop = suggestion.technique is RECOMPUTE
        assert (candidate.recompute_s if is_drop else candidate.offload_s) < INF

    @given(candidate=candidates)
    def test_says_the_same_twice(self, policy, candidate):
        assert policy.suggest(candidate) == policy.suggest(candidate)

    @given(candidate=candidates, further=st.integers(1, 1 << 20))
    def test_a_later_use_never_costs_more(self, policy, candidate, further):
        later = dataclasses.replace(candidate, distance=candidate.distance + further)
        now, then = policy.suggest(candidate), policy.suggest(later)
        assert (now is None) == (then is None)
        if now is not None:
            assert then.cost_s <= now.cost_s

    @given(candidate=candidates)
    def test_nothing_is_suggested_where_nothing_is_possible(self, policy, candidate):
        stuck = dataclasses.replace(candidate, recompute_s=INF, offload_s=INF)
        assert policy.suggest(stuck) is None


def test_a_suggestion_is_a_value():
    suggestion = Suggestion(OFFLOAD, 1.0)
    assert suggestion == Suggestion(OFFLOAD, 1.0)
    with pytest.raises(dataclasses.FrozenInstanceError):
        suggestion.cost_s = 2.0
