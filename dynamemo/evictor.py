"""Take storages out of the arena: which can go, what each costs, and how it is done.

Between the records and the memory manager, which says when. A policy suggests; the evictor looks
whether it can be done and does it.

Invariants kept here (numbers of the design's list):
  2. Where a contiguous run is wanted, it evicts the run of adjacent blocks that costs least, and
     nothing that anybody else refers to.
  3. A value leaves its slots only after a tier holds it or a recipe for it is complete.

Source: the eviction by runs of adjacent blocks answers the seed's fault that freed bytes need not
be contiguous (Wang et al., PPoPP 2018, Algorithm 2).
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from typing import Any

from dynamemo.allocator import Block, Pool, TierStack
from dynamemo.device import Device
from dynamemo.errors import InternalError
from dynamemo.foresight import Foresight
from dynamemo.policies import NEGLIGIBLE_S, Candidate, Policy, Suggestion, Technique
from dynamemo.recipe import (
    Application,
    ParameterVersion,
    Recipe,
    Replay,
    arrays_in,
    make_dependent,
    plan,
)
from dynamemo.records import Contents
from dynamemo.restorer import Restorer
from dynamemo.storage import Hole, Storage

#: Storages below this many bytes are left alone: moving them frees nothing worth the time.
MIN_BYTES = 4096

#: A function whose temporaries are more than this part of the arena is not applied again: in the
#: middle of a backward there may be no room for them.
_TRANSIENT_SHARE = 8

#: Rebuilds that need one another may make no more than this part of the arena; more where a plan
#: has looked at the iteration as a whole.
_CHAIN_SHARE, _CHAIN_SHARE_PLANNED = 8, 3

#: A block shorter than this part of the arena is placed at the high end, with what stays long:
#: the temporaries of a convolution are many times its input, and need the space in one piece.
_SMALL_SHARE = 16


class Evictor(Restorer):
    """Evict storages of one device, by what a policy suggests."""

    def __init__(
        self,
        device: Device,
        pool: Pool,
        tiers: TierStack,
        policy: Policy,
        *,
        replay: Replay,
        version_of: Callable[[Any, int], ParameterVersion | None],
        verify: bool = False,
        min_bytes: int = MIN_BYTES,
    ) -> None:
        super().__init__(device, pool, tiers, replay, verify=verify)
        self.policy = policy
        self.foresight = Foresight(self.recorder, self.costs)
        self.small_share = _SMALL_SHARE
        self._version_of = version_of
        #: Storages below this many bytes are left alone.
        self.min_bytes = min_bytes
        #: Storages that had no recipe when they were to be dropped: the clock then, and the id.
        self._to_ask_again: deque[tuple[int, int]] = deque()
        #: Called before anything is taken that will be missed: tells of what stays in its place.
        self.look_for_lasting: Callable[[], None] = look_nowhere
        #: Which search for room this is: what somebody else refers to is looked at once in each.
        self._pass = 0
        #: Bytes of what somebody will miss that were evicted under pressure in this iteration.
        self._unplanned_bytes = 0
        self._is_evicting = False
        self._is_closed = False

    def restore(self, storage: Storage) -> None:
        """Make a storage resident, evicting others where need be."""
        raise NotImplementedError

    @property
    def small_share(self) -> int:
        """A block shorter than this part of the arena is placed with what stays long."""
        return self._small_share

    @small_share.setter
    def small_share(self, share: int) -> None:
        self._small_share = share
        self.pool.small_block_bytes = self.pool.capacity_bytes // share

    def expose(self, storage: Storage) -> None:
        """Note that code outside Chainer may write into the storage from now on.

        What a recipe would rebuild from it is rebuilt first.
        """
        if storage.exposed:
            return
        with self.pool.lock:  # one lock for both: a reclaim comes in with it held
            storage.exposed = True
            if not storage.is_away:
                self.transfers.forsake(storage)
            self._rebuild_dependents(storage)

    def _rebuild_dependents(self, storage: Storage) -> None:
        for dependent in list(storage.dependents or ()):
            if dependent.recipe is not None:
                self.restore(dependent)
            dependent.recompute_s = math.inf
        storage.dependents = None

    def _free_run(self, requested_bytes: int) -> bool:
        """Make a run free: of what nobody will miss, else of what costs least."""
        pool = self.pool
        is_long = requested_bytes >= pool.small_block_bytes
        if is_long:
            self._widen_low_area(requested_bytes)
        floor = 0 if is_long else pool.low_area_bytes
        if self._take_cheapest(requested_bytes, self._offers(is_missed=False), floor):
            return True
        if floor and pool.largest_free_bytes() >= requested_bytes:
            # There is room where long temporaries were: it is taken before anything is missed.
            pool.low_area_bytes = 0
            return True
        self.look_for_lasting()
        if self._take_cheapest(requested_bytes, self._offers(), floor):
            return True
        if not floor:
            return False
        # Better in the way of long blocks than nowhere, until the function is done.
        pool.low_area_bytes = 0
        return self._take_cheapest(requested_bytes, self._offers(), 0)

    def _take_cheapest(
        self, nbytes: int, offers: dict[int, tuple[Storage, Suggestion]], floor: int
    ) -> bool:
        """Make the cheapest run free of those that are offered; False where there is none."""
        while offers:
            window = self.pool.cheapest_window(nbytes, costs_of(offers), floor=floor)
            if window is None:
                return False
            if self._take_all(offers, window):
                return True
        return False

    def _take_all(
        self, offers: dict[int, tuple[Storage, Suggestion]], window: tuple[Block, ...]
    ) -> bool:
        """Evict a window; False where some block of it stayed, after trying them all."""
        taken = [self._take(offers, block.offset) for block in window]
        return all(taken)

    def _widen_low_area(self, requested_bytes: int) -> None:
        """Keep the low end free of what stays, as far as a function's long temporaries reached."""
        running_bytes = sum(
            block.block_bytes
            for block in self.pool.blocks()
            if block.owner is None and block.block_bytes >= self.pool.small_block_bytes
        )
        if self.foresight.has_plans:
            self._low_area_bytes = 0
            return
        most_bytes = self.pool.capacity_bytes * 7 // 8
        wanted_bytes = min(most_bytes, running_bytes + requested_bytes)
        self._low_area_bytes = max(self._low_area_bytes, wanted_bytes)

    def _take(self, offers: dict[int, tuple[Storage, Suggestion]], offset: int) -> bool:
        """Evict the storage at an offset as offered; withdraw or change the offer if that fails."""
        storage, suggestion = offers.pop(offset)
        if self._evict(storage, suggestion.technique):
            if suggestion.cost_s > NEGLIGIBLE_S:
                self._unplanned_bytes += storage.nbytes
            return True
        other = self.policy.suggest(self._candidate(storage))
        if other is not None and storage.refused_in != self._pass:
            offers[offset] = (storage, other)
        return False

    def _offers(self, *, is_missed: bool = True) -> dict[int, tuple[Storage, Suggestion]]:
        """Return what can be evicted, and how, by the offset of its block.

        Parameters
        ----------
        is_missed : bool
            Whether what somebody will miss is offered too. What nobody will: no backward is
            expected to read it, or a plan has given it up.
        """
        self._ask_again()
        offers = {}
        is_expired = self.recorder.is_expired
        for storage in list(self._storages.values()):
            if not (is_missed or storage.is_given_up or is_expired(storage.storage_id)):
                continue
            arrival = storage.arrival
            if arrival is not None:
                if arrival.block is not None and is_missed:
                    offers[arrival.block.offset] = (storage, self._cancellation(storage))
                continue
            block = storage.block
            if block is None or storage.refused_in == self._pass:
                continue
            if storage.nbytes < self.min_bytes or not self._can_copy(storage):
                continue
            candidate = self._candidate(storage)
            suggestion = self.policy.suggest(candidate)
            if storage.is_given_up and candidate.offload_s == 0.0:
                suggestion = Suggestion(Technique.OFFLOAD, NEGLIGIBLE_S)
            if suggestion is None or not (is_missed or suggestion.cost_s <= NEGLIGIBLE_S):
                continue
            offers[block.offset] = (storage, suggestion)
        return offers

    def _ask_again(self) -> None:
        """Forget that there was no recipe: the function that ran then held what it needs."""
        waiting = self._to_ask_again
        while waiting and waiting[0][0] != self.recorder.clock:
            storage = self._storages.get(waiting.popleft()[1])
            if storage is not None:
                storage.recompute_s = None

    def _cancellation(self, storage: Storage) -> Suggestion:
        """Offer the memory of a prefetched value that nobody has read yet.

        The device waits for the end of the copy, and the value has to be copied once more.
        """
        again_s = self.transfers.inward.seconds(storage.nbytes)
        again_s /= self.recorder.distance(storage.storage_id)
        return Suggestion(Technique.OFFLOAD, self.transfers.seconds_coming(storage) + again_s)

    def _can_copy(self, storage: Storage) -> bool:
        """Tell whether copies are ordered with the work that uses the storage's block."""
        block = storage.block
        return block is not None and self.device.is_ordered(block)

    def _candidate(self, storage: Storage) -> Candidate:
        recorder, storage_id = self.recorder, storage.storage_id
        if storage.recompute_s is None:
            storage.recompute_s = self._estimate(self._plan(storage))
            if math.isinf(storage.recompute_s):
                self._to_ask_again.append((recorder.clock, storage_id))
        return Candidate(
            serial=storage_id,
            nbytes=storage.nbytes,
            distance=1 if storage.is_lasting else recorder.distance(storage_id),
            staleness=recorder.clock - recorder.last_touch(storage_id),
            is_expired=recorder.is_expired(storage_id),
            is_checkpoint=storage.is_checkpoint,
            recompute_s=storage.recompute_s,
            offload_s=self.transfers.seconds_out(storage),
            fetch_s=self.transfers.seconds_in(storage),
        )

    def evict_all(self) -> None:
        """Evict everything that can be, whatever the pressure (the `torture` policy)."""
        with self.pool.lock:
            if self._is_evicting or self._is_closed:
                return
            self._is_evicting = True
            try:
                self.drain()
                self.transfers.reap()
                self._pass += 1  # what held a storage in the last one may have let go
                offers = self._offers()
                while offers:
                    self._take(offers, next(iter(offers)))
                self.pool.coalesce()
            finally:
                self._is_evicting = False

    def _evict(self, storage: Storage, technique: Technique, *, is_planned: bool = False) -> bool:
        """Take a storage out of its slots; False, and nothing changed, where that cannot be."""
        if storage.arrival is not None:
            return self.transfers.cancel(storage)
        block = storage.block
        if block is None:
            return True
        contents = self._contents(storage)
        if not contents.arrays or not self._is_ours_alone(contents):
            storage.refused_in = self._pass
            return False
        views = [self.device.view_of(array, block) for array in contents.arrays]
        if technique is Technique.RECOMPUTE:
            if not self._drop(storage, is_planned=is_planned):
                return False
        elif not self._offload(storage):
            return False
        storage.views = views
        self._leave_slots(storage, contents)
        storage.block = None
        self.pool.settle()
        self.pool.note_moved_out(block.block_bytes)
        if block.owner is not None:
            raise InternalError(f"evicting {storage.nbytes:,} bytes did not free their block")
        return True

    def _leave_slots(self, storage: Storage, contents: Contents) -> None:
        producer = None if storage.producer is None else storage.producer.function()
        for slot, index in contents.slots:
            # A hole of the producer itself must not keep the producer alive: a cycle.
            anchor = None if storage.recipe is None or slot.owner is producer else producer
            slot.empty(Hole(storage, index, anchor))
        storage.is_away = True
        contents.arrays.clear()

    def _drop(self, storage: Storage, *, is_planned: bool = False) -> bool:
        recipe = self._plan(storage)
        if recipe is None or (not is_planned and self._would_chain(storage, recipe)):
            storage.recompute_s = math.inf
            self._to_ask_again.append((self.recorder.clock, storage.storage_id))
            return False
        storage.recipe = recipe
        self.transfers.forsake(storage)
        for missing in recipe.missing():
            if missing.recipe is None:
                self.foresight.note_away(missing)
        for source in recipe.outer_storages(self.storage_of):
            make_dependent(storage, source)
        self.counters.dropped_bytes += storage.nbytes
        return True

    def _would_chain(self, storage: Storage, recipe: Recipe) -> bool:
        """Tell whether a drop would make too many rebuilds wait for one another.

        All that such a chain rebuilds has to be there at once, and nobody has looked at whether it
        can be. A copy is the way then, where there is one.
        """
        if not self.policy.avoids_chains or not self.transfers.can_copy_out(storage):
            return False
        if self.recorder.is_expired(storage.storage_id):
            return False
        share = _CHAIN_SHARE_PLANNED if self.foresight.has_plans else _CHAIN_SHARE
        most_bytes = self.pool.capacity_bytes // share
        if self._chained_bytes(recipe) + storage.nbytes > most_bytes:
            return any(missing.recipe is not None for missing in recipe.missing())
        return any(
            self._chained_bytes(dependent.recipe) + dependent.nbytes + storage.nbytes > most_bytes
            for dependent in storage.dependents or ()
            if dependent.recipe is not None
        )

    def _chained_bytes(self, recipe: Recipe) -> int:
        """Return the bytes of all that has to be rebuilt before the recipe can be followed."""
        found: dict[int, Storage] = {}
        open_recipes = [recipe]
        while open_recipes:
            for missing in open_recipes.pop().missing():
                if missing.recipe is not None and missing.storage_id not in found:
                    found[missing.storage_id] = missing
                    open_recipes.append(missing.recipe)
        return sum(storage.nbytes for storage in found.values())

    def _offload(self, storage: Storage) -> bool:
        if not self.transfers.copy_out(storage) or not self.transfers.let_go(storage):
            return False
        if storage.keeps_copy:
            self.foresight.note_offloaded(storage)
        self.foresight.note_away(storage)
        return True

    def _plan(self, storage: Storage) -> Recipe | None:
        def is_safe(node: Any) -> bool:
            return self._is_safe_source(node, storage)

        return plan(storage, self._version_of, is_safe, self._is_fit)

    def _is_fit(self, function: Any, application: Application) -> bool:
        """Refuse what needs much memory to run again, or has arrays that somebody may change."""
        if application.transient > self.pool.capacity_bytes // _TRANSIENT_SHARE:
            return False
        return all(self._is_unshared(function, name) for name in application.given)

    def _is_unshared(self, function: Any, name: str) -> bool:
        """Tell whether nobody else refers to the arrays of a function's attribute."""
        arrays = [a for a in arrays_in(function.__dict__.get(name)) if self.device.owns(a)]
        storages = {s for s in map(self.storage_of, arrays) if s is not None}
        arrays = [a for a in arrays if self.storage_of(a) is None]
        if not self.device.is_exclusive(arrays, [1] * len(arrays)):
            return False
        return all(self._is_ours_alone(self._contents(storage)) for storage in storages)

    def _is_safe_source(self, node: Any, target: Storage) -> bool:
        """Tell whether a resident node's array is unchanged since forward and will stay so.

        A leaf's is not trusted: whoever made it may have written to it since.
        """
        source = self.storage_of(node.__dict__["_data"])
        if source is None or source is target or source.exposed:
            return False
        return source.producer is not None

    def _estimate(self, recipe: Recipe | None) -> float:
        if recipe is None:
            return math.inf
        seconds = sum(
            self.costs.estimate(step.application.signature, nbytes=step.application.nbytes)
            for step in recipe.steps
        )
        for missing in recipe.missing():
            if missing.recipe is not None:
                seconds += self._estimate(missing.recipe)
        return seconds


def costs_of(offers: dict[int, tuple[Storage, Suggestion]]) -> dict[int, float]:
    """Return the cost of each offer, by the offset of its block."""
    return {offset: suggestion.cost_s for offset, (_, suggestion) in offers.items()}


def look_nowhere() -> None:
    """Know of nothing besides what the manager was told."""
