"""Find what to free so that a request fits: a run of neighbouring blocks, at least cost.

Covers the search. Does not free anything, nor know what a cost means.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from math import inf
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from dynamemo.allocator.block import Block

__all__ = ["HeapBlock", "cheapest_window", "extend_window"]


class HeapBlock(NamedTuple):
    """One block as `BlockHeap.blocks` shows it."""

    #: First byte, relative to the start of the space.
    offset: int
    #: Length in bytes.
    block_bytes: int
    #: Whether nobody has it.
    is_free: bool


def cheapest_window(
    blocks: Iterable[HeapBlock], nbytes: int, costs: Mapping[int, float]
) -> tuple[int, ...] | None:
    """Return the offsets to free for a run of `nbytes`; see `BlockHeap.cheapest_window`.

    A window slides once over the blocks, in address order: linear in their number. Blocks that
    must stay may be left out.
    """
    run: list[tuple[HeapBlock, float]] = []
    start = run_bytes = freed_bytes = end = 0
    run_cost = 0.0
    best: tuple[float, int] | None = None
    chosen, chosen_from, chosen_to = run, 0, 0
    for block in blocks:
        cost = 0.0 if block.is_free else costs.get(block.offset, inf)
        if cost == inf or block.offset != end:
            run, start, run_bytes, freed_bytes, run_cost = [], 0, 0, 0, 0.0
        end = block.offset + block.block_bytes
        if cost == inf:
            continue
        run.append((block, cost))
        run_bytes += block.block_bytes
        run_cost += cost
        freed_bytes += 0 if block.is_free else block.block_bytes
        while run_bytes - run[start][0].block_bytes >= nbytes:
            first, first_cost = run[start]
            run_bytes -= first.block_bytes
            run_cost -= first_cost
            freed_bytes -= 0 if first.is_free else first.block_bytes
            start += 1
        if run_bytes >= nbytes and (best is None or (run_cost, freed_bytes) < best):
            best = (run_cost, freed_bytes)
            chosen, chosen_from, chosen_to = run, start, len(run)
    if best is None:
        return None
    return tuple(block.offset for block, _ in chosen[chosen_from:chosen_to] if not block.is_free)


def extend_window(
    window: list[Block],
    blocks: Iterable[Block],
    missing_bytes: int,
    costs: Mapping[int, float],
) -> bool:
    """Add blocks to a window, cheapest per byte first, until `missing_bytes` more are freed.

    Returns
    -------
    bool
        Whether there were enough.
    """
    if missing_bytes <= 0:
        return True
    taken = {block.offset for block in window}
    others = [b for b in blocks if costs.get(b.offset, inf) < inf and b.offset not in taken]
    others.sort(key=lambda block: costs[block.offset] / block.block_bytes)
    for block in others:
        window.append(block)
        missing_bytes -= block.block_bytes
        if missing_bytes <= 0:
            return True
    return False
