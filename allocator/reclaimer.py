"""Describe who makes room in a pool: the runtime."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from dynamemo.allocator.pool import Pool

__all__ = ["Reclaimer"]


class Reclaimer(Protocol):
    """Whoever can make room: the runtime."""

    def reclaim(self, pool: Pool, requested_bytes: int) -> bool:
        """Free blocks so that `requested_bytes` fit, contiguously and in the budget.

        Called with the pool locked by this thread and consistent; may free, allocate and run
        anything.

        Returns
        -------
        bool
            Whether something was freed, so that trying again is worth it.
        """
