"""Define what a tier is: a place outside the arena that keeps values.

Covers the contract, tickets and accounting that all tiers share. Does not decide what is kept
where.

Copies run beside the device's work: `Tier.store` and `Tier.load` begin them and return, and a
`Mark` tells when they have ended.

1. `Tier.store` either takes all of a value or leaves the tier as it was.
2. A stored value reads back equal, any number of times, until its ticket is discarded.
3. `Tier.used_bytes` never exceeds `Tier.limit_bytes`.
4. A place is given to another value only when the last copy that touches it has ended.
"""

from __future__ import annotations

import contextlib
import threading
from abc import ABC, abstractmethod
from collections import deque
from dataclasses import dataclass

from dynamemo.allocator.copier import CopyTime, Mark
from dynamemo.allocator.errors import InternalError, SpillError

__all__ = ["Ticket", "Tier", "TierStatistics"]


class Ticket:
    """Claim on a value that a tier keeps."""

    __slots__ = ("last", "nbytes", "place", "tier", "written")

    def __init__(self, tier: Tier, nbytes: int, place: object, written: Mark) -> None:
        #: The tier that keeps the value; None once discarded.
        self.tier: Tier | None = tier
        #: Length of the value.
        self.nbytes = nbytes
        #: The tier's own note of where it is.
        self.place = place
        #: The end of the copy out.
        self.written = written
        #: The end of the newest copy that touches the place.
        self.last = written

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
        #: How often a store had to wait until the machine gave memory.
        self.waits = 0
        self._lock = threading.RLock()
        self._tickets = self._stored_bytes = self._loaded_bytes = 0
        #: Places given up while a copy still touches them.
        self._leaving: deque[tuple[Mark, object]] = deque()

    def store(self, device_address: int, nbytes: int) -> Ticket | None:
        """Begin to copy a value out.

        Parameters
        ----------
        device_address : int
            Where the value lies. It may be overwritten when `Ticket.written` is done, or by work
            that is held behind it.
        nbytes : int
            Its length, at least 0.

        Returns
        -------
        Ticket or None
            The claim; None where the tier is full. The value stays in the tier until `discard`.

        Raises
        ------
        SpillError
            If the medium fails at once; the tier is unchanged then. Where it fails later,
            `Ticket.written` raises it, and the ticket is good for nothing but `discard`.
        """
        with self._lock:
            self._reap()
            begun = self._put(device_address, nbytes)
            if begun is None and self._leaving:
                self._reap(wait=True)
                begun = self._put(device_address, nbytes)
            if begun is None:
                return None
            place, written = begun
            self._tickets += 1
            self._stored_bytes += nbytes
            self.peak_bytes = max(self.peak_bytes, self.used_bytes)
            return Ticket(self, nbytes, place, written)

    def load(self, ticket: Ticket, device_address: int) -> Mark:
        """Begin to copy a value back to the device, behind its copy out; the ticket stays valid.

        Returns
        -------
        Mark
            The end of the copy: the bytes at the address are undefined before. It raises
            `SpillError` where the medium fails.

        Raises
        ------
        InternalError
            If the ticket is not this tier's or is discarded.
        """
        with self._lock:
            self._check(ticket)
            ticket.last = self._get(ticket.place, device_address, ticket.nbytes, after=ticket.last)
            self._loaded_bytes += ticket.nbytes
            return ticket.last

    def discard(self, ticket: Ticket) -> None:
        """Forget a value; `InternalError` if the ticket is not this tier's or is discarded.

        Copies under way end by themselves; the place is free when they have.
        """
        with self._lock:
            self._check(ticket)
            ticket.tier = None
            self._tickets -= 1
            if ticket.last.is_done:
                self._drop(ticket.place)
            else:
                self._leaving.append((ticket.last, ticket.place))

    def finish(self) -> None:
        """Let the host wait until no copy touches a place that was given up."""
        with self._lock:
            self._reap(wait=True)

    def times(self) -> list[CopyTime]:
        """Return what copies took that ended since the last call, as far as known. Never waits."""
        return []

    def _reap(self, *, wait: bool = False) -> None:
        """Free the places given up whose copies have ended."""
        leaving = self._leaving
        while leaving and (wait or leaving[0][0].is_done):
            mark, place = leaving[0]
            with contextlib.suppress(SpillError):  # nobody wants the value any more
                mark.wait()
            leaving.popleft()
            self._drop(place)

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
    def _put(self, device_address: int, nbytes: int) -> tuple[object, Mark] | None:
        """Begin to keep a value; return its place and the end of the copy, None where full."""

    @abstractmethod
    def _get(self, place: object, device_address: int, nbytes: int, *, after: Mark) -> Mark:
        """Begin to copy the value at a place back, behind the mark; return the end."""

    @abstractmethod
    def _drop(self, place: object) -> None:
        """Free a place."""

    def _check(self, ticket: Ticket) -> None:
        if ticket.tier is not self:
            raise InternalError(f"{ticket!r} is not a claim on this {type(self).__name__}")
