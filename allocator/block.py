"""Describe what a pool gives out.

Covers the block and what a finalizer may hand over instead of one. Does not place anything.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from dynamemo.allocator.pool import Pool

__all__ = ["Block", "CountedBlock", "LateFree"]


class Block:
    """A stretch of a pool's arena that somebody owns."""

    __slots__ = (
        "__weakref__",
        "address",
        "block_bytes",
        "handle",
        "offset",
        "owner",
        "pool",
        "requested_bytes",
        "stream",
    )

    def __init__(self, pool: Pool, requested_bytes: int, block_bytes: int, stream: int) -> None:
        #: Address of the first byte.
        self.address = 0
        #: First byte, relative to the arena.
        self.offset = 0
        #: Bytes asked for.
        self.requested_bytes = requested_bytes
        #: Bytes taken, whole granules.
        self.block_bytes = block_bytes
        #: The pool it came from.
        self.pool = pool
        #: Handle of the stream that used it last; set it before freeing where that changed.
        self.stream = stream
        #: Free for the pool's user (the runtime notes its storage here).
        self.owner: object = None
        #: Kept alive as long as the block (the binding to a library notes its hook here).
        self.handle: object = None

    def __repr__(self) -> str:
        return f"<Block of {self.block_bytes:,} bytes at offset {self.offset:,}>"


class LateFree(Protocol):
    """Something a finalizer hands over, to be freed at the pool's next operation."""

    def release(self, pool: Pool) -> None:
        """Free it. Called with the pool locked; a second call does nothing."""


class CountedBlock(Protocol):
    """A small block that lives outside the arena and counts against the budget."""

    #: Bytes that count; 0 before and after.
    counted_bytes: int
