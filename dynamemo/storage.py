"""A storage: one block of device memory that arrays of a computational graph share.

Views (reshape, transpose, split, slices) of one block are one storage: it is evicted once, moved
once and comes back once, with every view's offset, shape and strides as they were. This module
holds the record and the ways to reach the arrays (*slots*); it decides nothing and moves nothing.

Invariants kept here:
  3. A storage is resident (its arrays sit in their slots), or it is away and has a ticket of a
     tier or a recipe to recompute it; never none of these while a slot is alive.
  4. A resident storage with a ticket is *clean*: the tier's copy, made or under way, is of the
     value that the arrays have.
  6. A storage is owned by its block while it is resident and by the slots it left while it is
     away, so it dies with the last array or the last graph node, without the cycle collector.
"""

from __future__ import annotations

import enum
import weakref
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from dynamemo.allocator import Block, Mark, Ticket
    from dynamemo.recipe import Recipe

#: An array of NumPy or CuPy.
Array = Any


class Residence(enum.Enum):
    """Where the value of a storage is."""

    RESIDENT = "resident"
    OFFLOADED = "offloaded"
    DROPPED = "dropped"


@dataclass(frozen=True, slots=True)
class View:
    """How one array lies in its storage."""

    #: Bytes from the start of the storage to the array's first element.
    offset: int
    shape: tuple[int, ...]
    dtype: Any
    #: Bytes to step in each dimension.
    strides: tuple[int, ...]


class Slot(Protocol):
    """A place outside dynamemo that refers to an array of a storage."""

    @property
    def owner(self) -> object | None:
        """The object that the place belongs to, or None when it died."""
        ...

    def get(self) -> Array | None:
        """Return the array held there, or None where the owner died or holds something else."""
        ...

    def is_shared(self) -> bool:
        """Tell whether emptying the slot would leave the array with somebody else."""
        ...

    def key(self) -> tuple[int, str, int | str | None]:
        """Return what tells this slot from the others of its storage."""
        ...

    def empty(self, hole: Hole) -> None:
        """Replace the array by a hole that brings the storage back when it is read."""
        ...

    def fill(self, storage: Storage, arrays: list[Array]) -> None:
        """Replace the storage's hole by its array; nothing happens where the hole is gone."""
        ...


class Hole:
    """What a slot holds while its storage is away. It keeps the storage's record alive."""

    __slots__ = ("anchor", "index", "storage")

    def __init__(self, storage: Storage, index: int, anchor: object = None) -> None:
        self.storage = storage
        #: Which of the storage's views was here.
        self.index = index
        #: The function node that a recipe ends with, kept alive from here (see `Recipe`).
        self.anchor = anchor

    def restore(self) -> None:
        """Bring the storage back into all its slots."""
        self.storage.keeper.restore(self.storage)


class Keeper(Protocol):
    """Who moves storages: the memory manager."""

    def restore(self, storage: Storage) -> None:
        """Make the storage resident."""
        ...

    def expose(self, storage: Storage) -> None:
        """Note that code outside Chainer may write into the storage from now on."""
        ...

    def forget(self, storage_id: int, ticket: Ticket | None) -> None:
        """Note that the last reference to a storage is gone; free what its tier holds."""
        ...


class Arrival:
    """The memory that a prefetched value is copied into; not yet seen by anybody."""

    __slots__ = ("arrays", "block", "ends_s", "mark")

    def __init__(self, arrays: list[Array], block: Block | None, mark: Mark, ends_s: float) -> None:
        #: One array for each of the storage's views.
        self.arrays = arrays
        self.block = block
        #: The end of the copy.
        self.mark = mark
        #: When that is expected, in the seconds of the timeline.
        self.ends_s = ends_s


class Producer:
    """Which application of which function made a storage, and as what."""

    __slots__ = ("attribute", "function", "op_id", "output_index", "view")

    def __init__(
        self,
        function: Any,
        op_id: int,
        view: View,
        *,
        output_index: int | None = None,
        attribute: str | None = None,
    ) -> None:
        self.function = weakref.ref(function)
        self.op_id = op_id
        #: How the produced array lies in the storage.
        self.view = view
        self.output_index = output_index
        self.attribute = attribute


class Storage:
    """The record of one managed block.

    Attributes carry units; `block` is None while the value is away.
    """

    __slots__ = (
        "__weakref__",
        "arrival",
        "block",
        "copied_s",
        "covered",
        "dependents",
        "digest",
        "exposed",
        "is_away",
        "is_checkpoint",
        "is_given_up",
        "is_lasting",
        "is_leaf",
        "keeper",
        "nbytes",
        "producer",
        "recipe",
        "recompute_s",
        "refused_in",
        "slots",
        "storage_id",
        "ticket",
        "ticket_refused_at",
        "views",
    )

    def __init__(self, storage_id: int, block: Block, keeper: Keeper) -> None:
        self.storage_id = storage_id
        self.keeper = keeper
        self.block: Block | None = block
        #: Requested bytes of the block: what a tier holds.
        self.nbytes: int = block.requested_bytes
        #: Who made it; None: not known, or it was there before any function.
        self.producer: Producer | None = None
        #: Whether the producer's array is the whole block, so that making it anew rebuilds all.
        self.covered = False
        #: Whether the seed's rules call the producer a checkpoint (convolution, matrix product).
        self.is_checkpoint = False
        #: Its memory was there before any function ran on it: a user's array, or a view of one.
        self.is_leaf = False
        #: It is no tensor of one graph: a parameter, a gradient, optimizer state.
        self.is_lasting = False
        #: Code outside Chainer may have written into it: never dropped, never a source.
        self.exposed = False
        #: Its slots hold holes: the value is in a tier, or can be recomputed.
        self.is_away = False
        #: A plan wants it to be away until backward reads it.
        self.is_given_up = False
        self.slots: dict[tuple[int, str, int | str | None], Slot] = {}
        #: How each distinct array lay in the block, while the value is away.
        self.views: list[View] = []
        #: The tier's copy; of a resident storage too (see invariant 4).
        self.ticket: Ticket | None = None
        #: When its copy out is expected to have ended, in the seconds of the timeline.
        self.copied_s = 0.0
        #: Where a prefetch puts the value, while it is away.
        self.arrival: Arrival | None = None
        self.recipe: Recipe | None = None
        #: Estimated seconds to recompute it; None: not asked yet; inf: cannot be recomputed.
        self.recompute_s: float | None = None
        #: The search for room in which it stayed because something else refers to the array.
        self.refused_in = -1
        #: State of the tiers when they last had no room for it.
        self.ticket_refused_at = -1
        #: Dropped storages whose recipe reads this one.
        self.dependents: weakref.WeakSet[Storage] | None = None
        #: Hash of the bytes taken in forward (`verify=True`).
        self.digest: bytes | None = None

    @property
    def residence(self) -> Residence:
        """Where the value is now."""
        if not self.is_away:
            return Residence.RESIDENT
        return Residence.OFFLOADED if self.recipe is None else Residence.DROPPED

    @property
    def is_resident(self) -> bool:
        """Whether the arrays are in their slots."""
        return not self.is_away

    @property
    def keeps_copy(self) -> bool:
        """Whether nobody writes into it: a copy in a tier stays true while it is resident."""
        is_private = not (self.exposed or self.is_lasting or self.is_leaf)
        return is_private and self.producer is not None

    def add_slot(self, slot: Slot) -> None:
        """Register a place that refers to an array of this storage; one entry a place."""
        self.slots[slot.key()] = slot

    def __del__(self) -> None:
        self.keeper.forget(self.storage_id, self.ticket)
