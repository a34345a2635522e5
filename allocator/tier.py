"""Define what a tier is: a place outside the arena that keeps values.

Covers the contract, tickets and accounting that all tiers share. Does not decide what is kept
where.

1. `Tier.store` either keeps all of a value or leaves the tier as it was.
2. A stored value reads back equal, any number of times, until its ticket is discarded.
3. `Tier.used_bytes` never exceeds `Tier.limit_bytes`.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from dataclasses import dataclass

from dynamemo.allocator.errors import InternalError

__all__ = ["Ticket", "Tier", "TierStatistics"]


class Ticket:
    """Claim on a value that a tier keeps."""

    __slots__ = ("nbytes", "place", "tier")

    def __init__(self, tier: Tier, nbytes: int, place: object) -> None:
        #: The tier that keeps the value; None once discarded.
        self.tier: Tier | None = tier
        #: Length of the value.
        self.nbytes = nbytes
        #: The tier's own note of where it is.
        self.place = place

    def __repr__(self) -> str:
        return f"<Ticket for {self.nbytes:,} bytes in {type(self.tier).__name__}>"


@dataclass(frozen=True, slots=True)
class TierStatistics:
    """What a tier holds at one moment. All sizes in bytes."""

    #: Name of the tier's class.
    name: str
    #: Most that it may hold; None: no limit but the machine's.
    limit_bytes: int | None
    #: Taken by the values kept now, rounding included.
    used_bytes: int
    #: Highest `used_bytes` so far.
    peak_bytes: int
    #: Taken from the machine now.
    held_bytes: int
    #: Values kept now.
    tickets: int
    #: Bytes of all values ever stored.
    stored_bytes: int
    #: Bytes of all values ever loaded.
    loaded_bytes: int


class Tier(ABC):
    """A place that keeps values; safe to use from several threads.

    Parameters
    ----------
    limit_bytes : int or None
        Most that it may hold; None: no limit but the machine's.
    """

    def __init__(self, limit_bytes: int | None) -> None:
        #: Most that the tier may hold, in bytes; None: no limit but the machine's.
        self.limit_bytes = limit_bytes
        #: Highest `used_bytes` so far.
        self.peak_bytes = 0
        self._lock = threading.RLock()
        self._tickets = self._stored_bytes = self._loaded_bytes = 0

    def store(self, device_address: int, nbytes: int) -> Ticket | None:
        """Keep a copy of a value.

        Parameters
        ----------
        device_address : int
            Where the value lies; it may be overwritten as soon as the call returns.
        nbytes : int
            Its length, at least 0.

        Returns
        -------
        Ticket or None
            The claim; None where the tier is full. The value stays in the tier until `discard`.

        Raises
        ------
        SpillError
            If the medium fails; the tier is unchanged then.
        """
        with self._lock:
            place = self._put(device_address, nbytes)
            if place is None:
                return None
            self._tickets += 1
            self._stored_bytes += nbytes
            self.peak_bytes = max(self.peak_bytes, self.used_bytes)
            return Ticket(self, nbytes, place)

    def load(self, ticket: Ticket, device_address: int) -> None:
        """Copy a value back to the device; the ticket stays valid.

        Raises
        ------
        InternalError
            If the ticket is not this tier's or is discarded.
        SpillError
            If the medium fails; the bytes at the address are undefined then.
        """
        with self._lock:
            self._check(ticket)
            self._get(ticket.place, device_address, ticket.nbytes)
            self._loaded_bytes += ticket.nbytes

    def discard(self, ticket: Ticket) -> None:
        """Forget a value; `InternalError` if the ticket is not this tier's or is discarded."""
        with self._lock:
            self._check(ticket)
            ticket.tier = None
            self._drop(ticket.place)
            self._tickets -= 1

    def statistics(self) -> TierStatistics:
        """Return what the tier holds now."""
        with self._lock:
            return TierStatistics(
                name=type(self).__name__,
                limit_bytes=self.limit_bytes,
                used_bytes=self.used_bytes,
                peak_bytes=self.peak_bytes,
                held_bytes=self.held_bytes,
                tickets=self._tickets,
                stored_bytes=self._stored_bytes,
                loaded_bytes=self._loaded_bytes,
            )

    @property
    @abstractmethod
    def used_bytes(self) -> int:
        """Bytes taken by the values kept now, rounding included."""

    @property
    @abstractmethod
    def held_bytes(self) -> int:
        """Bytes taken from the machine now."""

    @abstractmethod
    def trim(self) -> None:
        """Return to the machine what no value needs."""

    @abstractmethod
    def close(self) -> None:
        """Return everything to the machine; the values are lost. May be called twice."""

    @abstractmethod
    def _put(self, device_address: int, nbytes: int) -> object | None:
        """Keep a value; return its place, or None where the tier is full."""

    @abstractmethod
    def _get(self, place: object, device_address: int, nbytes: int) -> None:
        """Copy the value at a place back."""

    @abstractmethod
    def _drop(self, place: object) -> None:
        """Free a place."""

    def _check(self, ticket: Ticket) -> None:
        if ticket.tier is not self:
            raise InternalError(f"{ticket!r} is not a claim on this {type(self).__name__}")
