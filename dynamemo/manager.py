"""The memory manager: evicts storages when the pool is short, and brings them back when read.

It owns the storages' records and is the only one that moves or drops their values. A policy
suggests; the manager looks whether it can be done and does it. It knows no Chainer: the binding
registers arrays and slots and replays functions for it.

Invariants kept here (numbers of the design's list):
  2. The pool asks it to free a contiguous run; it evicts the run of adjacent blocks that costs
     least, and nothing that anybody else refers to.
  3. A value leaves its slots only after a tier holds it or a recipe for it is complete.

Source: the eviction by runs of adjacent blocks answers the seed's fault that freed bytes need not
be contiguous (Wang et al., PPoPP 2018, Algorithm 2).
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable
from typing import Any

from dynamemo.allocator import Block, OutOfMemoryError, Pool, SpillError, Ticket, TierStack
from dynamemo.counters import Counters
from dynamemo.device import Device
from dynamemo.errors import InternalError, RecomputeError
from dynamemo.graph import Link, StorageKind
from dynamemo.policies import Candidate, Policy, Suggestion, Technique
from dynamemo.recipe import (
    Application,
    ParameterVersion,
    Recipe,
    Replay,
    arrays_in,
    make_dependent,
    plan,
)
from dynamemo.records import Contents, Records
from dynamemo.storage import Array, Hole, Storage, View

#: Storages below this many bytes are left alone: moving them frees nothing worth the time.
MIN_BYTES = 4096

#: A function whose temporaries are more than this part of the arena is not applied again: in the
#: middle of a backward there may be no room for them.
_TRANSIENT_SHARE = 8

#: Kinds that are no tensor of one graph.
_LASTING = frozenset({StorageKind.PARAMETER, StorageKind.GRADIENT, StorageKind.WORKSPACE})

#: A block shorter than this part of the arena is placed at the high end, with what stays long:
#: the temporaries of a convolution are many times its input, and need the space in one piece.
_SMALL_SHARE = 16


class MemoryManager(Records):
    """Keep the managed storages of one device within the pool."""

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
        super().__init__(device, pool, tiers)
        self.policy = policy
        self.counters = Counters()
        self.verify = verify
        #: Why a tier last refused, for the error message.
        self.refusal: str | None = None
        #: Called before offers are made: tells the manager of arrays that moved into new places.
        self.look_around: Callable[[], None] | None = None
        pool.small_block_bytes = pool.capacity_bytes // _SMALL_SHARE
        self._replay = replay
        self._version_of = version_of
        self._min_bytes = min_bytes
        self._out = Link()
        self._in = Link()
        self._is_evicting = False
        self._is_closed = False

    # -- eviction --------------------------------------------------------------------------

    def expose(self, storage: Storage) -> None:
        """Note that code outside Chainer may write into the storage from now on.

        What a recipe would rebuild from it is rebuilt first.
        """
        if storage.exposed:
            return
        with self.pool.lock:  # one lock for both: a reclaim comes in with it held
            storage.exposed = True
            self._rebuild_dependents(storage)

    def _rebuild_dependents(self, storage: Storage) -> None:
        for dependent in list(storage.dependents or ()):
            if dependent.recipe is not None:
                self.restore(dependent)
            dependent.recompute_s = math.inf
        storage.dependents = None

    def reclaim(self, pool: Pool, requested_bytes: int) -> bool:
        """Evict the cheapest run of adjacent blocks that makes room for the request.

        Called by the pool, with its lock held, possibly from inside an array allocation.

        Returns
        -------
        bool
            False where no run can be made free.
        """
        if self._is_evicting or self._is_closed:
            return False
        self._is_evicting = True
        try:
            self.drain()
            self.settle_timers()
            if self.look_around is not None:
                self.look_around()
            return self._free_run(requested_bytes)
        finally:
            self._is_evicting = False

    def _free_run(self, requested_bytes: int) -> bool:
        pool, offers = self.pool, self._offers()
        is_long = requested_bytes >= pool.small_block_bytes
        if is_long:
            self._widen_low_area(requested_bytes)
        floor = 0 if is_long else pool.low_area_bytes
        while True:
            costs = {offset: offer[1].cost_s for offset, offer in offers.items()}
            window = pool.cheapest_window(requested_bytes, costs, floor=floor)
            if window is None and floor:
                # Better in the way of long blocks than nowhere, until the function is done.
                floor = pool.low_area_bytes = 0
            elif window is None:
                return False
            elif self._take_all(offers, window):
                return True

    def _take_all(
        self, offers: dict[int, tuple[Storage, Suggestion]], window: tuple[Block, ...]
    ) -> bool:
        """Evict a window; False where some block of it stayed, after trying them all."""
        taken = [self._take(offers, block) for block in window]
        return all(taken)

    def _widen_low_area(self, requested_bytes: int) -> None:
        """Keep the low end free of what stays, as far as a function's long temporaries reached."""
        running_bytes = sum(
            block.block_bytes
            for block in self.pool.blocks()
            if block.owner is None and block.block_bytes >= self.pool.small_block_bytes
        )
        most_bytes = self.pool.capacity_bytes * 7 // 8
        wanted_bytes = min(most_bytes, running_bytes + requested_bytes)
        self._low_area_bytes = max(self._low_area_bytes, wanted_bytes)

    def _take(self, offers: dict[int, tuple[Storage, Suggestion]], block: Block) -> bool:
        """Evict the storage of a block as offered; withdraw or change the offer where it fails."""
        storage, suggestion = offers.pop(block.offset)
        if self._evict(storage, suggestion.technique):
            return True
        other = self.policy.suggest(self._candidate(storage))
        if other is not None and storage.refused_at != self.recorder.clock:
            offers[block.offset] = (storage, other)
        return False

    def _offers(self) -> dict[int, tuple[Storage, Suggestion]]:
        offers = {}
        clock = self.recorder.clock
        for storage in list(self._storages.values()):
            block = storage.block
            if block is None or storage.refused_at == clock:
                continue
            if storage.nbytes < self._min_bytes:
                continue
            suggestion = self.policy.suggest(self._candidate(storage))
            if suggestion is not None:
                offers[block.offset] = (storage, suggestion)
        return offers

    def _candidate(self, storage: Storage) -> Candidate:
        recorder, storage_id = self.recorder, storage.storage_id
        if storage.recompute_s is None:
            storage.recompute_s = self._estimate(self._plan(storage))
        can_offload = storage.ticket_refused_at != self._tier_revision
        return Candidate(
            nbytes=storage.nbytes,
            distance=1 if storage.is_lasting else recorder.distance(storage_id),
            staleness=recorder.clock - recorder.last_touch(storage_id),
            is_expired=recorder.is_expired(storage_id),
            is_checkpoint=storage.is_checkpoint,
            recompute_s=storage.recompute_s,
            offload_s=self._out.seconds(storage.nbytes) if can_offload else math.inf,
            fetch_s=self._in.seconds(storage.nbytes),
        )

    def evict_all(self) -> None:
        """Evict everything that can be, whatever the pressure (the `torture` policy)."""
        with self.pool.lock:
            if self._is_evicting or self._is_closed:
                return
            self._is_evicting = True
            try:
                self.drain()
                for storage in self.storages():
                    storage.refused_at = -1  # what held it then may have let go
                for storage, suggestion in self._offers().values():
                    self._evict(storage, suggestion.technique)
                self.pool.coalesce()
            finally:
                self._is_evicting = False

    def _evict(self, storage: Storage, technique: Technique) -> bool:
        """Take a storage out of its slots; False, and nothing changed, where that cannot be."""
        block = storage.block
        if block is None:
            return True
        contents = self._contents(storage)
        if not contents.arrays or not self._is_ours_alone(contents):
            storage.refused_at = self.recorder.clock
            return False
        views = [self.device.view_of(array, block) for array in contents.arrays]
        if technique is Technique.RECOMPUTE:
            if not self._drop(storage):
                return False
        elif not self._offload(storage, block):
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
        contents.arrays.clear()

    def _drop(self, storage: Storage) -> bool:
        recipe = self._plan(storage)
        if recipe is None:
            storage.recompute_s = math.inf
            return False
        storage.recipe = recipe
        for source in recipe.outer_storages(self.storage_of):
            make_dependent(storage, source)
        self.counters.dropped_bytes += storage.nbytes
        return True

    def _offload(self, storage: Storage, block: Block) -> bool:
        started = time.perf_counter()
        try:
            ticket = self._tiers.store(block.address, storage.nbytes)
        except SpillError as error:
            self.refusal, ticket = str(error), None
        if ticket is None:
            storage.ticket_refused_at = self._tier_revision
            return False
        self._out.observe(storage.nbytes, time.perf_counter() - started)
        storage.ticket = ticket
        self.counters.offloaded_bytes += storage.nbytes
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
        return sum(
            self.costs.estimate(step.application.signature, nbytes=step.application.nbytes)
            for step in recipe.steps
        )

    # -- restoring -------------------------------------------------------------------------

    def restore(self, storage: Storage) -> None:
        """Make a storage resident, and whatever has to be there first. Iterative, any depth.

        Raises
        ------
        OutOfMemoryError
            If there is no room. The storage stays where it is and can be read later.
        RecomputeError
            If `verify` is on and a function gave another result than in forward.
        """
        with self.pool.lock:
            self.drain()
            try:
                self._restore(storage)
            except MemoryError as error:
                error.__traceback__ = None  # its frames keep arrays
            else:
                return
            self.evict_all()
            self._restore(storage)

    def _restore(self, storage: Storage) -> None:
        rebuilt: list[Storage] = []
        stack: list[tuple[Storage, list[Array]]] = [(storage, [])]
        while stack:
            top = stack[-1][0]
            missing = None if top.recipe is None else self._first_missing(top.recipe)
            if missing is not None:
                rebuilt.append(missing)
                stack.append((missing, []))
                continue
            arrays = self._bring_back(top)
            stack.pop()
            if stack:
                # The parent's sources stay until the parent is made.
                stack[-1][1].extend(arrays)
        del arrays
        if not self.policy.keeps_rebuilt_sources:
            self._drop_again(rebuilt)

    def _first_missing(self, recipe: Recipe) -> Storage | None:
        return next((s for s in recipe.missing() if not s.is_resident), None)

    def _bring_back(self, storage: Storage) -> list[Array]:
        if storage.recipe is not None:
            return self._recompute(storage, storage.recipe)
        if storage.ticket is not None:
            return self._fetch(storage, storage.ticket)
        return self._contents(storage).arrays

    def _drop_again(self, storages: list[Storage]) -> None:
        for storage in storages:
            if storage.recompute_s is not None and not math.isinf(storage.recompute_s):
                self._evict(storage, Technique.RECOMPUTE)

    def _fetch(self, storage: Storage, ticket: Ticket) -> list[Array]:
        memory = self.device.allocate(storage.nbytes)
        started = time.perf_counter()
        self._tiers.load(ticket, self.device.address_of(memory))
        self._in.observe(storage.nbytes, time.perf_counter() - started)
        arrays = [self.device.array_in(memory, view) for view in storage.views]
        storage.ticket = None
        self._discard(ticket)
        self.counters.fetched_bytes += storage.nbytes
        self._return_to_slots(storage, arrays)
        return arrays

    def _recompute(self, storage: Storage, recipe: Recipe) -> list[Array]:
        sources = [source.array() for source in recipe.outer_sources()]
        made = recipe.run(self._replay)
        del sources
        if storage.producer is None:
            raise InternalError(f"{recipe.label()} was to be applied again without a record")
        view = storage.producer.view
        made = self._as_before(made, view, storage)
        self._check(storage, made, recipe)
        arrays = [
            made if other == view else self.device.array_in(self.device.memory_of(made), other)
            for other in storage.views
        ]
        del made
        storage.recipe = None
        self.counters.recomputed_bytes += storage.nbytes
        self.counters.recomputed_functions += len(recipe.steps)
        self._return_to_slots(storage, arrays)
        return arrays

    def _as_before(self, made: Array, view: View, storage: Storage) -> Array:
        """Return the array with the layout and memory that it had in forward."""
        if self.device.layout_of(made) == (view, storage.nbytes):
            return made
        memory = self.device.allocate(storage.nbytes)
        array = self.device.array_in(memory, view)
        array[...] = made
        return array

    def _check(self, storage: Storage, made: Array, recipe: Recipe) -> None:
        if storage.digest is not None and self.device.digest(made) != storage.digest:
            raise RecomputeError(
                f"{recipe.label()} gave another result when it was applied again "
                f"(shape {made.shape}, {made.dtype}); its outputs must not be recomputed: "
                f"use policy='offload', or report it if it is one of Chainer's functions"
            )

    def _return_to_slots(self, storage: Storage, arrays: list[Array]) -> None:
        storage.block = None
        block = self.device.block_of(arrays[0])
        if block is not None and block.pool is self.pool:
            storage.block = block
            block.owner = storage
            self.pool.note_moved_out(-block.block_bytes)
        storage.views = []
        for slot in list(storage.slots.values()):
            slot.fill(storage, arrays)
        self.recorder.touch(storage.storage_id)

    def close(self) -> None:
        """Evict no more, and bring parameters, gradients and optimizer state back.

        The tensors of a graph that are away stay so until they are read; then they come back.
        """
        with self.pool.lock:
            self._is_closed = True
            self.drain()
            for storage in self.storages():
                if storage.is_lasting and not storage.is_resident:
                    with contextlib.suppress(MemoryError):  # then it comes back when it is read
                        self.restore(storage)

    def explain(self, error: OutOfMemoryError) -> None:
        """Say in an error which function asked, and what holds the memory."""
        graph_bytes = sum(
            s.block.block_bytes for s in self.storages() if s.block is not None and not s.is_lasting
        )
        error.function = self.current_function
        error.detail = (
            f"{graph_bytes:,} by tensors of the graph that are in use now or cannot be evicted, "
            f"{max(0, error.in_use_bytes - graph_bytes):,} by parameters, optimizer state and "
            "arrays outside of the graph"
        )
        if self.refusal is not None:
            error.detail += f"; {self.refusal}"
