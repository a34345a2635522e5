"""Move what stays long together at the high end of the arena.

Parameters, gradients and optimizer state lie as they were made: often a parameter beside the
gradient that it began with, which leaves a hole as soon as it is cleared, too short for anything
but the next gradient. Moved together they leave one long run. This is done once for what is there,
and again when there is more of it.

Invariants kept here (numbers of the design's list):
  1. Only bytes move; whoever reads one finds it by its slot, on the stream that it was copied on.
  3. What somebody else refers to, or a copy reads, stays where it is.
"""

from __future__ import annotations

from typing import Protocol

from dynamemo.allocator import End, Pool
from dynamemo.storage import Storage

#: It is done again where so many times as many bytes stay as when it was done last.
_GROWTH = 1.1


class Mover(Protocol):
    """Who knows the storages: the memory manager."""

    def storages(self) -> list[Storage]:
        """Return the records of all storages that are alive."""
        ...

    def move(self, storage: Storage, *, above: int) -> bool:
        """Move a storage where its new memory begins above an address; tell whether it did."""
        ...


class Compactor:
    """Gathers what lasts.

    Parameters
    ----------
    pool : Pool
        Where it lies.
    mover : Mover
        Moves one.
    """

    def __init__(self, pool: Pool, mover: Mover) -> None:
        self._pool = pool
        self._mover = mover
        self._gathered_bytes = 0

    def gather(self) -> int:
        """Move what lasts as high as it goes, with the pool locked; return the bytes moved."""
        pool = self._pool
        lasting = [
            (block.address, storage)
            for storage in self._mover.storages()
            if storage.is_lasting and (block := storage.block) is not None
        ]
        lasting_bytes = sum(storage.nbytes for _, storage in lasting)
        if lasting_bytes <= _GROWTH * self._gathered_bytes:
            return 0
        self._gathered_bytes = lasting_bytes
        lasting.sort(key=lambda item: -item[0])
        usual_end, usual_floor = pool.default_end, pool.low_area_bytes
        pool.default_end, pool.low_area_bytes = End.HIGH, 0
        try:
            moved_bytes = 0
            for address, storage in lasting:
                pool.coalesce()  # or it would go where a block of its length was freed last
                if self._mover.move(storage, above=address):
                    moved_bytes += storage.nbytes
        finally:
            pool.default_end, pool.low_area_bytes = usual_end, usual_floor
        pool.coalesce()
        return moved_bytes
