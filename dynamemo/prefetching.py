"""Begin to bring values back before backward reads them, where the room for it can be spared.

Covers when a copy in begins, and how much memory has to be left for the functions that run
meanwhile. Evicts nothing itself and knows no policy: who makes room is told how much must be left.

Invariants kept here (numbers of the design's list):
  2. A prefetch takes nothing from the function that runs, nor from the next one: what both are
     known to add stays within reach beside it.
  5. What was foreseen wrongly costs a copy, never a value.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from dynamemo.allocator import End, Pool
from dynamemo.foresight import Foresight
from dynamemo.storage import Storage
from dynamemo.transfers import Transfers

#: A prefetch begins so many times earlier than its copy takes, and so many seconds besides.
_LEAD = 3.0
_LEAD_S = 300e-6
#: Values that are looked at before it is decided that none is urgent yet.
_LOOKAHEAD = 64
#: Signatures whose growth is remembered; the oldest is dropped first.
_MOST_SIGNATURES = 65_536


@dataclass(frozen=True, slots=True)
class Need:
    """What functions that run soon will ask for."""

    #: All at once, in bytes.
    nbytes: int
    #: In one piece, in bytes.
    piece_bytes: int


class Room(Protocol):
    """Who knows what holds the memory: the memory manager."""

    def take_free(self, nbytes: int) -> bool:
        """Make room in one piece without taking anything that will be needed."""
        ...

    def could_free(self, need: Need) -> bool:
        """Tell whether there is room, or could be without taking anything that will be needed."""
        ...

    def begin_to_free(self, nbytes: int) -> None:
        """Begin to copy out what is held for nobody, so that it can be had for nothing soon."""
        ...


@dataclass(slots=True)
class Growth:
    """What a backward adds to the memory in use, as if nothing were moved meanwhile."""

    #: At its highest, in bytes.
    most_bytes: int = 0
    #: Until the next one begins; below 0 where it frees more than it takes.
    net_bytes: int = 0
    #: The longest request that was not met from free memory.
    piece_bytes: int = 0
    #: Whether it has run to its end at least once.
    is_known: bool = False

    def follow(self, most_bytes: int, net_bytes: int) -> None:
        """Take in what it added this time."""
        self.most_bytes = most_bytes
        self.net_bytes = net_bytes
        self.piece_bytes = min(self.piece_bytes, most_bytes)
        self.is_known = True


class Appetite:
    """What each backward takes, from the begin of one to the begin of the next.

    Of the last time that its function ran, so that it follows what is needed now.
    """

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self._known: dict[Any, Growth] = {}
        #: Stands for a backward that was not seen yet: the most of any, half as much with each
        #: iteration since.
        self._unknown = Growth()
        #: Of the backward that runs, and the pool's meter.
        self._running: Growth | None = None
        self._meter: tuple[int, int] | None = None

    def begin(self, signature: Any) -> None:
        """Note that the backward of a function with that signature begins."""
        meter, growth = self._meter, self._running
        above_bytes = 0 if meter is None else self._pool.stop_meter(meter)
        self._meter = self._pool.start_meter()
        if meter is not None and growth is not None:
            net_bytes = self._meter[1] - meter[1]
            growth.follow(above_bytes + max(0, net_bytes), net_bytes)
            unknown = self._unknown
            unknown.most_bytes = max(unknown.most_bytes, growth.most_bytes)
            unknown.piece_bytes = max(unknown.piece_bytes, growth.piece_bytes)
        known = None if signature is None else self._known.setdefault(signature, Growth())
        self._running = known
        if len(self._known) > _MOST_SIGNATURES:
            del self._known[next(iter(self._known))]

    def forgo(self) -> None:
        """Give up what is watched: other work than backward has come between."""
        if self._running is not None:
            self._running = None
            self._unknown.most_bytes //= 2
            self._unknown.piece_bytes //= 2

    def note_request(self, requested_bytes: int) -> None:
        """Note a request that free memory did not meet."""
        running = self._running
        if running is not None:
            running.piece_bytes = max(running.piece_bytes, requested_bytes)

    def of_both(self, signature: Any, following: Any) -> Need:
        """Return what a backward and the one behind it add together at most."""
        first = self._of(signature)
        second = self._of(following)
        return Need(
            max(first.most_bytes, first.net_bytes + second.most_bytes),
            max(first.piece_bytes, second.piece_bytes),
        )

    def _of(self, signature: Any) -> Growth:
        growth = self._known.get(signature)
        return growth if growth is not None and growth.is_known else self._unknown


class Prefetcher:
    """Decides when what is away comes back.

    Parameters
    ----------
    pool : Pool
        Where memory comes from.
    foresight : Foresight
        What will be read, and when.
    transfers : Transfers
        Carries the copies out.
    room : Room
        Asked for memory for each prefetch.
    """

    def __init__(self, pool: Pool, foresight: Foresight, transfers: Transfers, room: Room) -> None:
        self._pool = pool
        self._foresight = foresight
        self._transfers = transfers
        self._room = room
        self._appetite = Appetite(pool)
        #: Seconds of the backward that was begun last.
        self._running_s = 0.0
        #: What is left to the functions that run meanwhile.
        self._left = Need(0, 0)

    def leave_backward(self) -> None:
        """Note that what runs now belongs to no backward."""
        self._appetite.forgo()

    def note_request(self, requested_bytes: int) -> None:
        """Note a request that free memory did not meet."""
        self._appetite.note_request(requested_bytes)

    def begin_backward(self, op_id: int) -> None:
        """Note whose backward begins now."""
        foresight, appetite = self._foresight, self._appetite
        self._transfers.timeline.now_s += self._running_s
        signature = foresight.signature_of(op_id)
        appetite.begin(signature)
        self._running_s = foresight.backward_s(op_id)
        self._left = appetite.of_both(signature, foresight.signature_of(op_id - 1))

    def urgent(self, op_id: int, storages: Any) -> list[Storage]:
        """Return what has to be asked for now, in the order of its reading.

        A value is when waiting for one more function would make it late; at the link's measured
        speed, behind what is on its way already.
        """
        transfers = self._transfers
        transfers.observe()
        arrives_s = transfers.backlog_s()
        queue: list[Storage] = []
        urgent = 0
        for storage, needed_s in self._foresight.upcoming(op_id, storages):
            arrives_s += transfers.inward.seconds(storage.nbytes)
            queue.append(storage)
            if needed_s - self._running_s <= _LEAD * arrives_s + _LEAD_S:
                urgent = len(queue)
            elif len(queue) >= _LOOKAHEAD:
                break
        return queue[:urgent]

    def bring(self, storages: list[Storage]) -> None:
        """Begin to bring values back, as far as there is room. With the pool's lock held."""
        room = self._room
        for number, storage in enumerate(storages):
            if not self._begin(storage):
                room.begin_to_free(sum(waiting.nbytes for waiting in storages[number:]))
                return

    def _begin(self, storage: Storage) -> bool:
        pool = self._pool
        usual_end = pool.default_end
        if self._foresight.has_plans:
            pool.default_end = End.HIGH  # beside what is kept: it is waiting too
        try:
            with pool.retrying():
                return self._transfers.prefetch(storage, self._room.take_free, self._leaves_room)
        except MemoryError:
            return False  # there is room, but not where the pool may place it
        finally:
            pool.default_end = usual_end

    def _leaves_room(self) -> bool:
        return self._room.could_free(self._left)
