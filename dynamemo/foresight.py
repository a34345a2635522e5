"""Foresee from earlier iterations what will be evicted, and from the graph what will be read next.

Covers: which storages are worth copying out as soon as forward has used them for the last time,
and in which order, and how soon, values that are away will be read in backward. Moves nothing.

A place in a program is named by the *path* that led there: a running hash over the signatures of
the functions applied since the iteration began. So nothing is assumed of a graph that takes another
way, and two graphs that alternate are remembered beside each other.

Invariants kept here (numbers of the design's list):
  5. What was foreseen wrongly costs a copy, never a value.
  6. What is remembered is bounded: paths of one iteration, and storages evicted in the last
     `MEMORY` iterations. No storage is kept alive from here.

Source: the replay of the previous iteration's liveness stands for the seed's static order of layers
(Wang et al., PPoPP 2018, section 3.3); the reading order in backward needs no earlier iteration.
"""

from __future__ import annotations

import heapq
import weakref
from collections import ChainMap
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from dynamemo.graph import CostModel, Recorder
from dynamemo.policies import Technique
from dynamemo.storage import Storage

#: Iterations after which a storage that was not evicted again is forgotten.
MEMORY = 6

#: Functions of one iteration whose paths are kept; a longer one (inference in a loop) starts anew.
_MOST_OPERATIONS = 100_000

#: Backward of a function that was not measured takes so many times its forward.
_BACKWARD_RATIO = 2.0

#: What a storage is called from one iteration to the next: the path at which it was made, and as
#: what: an attribute or the number of an output.
Key = tuple[int, int | str | None]
#: The path that led to a function, itself included, and its signature.
Ran = tuple[int, Any]

_NOTHING: Mapping[Key, Technique | None] = {}
_NO_LENGTHS: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True)
class Plan:
    """What becomes of the storages of one program."""

    #: Path -> key -> what becomes of that storage there, where forward uses it last; None: it
    #: stays.
    due: dict[int, dict[Key, Technique | None]]
    #: Path -> bytes of each storage that the function behind it makes, and that stays.
    kept_behind: dict[int, frozenset[int]]


class Foresight:
    """What is likely to happen next.

    Parameters
    ----------
    recorder : Recorder
        Knows the uses of storages.
    costs : CostModel
        Knows the seconds of functions: forward under their signature, backward under
        `backward_of(signature)`.
    """

    def __init__(self, recorder: Recorder, costs: CostModel) -> None:
        self._recorder = recorder
        self._costs = costs
        self._iteration = 0
        self._path = 0
        #: Path and signature of each function of this iteration, by op id.
        self._ran: dict[int, Ran] = {}
        #: The keys of the storages that it made, by their ids.
        self._keys: dict[int, Key] = {}
        #: Told of these two when the iteration has ended, before they are forgotten.
        self.end_iteration: Callable[[dict[int, Ran], dict[int, Key]], None] = _tell_nobody
        #: Storages evicted lately: key -> the path after their last use, the iteration.
        self._watched: dict[Key, tuple[int, int]] = {}
        #: Path -> keys of storages that are worth copying out there.
        self._due: dict[int, dict[Key, None]] = {}
        #: Plans by the path at which their iteration ended.
        self._plans: dict[int, Plan] = {}
        #: The same of all plans, the newest first; and all keys that they speak of.
        self._due_planned: ChainMap[int, dict[Key, Technique | None]] = ChainMap()
        self._kept_behind: ChainMap[int, frozenset[int]] = ChainMap()
        self._planned_keys: set[Key] = set()
        self._live: weakref.WeakValueDictionary[Key, Storage] = weakref.WeakValueDictionary()
        #: What is away, by the tick of its next use, the greatest first: (-tick, storage id).
        self._away: list[tuple[int, int]] = []
        #: Seconds of backward up to each op id, and the number of functions they were made for.
        self._backward_s: dict[int, float] = {}

    # -- forward -----------------------------------------------------------------------------

    def ran(
        self, op_id: int, signature: Any, made: list[Storage]
    ) -> list[tuple[Storage, Technique | None]]:
        """Note that a function ran; return what should become of which storages from here on.

        Parameters
        ----------
        op_id : int
            The recorder's number of it.
        signature : hashable
            What it was and on what shapes.
        made : list of Storage
            The storages that it made.

        Returns
        -------
        list of (Storage, Technique or None)
            Forward has used these for the last time. None: they should be copied out, since they
            were evicted so before; where no plan speaks of them.
        """
        iteration = self._recorder.iterations
        if iteration != self._iteration or len(self._ran) >= _MOST_OPERATIONS:
            self._begin(iteration)
        path = self._path = hash((self._path, signature))
        self._ran[op_id] = (path, signature)
        for storage in made:
            key = self._key(storage)
            if key is not None:
                self._keys[storage.storage_id] = key
                if key in self._watched or key in self._planned_keys:
                    self._live[key] = storage
        due: list[tuple[Storage, Technique | None]] = []
        for key, technique in self._due_planned.get(path, _NOTHING).items():
            planned = self._live.get(key)
            if technique is not None and planned is not None:
                due.append((planned, technique))
        for key in self._due.get(path, ()):
            evicted = None if key in self._planned_keys else self._live.get(key)
            if evicted is not None:
                due.append((evicted, None))
        return due

    def follow(self, end: int, plan: Plan, *, most: int) -> None:
        """File a plan for iterations that end at a path, in place of an older one.

        Parameters
        ----------
        end : int
            The path.
        plan : Plan
            What becomes of which storage where.
        most : int
            Plans that are kept; the oldest goes first.
        """
        self._plans.pop(end, None)
        self._plans[end] = plan
        while len(self._plans) > most:
            del self._plans[next(iter(self._plans))]
        newest_first = list(reversed(self._plans.values()))
        self._due_planned = ChainMap(*[each.due for each in newest_first])
        self._kept_behind = ChainMap(*[each.kept_behind for each in newest_first])
        due = [keys for each in newest_first for keys in each.due.values()]
        self._planned_keys = {key for keys in due for key in keys}

    @property
    def has_plans(self) -> bool:
        """Whether there is a plan of any program."""
        return bool(self._plans)

    def kept_next(self) -> frozenset[int]:
        """Return the bytes of what the next function makes and a plan keeps until backward."""
        return self._kept_behind.get(self._path, _NO_LENGTHS)

    def _begin(self, iteration: int) -> None:
        if iteration == self._iteration + 1:
            self.end_iteration(self._ran, self._keys)
        self._iteration = iteration
        self._path = 0
        self._ran.clear()
        self._keys.clear()
        self._live.clear()
        self._backward_s.clear()
        for key, (path, last) in list(self._watched.items()):
            if iteration - last > MEMORY:
                self._forget(key, path)

    def _forget(self, key: Key, path: int) -> None:
        del self._watched[key]
        keys = self._due[path]
        del keys[key]
        if not keys:
            del self._due[path]

    def _key(self, storage: Storage) -> Key | None:
        producer = storage.producer
        ran = None if producer is None else self._ran.get(producer.op_id)
        if producer is None or ran is None:
            return None
        return ran[0], producer.attribute if producer.attribute else producer.output_index

    def note_offloaded(self, storage: Storage) -> None:
        """Remember a storage that gave up its block to a copy in a tier."""
        key = self._key(storage)
        ran = self._ran.get(self._recorder.last_use(storage.storage_id))
        if key is None or ran is None:
            return
        known = self._watched.get(key)
        if known is not None and known[0] != ran[0]:
            self._forget(key, known[0])
        self._watched[key] = (ran[0], self._iteration)
        self._due.setdefault(ran[0], {})[key] = None

    @property
    def expects_reads(self) -> bool:
        """Whether something is known to be away that backward will read."""
        return bool(self._away)

    # -- backward ----------------------------------------------------------------------------

    def note_away(self, storage: Storage) -> None:
        """Expect a storage that is away to be read again, itself or by a recipe."""
        tick = self._next_use(storage)
        if tick:
            heapq.heappush(self._away, (-tick, storage.storage_id))

    def _next_use(self, storage: Storage) -> int:
        """Return the tick of the next backward that needs it; 0 where none is known."""
        recorder = self._recorder
        ticks = [recorder.next_use(storage.storage_id)]
        for dependent in storage.dependents or ():
            if dependent.is_away:
                ticks.append(recorder.next_use(dependent.storage_id))
        return max(ticks)

    def upcoming(
        self, position: int, storages: weakref.WeakValueDictionary[int, Storage]
    ) -> Iterator[tuple[Storage, float]]:
        """Give what is away and held by a tier, in the order of its next use.

        Parameters
        ----------
        position : int
            Op id of the function whose backward begins now.
        storages : mapping of int to Storage
            The storages that are alive, by id.

        Yields
        ------
        storage, seconds
            The storage, and the estimated seconds until it is read.
        """
        away = self._away
        while away and -away[0][0] > position:
            storage = storages.get(heapq.heappop(away)[1])
            if storage is not None and storage.is_away:
                self.note_away(storage)
        if away:
            self._sum_backward()
        now_s = self._seconds_to(position)
        seen: set[int] = set()
        for tick, storage_id in sorted(away):
            storage = storages.get(storage_id)
            if storage is None or not storage.is_away or storage_id in seen:
                continue
            seen.add(storage_id)
            if storage.recipe is None and storage.arrival is None:
                yield storage, max(0.0, now_s - self._seconds_to(-tick))

    def signature_of(self, op_id: int) -> Any:
        """Return the signature of a function that ran in this iteration; None for another one."""
        ran = self._ran.get(op_id)
        return None if ran is None else ran[1]

    def backward_s(self, op_id: int) -> float:
        """Estimate the seconds of a function's backward."""
        ran = self._ran.get(op_id)
        return 0.0 if ran is None else self.backward_s_of(ran[1])

    def backward_s_of(self, signature: Any) -> float:
        """Estimate the seconds of the backward of functions with a signature."""
        filed_under = backward_of(signature)
        if self._costs.is_measured(filed_under):
            return self._costs.estimate(filed_under, nbytes=0)
        return _BACKWARD_RATIO * self._costs.estimate(signature, nbytes=0)

    def _sum_backward(self) -> None:
        """Add up the backwards of the functions that ran in this iteration."""
        if len(self._backward_s) == len(self._ran):
            return
        self._backward_s.clear()
        total_s = 0.0
        for op_id in self._ran:
            total_s += self.backward_s(op_id)
            self._backward_s[op_id] = total_s

    def _seconds_to(self, op_id: int) -> float:
        return self._backward_s.get(op_id, 0.0)


def backward_of(signature: Any) -> tuple[str, Any]:
    """Return what the seconds of a function's backward are filed under."""
    return "backward", signature


def _tell_nobody(ran: dict[int, Ran], keys: dict[int, Key]) -> None:
    """Do nothing."""
