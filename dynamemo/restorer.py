"""Bring storages back into their slots: from a tier, or by applying functions again.

The middle of the memory manager. It evicts nothing; where there is no room it says so.

Invariants kept here (numbers of the design's list):
  3. A storage that cannot be brought back stays where it was, and can be asked for again.
"""

from __future__ import annotations

from dynamemo.allocator import Pool, Ticket, TierStack
from dynamemo.device import Device
from dynamemo.errors import InternalError, RecomputeError
from dynamemo.recipe import Recipe, Replay
from dynamemo.records import Records
from dynamemo.storage import Array, Storage, View


class Restorer(Records):
    """Make storages resident.

    Parameters
    ----------
    replay : callable
        Applies a copy of a function again.
    verify : bool
        Whether what comes back is compared with a hash taken in forward.
    """

    def __init__(
        self, device: Device, pool: Pool, tiers: TierStack, replay: Replay, *, verify: bool
    ) -> None:
        super().__init__(device, pool, tiers)
        self.verify = verify
        self._replay = replay

    def bring_back(self, storage: Storage) -> list[Storage]:
        """Make a storage resident, and whatever has to be there first. Iterative, any depth.

        Returns
        -------
        list of Storage
            The others that were brought back for it.

        Raises
        ------
        OutOfMemoryError
            If there is no room. The storage stays where it is and can be read later.
        RecomputeError
            If `verify` is on and a function gave another result than in forward.
        """
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
        return rebuilt

    def _first_missing(self, recipe: Recipe) -> Storage | None:
        return next((s for s in recipe.missing() if not s.is_resident), None)

    def _bring_back(self, storage: Storage) -> list[Array]:
        if storage.recipe is not None:
            return self._recompute(storage, storage.recipe)
        if storage.is_away and storage.ticket is not None:
            return self._fetch(storage, storage.ticket)
        return self._contents(storage).arrays

    def _fetch(self, storage: Storage, ticket: Ticket) -> list[Array]:
        arrays = self.transfers.fetch(storage, ticket)
        if storage.digest is not None and storage.keeps_copy:
            self._check_copy(storage, arrays)
        self._return_to_slots(storage, arrays)
        if not storage.keeps_copy:
            self.transfers.forsake(storage)
        return arrays

    def _check_copy(self, storage: Storage, arrays: list[Array]) -> None:
        producer = storage.producer
        if producer is None or producer.view not in storage.views:
            return
        array = arrays[storage.views.index(producer.view)]
        if self.device.digest(array) != storage.digest:
            raise InternalError(f"a copy of {storage.nbytes:,} bytes came back from a tier changed")

    def _recompute(self, storage: Storage, recipe: Recipe) -> list[Array]:
        made = recipe.run(self._replay)
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
        block = self.device.block_of(arrays[0])
        if block is not None and block.pool is self.pool:
            self.pool.note_moved_out(-block.block_bytes)
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
        storage.is_away = storage.is_given_up = False
        storage.views = []
        for slot in list(storage.slots.values()):
            slot.fill(storage, arrays)
        self.recorder.touch(storage.storage_id)
