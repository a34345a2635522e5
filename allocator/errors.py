"""Define the errors of the allocator.

Covers running out of budget, a spill file that cannot be written, and faults of our own. Does not
cover CuPy's error class: ``cupy_memory.as_cupy_error`` adds it where CuPy is in use.

1. Each error is raised before or after a change, never in the middle of one: pool, tier and arrays
   stay usable.
"""

from __future__ import annotations

__all__ = ["AllocatorError", "InternalError", "NestedUseError", "OutOfMemoryError", "SpillError"]


class AllocatorError(Exception):
    """Any error of the allocator."""


class InternalError(AllocatorError):
    """A fault of the allocator itself: please report it."""


class NestedUseError(AllocatorError):
    """A finalizer or signal handler used a pool in the middle of that pool's own work."""


class OutOfMemoryError(AllocatorError, MemoryError):
    """A request does not fit in the budget, even after everything reclaimable was reclaimed.

    The attributes may be completed by whoever knows more (the runtime sets `function`); the text
    follows them.

    Parameters
    ----------
    requested_bytes : int
        Bytes asked for.
    budget_bytes : int
        The pool's limit.
    in_use_bytes : int
        Bytes that count against the budget now: blocks, reservations and small blocks outside the
        arena.
    feasible_bytes : int
        Smallest budget that would satisfy this request in the present state.
    largest_free_bytes : int
        Longest contiguous free run; smaller than the free bytes where memory is fragmented.
    function : str, optional
        Name of the function on whose behalf the memory was asked for.
    detail : str
        What holds the memory, in words.
    """

    def __init__(
        self,
        *,
        requested_bytes: int,
        budget_bytes: int,
        in_use_bytes: int,
        feasible_bytes: int,
        largest_free_bytes: int = 0,
        function: str | None = None,
        detail: str = "",
    ) -> None:
        # Not super(): with CuPy the next class in line is CuPy's own error, whose arguments differ.
        Exception.__init__(self)
        self.requested_bytes = requested_bytes
        self.budget_bytes = budget_bytes
        self.in_use_bytes = in_use_bytes
        self.feasible_bytes = feasible_bytes
        self.largest_free_bytes = largest_free_bytes
        self.function = function
        self.detail = detail

    def __str__(self) -> str:
        where = f" for {self.function}" if self.function else ""
        detail = f" ({self.detail})" if self.detail else ""
        return (
            f"cannot allocate {self.requested_bytes:,} bytes{where}: "
            f"{self.in_use_bytes:,} of {self.budget_bytes:,} in use{detail}, "
            f"largest free block {self.largest_free_bytes:,}; "
            f"raise the budget to at least {self.feasible_bytes:,} or allow offload"
        )

    def fields(self) -> dict[str, int | str | None]:
        """Return the constructor's arguments, for copying and pickling."""
        return {
            "requested_bytes": self.requested_bytes,
            "budget_bytes": self.budget_bytes,
            "in_use_bytes": self.in_use_bytes,
            "feasible_bytes": self.feasible_bytes,
            "largest_free_bytes": self.largest_free_bytes,
            "function": self.function,
            "detail": self.detail,
        }

    def __reduce__(self) -> tuple[object, ...]:
        return (_rebuild, (type(self), self.fields()))


class SpillError(AllocatorError, OSError):
    """A spill file cannot be created, written or read.

    Parameters
    ----------
    message : str
        What failed, with the way out.
    folder : str
        The spill folder.
    requested_bytes : int
        Bytes that were to be written or read.
    free_bytes : int
        Bytes the folder's file system has free; -1 where unknown.
    """

    def __init__(
        self, message: str, *, folder: str = "", requested_bytes: int = 0, free_bytes: int = -1
    ) -> None:
        super().__init__(message)
        self.folder = folder
        self.requested_bytes = requested_bytes
        self.free_bytes = free_bytes

    def __reduce__(self) -> tuple[object, ...]:
        fields = {
            "folder": self.folder,
            "requested_bytes": self.requested_bytes,
            "free_bytes": self.free_bytes,
        }
        return (_rebuild_spill, (str(self), fields))


def _rebuild(kind: type[OutOfMemoryError], fields: dict[str, int | str | None]) -> OutOfMemoryError:
    return kind(**fields)  # type: ignore[arg-type]


def _rebuild_spill(message: str, fields: dict[str, int | str]) -> SpillError:
    return SpillError(message, **fields)  # type: ignore[arg-type]
