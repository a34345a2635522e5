"""What a runtime did, as a frozen value."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from dynamemo.allocator import PoolStatistics


@dataclass(frozen=True, slots=True)
class Statistics:
    """Totals of one runtime since it was entered; bytes unless the name says otherwise."""

    #: "cpu" or "cuda:0".
    device: str
    #: Name of the policy.
    policy: str
    #: What may be taken from the device.
    budget_bytes: int
    #: What is taken from the budget now.
    current_bytes: int
    #: The most that was taken from the budget at any moment.
    peak_bytes: int
    #: Dropped to be recomputed, totalled over all evictions.
    dropped_bytes: int
    #: Rebuilt by applying functions again.
    recomputed_bytes: int
    #: Copied out to the host or to a file.
    offloaded_bytes: int
    #: Copied back.
    fetched_bytes: int
    #: Parameters copied because they changed while a dropped tensor needed their old value.
    preserved_bytes: int
    #: Applications of functions that rebuilt something.
    recomputed_functions: int
    #: Forward-and-backward rounds completed.
    iterations: int
    #: The allocator's own figures.
    pool: PoolStatistics
    #: Bytes that the tiers hold now, by name.
    tier_bytes: dict[str, int]

    def as_dict(self) -> dict[str, Any]:
        """Return the figures as plain dictionaries, for JSON."""
        return dataclasses.asdict(self)
