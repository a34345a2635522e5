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
    #: Of these: ahead of need, because the iteration before was short there.
    early_bytes: int
    #: Wanted by somebody else before their copy out had ended: the device waited.
    stalled_bytes: int
    #: Copied back.
    fetched_bytes: int
    #: Of these: begun before they were read; what was not there in time; what was given up again.
    prefetched_bytes: int
    awaited_bytes: int
    cancelled_bytes: int
    #: Copied back only when they were read.
    late_bytes: int
    #: Parameters copied because they changed while a dropped tensor needed their old value.
    preserved_bytes: int
    #: Parameters, gradients and optimizer state moved together, to close the holes between them.
    moved_bytes: int
    #: Applications of functions that rebuilt something.
    recomputed_functions: int
    #: Forward-and-backward rounds completed; while everything fits, those that ended in an update.
    iterations: int
    #: How often the host waited for the device to end a copy.
    host_waits: int
    #: How often an eviction waited for host memory to be taken (pinned).
    slab_waits: int
    #: Bytes per second of copies out and in, as measured lately.
    out_bytes_per_s: float
    in_bytes_per_s: float
    #: The allocator's own figures.
    pool: PoolStatistics
    #: Bytes that the tiers hold now, by name.
    tier_bytes: dict[str, int]

    def as_dict(self) -> dict[str, Any]:
        """Return the figures as plain dictionaries, for JSON."""
        return dataclasses.asdict(self)
