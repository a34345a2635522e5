"""Describe what a pool holds."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["PoolStatistics"]


@dataclass(frozen=True, slots=True)
class PoolStatistics:
    """What a pool holds at one moment. All sizes in bytes."""

    #: The limit.
    budget_bytes: int
    #: Length of the arena.
    capacity_bytes: int
    #: Block bytes in use in the arena.
    current_bytes: int
    #: Highest `current_bytes` since the last `Pool.reset_peak`.
    peak_bytes: int
    #: Block bytes ever given out.
    total_bytes: int
    #: Bytes asked for by the live blocks.
    requested_bytes: int
    #: Blocks ever given out.
    allocations: int
    #: Blocks ever given back.
    frees: int
    #: Blocks in use.
    live_blocks: int
    #: Longest contiguous free run of the arena.
    largest_free_bytes: int
    #: 1 - largest free run / free bytes; 0 where nothing is free.
    fragmentation: float
    #: Times the reclaimer made room.
    reclaims: int
    #: Bytes set aside by `Pool.reserve`.
    reserved_bytes: int
    #: Small blocks that live outside the arena.
    outside_bytes: int
