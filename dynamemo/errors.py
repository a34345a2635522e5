"""What the runtime raises. Out of memory comes from `dynamemo.allocator` and is re-exported."""

from __future__ import annotations

from dynamemo.allocator import AllocatorError, OutOfMemoryError, SpillError

__all__ = [
    "AllocatorError",
    "DynamemoError",
    "InternalError",
    "OutOfMemoryError",
    "RecomputeError",
    "SpillError",
]


class DynamemoError(Exception):
    """Something that the runtime could not do; the message says what to change."""


class InternalError(DynamemoError):
    """A bug of dynamemo: please report it with the message."""


class RecomputeError(DynamemoError):
    """A function gave another result when it was applied again (`verify=True`)."""
