"""Policies: what to evict when memory is short, and by which technique.

A policy is pure: it sees a `Candidate` (numbers only) and suggests a technique with its cost in
expected seconds, or refuses. The memory manager picks, among runs of adjacent blocks, the one with
the least total cost, checks that the suggestion can be carried out, and does it.

The names: `none` accounts only. `liveness` evicts what has had its last predicted use. `lru` is the
seed's tensor cache (least recently used, copies only). `speed-centric` and `memory-centric` are the
seed's recompute strategies with copies of checkpoints; `recompute` and `offload` are each technique
alone. `cost-aware` takes the cheaper technique by measured seconds and is the default. `torture`
evicts everything after every function, for tests.

Source: Wang et al., PPoPP 2018, sections 3.2-3.4 and Algorithm 2; the seed has no measured cost and
decides by layer type. The eviction score (cost over bytes and distance) follows Kirisame et al.,
"Dynamic Tensor Rematerialization", 2021, with the distance to the next use instead of staleness.
"""

from __future__ import annotations

import enum
import math
from dataclasses import dataclass
from typing import Protocol


class Technique(enum.Enum):
    """How an evicted storage comes back."""

    OFFLOAD = "offload"
    RECOMPUTE = "recompute"


@dataclass(frozen=True, slots=True)
class Candidate:
    """What a policy knows of a storage that could be evicted."""

    nbytes: int
    #: Predicted operations until its next use, at least 1.
    distance: int
    #: Operations since it was last used.
    staleness: int
    #: Whether every function that needs it has run backward.
    is_expired: bool
    #: Whether the seed would call it a checkpoint.
    is_checkpoint: bool
    #: Seconds to recompute it; inf where it cannot be.
    recompute_s: float
    #: Seconds that the device waits for it to be copied out: 0 where it is already, inf where no
    #: tier has room; and to be copied back, as far as that is not foreseen in time.
    offload_s: float
    fetch_s: float
    #: Number of the storage.
    serial: int = 1

    @property
    def is_free(self) -> bool:
        """Whether it can be evicted without a copy, once nobody is expected to read it."""
        return self.offload_s == 0.0 or not math.isinf(self.recompute_s)


@dataclass(frozen=True, slots=True)
class Suggestion:
    """A technique and what it is expected to cost."""

    technique: Technique
    cost_s: float


class Policy(Protocol):
    """Decides what to evict, and how."""

    @property
    def name(self) -> str:
        """What users call it."""
        ...

    @property
    def keeps_rebuilt_sources(self) -> bool:
        """Whether sources that were rebuilt for a recompute stay (speed-centric)."""
        ...

    @property
    def is_eager(self) -> bool:
        """Whether all that can be is evicted after every function."""
        ...

    @property
    def can_sleep(self) -> bool:
        """Whether it has a way to evict what can only be copied, as what nobody looked at can."""
        ...

    @property
    def follows_plans(self) -> bool:
        """Whether iterations that come again are planned as a whole."""
        ...

    @property
    def avoids_chains(self) -> bool:
        """Whether what a rebuild reads is copied out rather than dropped, where both can be."""
        ...

    @property
    def frees_expired(self) -> bool:
        """Whether what no backward will read again goes at once, where memory is short."""
        ...

    def suggest(self, candidate: Candidate) -> Suggestion | None:
        """Return how to evict the candidate and at what cost, or None to leave it."""
        ...


#: Seconds that stand for none: what nobody will miss, or what a plan has given up, costs less.
NEGLIGIBLE_S = 1e-12
#: Seconds a byte of what nobody will miss; not nothing, so that among equals the run of the fewest
#: bytes is taken.
_NEXT_TO_NOTHING = 1e-21


def _expired(candidate: Candidate) -> Suggestion | None:
    """Evict what is probably never read again: by the way that costs least now."""
    if candidate.offload_s == 0.0:
        return Suggestion(Technique.OFFLOAD, _NEXT_TO_NOTHING * candidate.nbytes)
    if not math.isinf(candidate.recompute_s):
        return Suggestion(Technique.RECOMPUTE, _NEXT_TO_NOTHING * candidate.nbytes)
    if not math.isinf(candidate.offload_s):
        return Suggestion(Technique.OFFLOAD, candidate.offload_s)
    return None


def _cheaper(candidate: Candidate) -> Suggestion | None:
    offload_s = candidate.offload_s + candidate.fetch_s
    if candidate.recompute_s <= offload_s:
        technique, cost_s = Technique.RECOMPUTE, candidate.recompute_s
    else:
        technique, cost_s = Technique.OFFLOAD, offload_s
    return None if math.isinf(cost_s) else Suggestion(technique, cost_s / candidate.distance)


@dataclass(frozen=True, slots=True)
class NoEviction:
    """Account only: what does not fit is an error."""

    name: str = "none"
    keeps_rebuilt_sources: bool = True
    is_eager: bool = False
    can_sleep: bool = True
    follows_plans: bool = False
    avoids_chains: bool = False
    frees_expired: bool = True

    def suggest(self, candidate: Candidate) -> Suggestion | None:
        """Refuse."""
        return None


@dataclass(frozen=True, slots=True)
class Liveness:
    """Evict only what has had its last predicted use, and recoverably."""

    name: str = "liveness"
    keeps_rebuilt_sources: bool = True
    is_eager: bool = False
    can_sleep: bool = True
    follows_plans: bool = False
    avoids_chains: bool = False
    frees_expired: bool = True

    def suggest(self, candidate: Candidate) -> Suggestion | None:
        """Evict expired storages."""
        return _expired(candidate) if candidate.is_expired else None


@dataclass(frozen=True, slots=True)
class LeastRecentlyUsed:
    """The seed's tensor cache: copy out whatever was not used for longest."""

    name: str = "lru"
    keeps_rebuilt_sources: bool = True
    is_eager: bool = False
    can_sleep: bool = True
    follows_plans: bool = False
    avoids_chains: bool = False
    frees_expired: bool = True

    def suggest(self, candidate: Candidate) -> Suggestion | None:
        """Offer a copy, the cheaper the longer ago the last use."""
        if math.isinf(candidate.offload_s):
            return None
        return Suggestion(Technique.OFFLOAD, 1.0 / (1 + candidate.staleness))


@dataclass(frozen=True, slots=True)
class Centric:
    """The seed's recompute strategies: drop what is no checkpoint, copy checkpoints out."""

    name: str
    keeps_rebuilt_sources: bool
    is_eager: bool = False
    can_sleep: bool = True
    follows_plans: bool = False
    avoids_chains: bool = False
    frees_expired: bool = True

    def suggest(self, candidate: Candidate) -> Suggestion | None:
        """Choose by the kind of function that made it."""
        if candidate.is_expired:
            return _expired(candidate)
        if not candidate.is_checkpoint and not math.isinf(candidate.recompute_s):
            return Suggestion(Technique.RECOMPUTE, 1e-9 * candidate.nbytes / candidate.distance)
        if math.isinf(candidate.offload_s):
            return None
        return Suggestion(Technique.OFFLOAD, 1e-6 * candidate.nbytes / candidate.distance)


@dataclass(frozen=True, slots=True)
class OneTechnique:
    """One technique alone, for measuring it."""

    name: str
    technique: Technique
    keeps_rebuilt_sources: bool = True
    is_eager: bool = False
    can_sleep: bool = True
    follows_plans: bool = False
    avoids_chains: bool = False
    frees_expired: bool = True

    def suggest(self, candidate: Candidate) -> Suggestion | None:
        """Offer the technique where it can be used; what is expired goes by any."""
        if candidate.is_expired:
            return _expired(candidate)
        if self.technique is Technique.RECOMPUTE:
            cost_s = candidate.recompute_s
        else:
            cost_s = candidate.offload_s + candidate.fetch_s
        return (
            None if math.isinf(cost_s) else Suggestion(self.technique, cost_s / candidate.distance)
        )


@dataclass(frozen=True, slots=True)
class CostAware:
    """The cheaper of recompute and copy by measured seconds, the furthest next use first."""

    name: str = "cost-aware"
    keeps_rebuilt_sources: bool = True
    is_eager: bool = False
    can_sleep: bool = True
    follows_plans: bool = True
    avoids_chains: bool = True
    frees_expired: bool = True

    def suggest(self, candidate: Candidate) -> Suggestion | None:
        """Offer the cheaper technique."""
        return _expired(candidate) if candidate.is_expired else _cheaper(candidate)


@dataclass(frozen=True, slots=True)
class Torture:
    """Evict everything after every function, alternating the techniques. For tests."""

    name: str = "torture"
    keeps_rebuilt_sources: bool = True
    is_eager: bool = True
    can_sleep: bool = False
    follows_plans: bool = False
    avoids_chains: bool = False
    frees_expired: bool = True

    def suggest(self, candidate: Candidate) -> Suggestion | None:
        """Recompute two of three that can be; copy the others."""
        can_copy = not math.isinf(candidate.offload_s)
        if not math.isinf(candidate.recompute_s) and (candidate.serial % 3 or not can_copy):
            return Suggestion(Technique.RECOMPUTE, 0.0)
        return Suggestion(Technique.OFFLOAD, 0.0) if can_copy else None


POLICIES: dict[str, Policy] = {
    policy.name: policy
    for policy in (
        NoEviction(),
        Liveness(),
        LeastRecentlyUsed(),
        Centric("speed-centric", keeps_rebuilt_sources=True),
        Centric("memory-centric", keeps_rebuilt_sources=False),
        OneTechnique("recompute", Technique.RECOMPUTE, can_sleep=False),
        OneTechnique("offload", Technique.OFFLOAD),
        CostAware(),
        Torture(),
    )
}


def policy_named(name: str) -> Policy:
    """Return the policy of that name.

    Raises
    ------
    ValueError
        For another name; the message lists the names there are.
    """
    policy = POLICIES.get(name)
    if policy is None:
        raise ValueError(f"unknown policy {name!r}: choose one of {', '.join(POLICIES)}")
    return policy
