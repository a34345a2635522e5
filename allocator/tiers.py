"""Try several tiers in turn.

Covers the order only: each tier keeps its own values and tickets.
"""

from __future__ import annotations

from collections.abc import Iterable

from dynamemo.allocator.copier import CopyTime, Mark
from dynamemo.allocator.errors import InternalError
from dynamemo.allocator.tier import Ticket, Tier, TierStatistics

__all__ = ["TierStack"]


class TierStack:
    """Tiers from the fastest to the slowest; closed together.

    Parameters
    ----------
    tiers : iterable of Tier
        In the order in which they are tried; may be empty.
    """

    def __init__(self, tiers: Iterable[Tier]) -> None:
        #: The tiers, in the order in which they are tried.
        self.tiers = tuple(tiers)

    def store(self, device_address: int, nbytes: int) -> Ticket | None:
        """Begin to copy a value into the first tier that takes it; None where all are full.

        Raises
        ------
        SpillError
            If the last tier that could have taken it fails; nothing is stored then.
        """
        for tier in self.tiers:
            ticket = tier.store(device_address, nbytes)
            if ticket is not None:
                return ticket
        return None

    def load(self, ticket: Ticket, device_address: int) -> Mark:
        """Begin to copy a value back to the device; the ticket stays valid. As `Tier.load`."""
        return _tier_of(ticket).load(ticket, device_address)

    def discard(self, ticket: Ticket) -> None:
        """Forget a value. Errors as `Tier.discard`."""
        _tier_of(ticket).discard(ticket)

    @property
    def used_bytes(self) -> int:
        """Bytes taken by the values kept now, in all tiers."""
        return sum(tier.used_bytes for tier in self.tiers)

    def statistics(self) -> tuple[TierStatistics, ...]:
        """Return what each tier holds now."""
        return tuple(tier.statistics() for tier in self.tiers)

    def times(self) -> list[CopyTime]:
        """Return what copies to and from the first tier took. Never waits."""
        return self.tiers[0].times() if self.tiers else []

    def finish(self) -> None:
        """Let the host wait until no copy touches a place that was given up."""
        for tier in self.tiers:
            tier.finish()

    def trim(self) -> None:
        """Return to the machine what no value needs."""
        for tier in self.tiers:
            tier.trim()

    def close(self) -> None:
        """Return everything to the machine; the values are lost."""
        for tier in self.tiers:
            tier.close()


def _tier_of(ticket: Ticket) -> Tier:
    if ticket.tier is None:
        raise InternalError(f"{ticket!r} is discarded")
    return ticket.tier
