"""What lies where in the arena when a request fails, who made it, and why it stays.

For a person to read. Looks at the runtime from outside, through what it does not promise to keep;
nothing but the benchmarks may rest on it.
"""

from __future__ import annotations

import gc
import sys
import traceback
import types
import weakref
from dataclasses import dataclass
from typing import Any

from benchmarks.rehearsing.machine import RehearsedDevice
from dynamemo.allocator import Block, OutOfMemoryError
from dynamemo.storage import Storage

#: Blocks that are shorter than this part of the budget are left out.
_LEAST_SHARE = 200
#: Holders that are named.
_MOST_HOLDERS = 8


@dataclass(frozen=True, slots=True)
class Place:
    """A block, or a free stretch."""

    offset: int
    nbytes: int
    #: Shape of the array that it was taken for, and the function that took it.
    shape: tuple[int, ...]
    maker: str
    #: Why it stays, or how it could go.
    state: str
    #: Who refers to its array.
    holders: tuple[str, ...] = ()

    def __str__(self) -> str:
        shape = "×".join(map(str, self.shape))
        line = f"{self.offset:>15,} {self.nbytes:>13,}  {shape:18} {self.maker:32} {self.state}"
        return "\n".join((line, *(f"{'':32}held by {holder}" for holder in self.holders)))


@dataclass(frozen=True, slots=True)
class ArenaMap:
    """The arena at a request that failed."""

    requested_bytes: int
    function: str | None
    places: tuple[Place, ...]
    #: The frames of Chainer and of the runtime, outermost first.
    stack: tuple[str, ...]

    def __str__(self) -> str:
        head = f"{self.requested_bytes:,} bytes asked for by {self.function}, through"
        return "\n".join((head, *self.stack, *map(str, self.places)))


class Witness:
    """Keeps a journal of blocks, and makes a map whenever a request fails.

    Parameters
    ----------
    device : RehearsedDevice
        Whose arrays are noted.
    """

    def __init__(self, device: RehearsedDevice) -> None:
        #: The map of the last request that failed.
        self.last: ArenaMap | None = None
        self._device = device
        self._births: dict[int, tuple[weakref.ref[Any], tuple[int, ...], str]] = {}

    def attach(self, runtime: Any) -> None:
        """Watch a runtime that was entered just now."""
        self._manager = runtime._manager
        self._pool = runtime._pool
        self._least_bytes = self._pool.budget_bytes // _LEAST_SHARE
        self._explain = self._pool.explain
        self._pool.explain = self._note_failure
        self._device.gpu.on_birth = self._note_birth

    def _note_birth(self, array: Any) -> None:
        if array.nbytes >= self._least_bytes:
            address = array.__array_interface__["data"][0]
            maker = self._manager.current_function or "outside"
            self._births[address] = (weakref.ref(array), array.shape, maker)

    def _note_failure(self, error: OutOfMemoryError) -> None:
        self._explain(error)
        blocks = sorted(self._manager.pool._blocks.values(), key=lambda block: block.offset)
        places, end = [], 0
        for block in [*blocks, None]:
            offset = self._pool.capacity_bytes if block is None else block.offset
            if offset - end >= self._least_bytes:
                places.append(Place(end, offset - end, (), "", "free"))
            if block is None:
                break
            if block.block_bytes >= self._least_bytes:
                places.append(self._place(block))
            end = block.offset + block.block_bytes
        requested = (error.requested_bytes, self._manager.current_function)
        self.last = ArenaMap(*requested, tuple(places), _stack())

    def _place(self, block: Block) -> Place:
        reference, shape, maker = self._births.get(block.address, (None, (), "?"))
        storage: Any = block.owner
        arrays = []
        if storage is None:
            state = "not known to the manager"
            arrays = [] if reference is None else [reference()]
        else:
            state, arrays = self._state(storage)
            shape = shape if len(shape) != 1 or not arrays else arrays[0].shape
        arrays = [array for array in arrays if array is not None]
        return Place(block.offset, block.block_bytes, shape, maker, state, _holders(arrays))

    def _state(self, storage: Storage) -> tuple[str, list[Any]]:
        """Say why a storage stays, or how it could go; return its arrays."""
        manager = self._manager
        words = [name for name in ("is_lasting", "is_leaf", "exposed") if getattr(storage, name)]
        words += [] if storage.producer is None else [_producer(storage.producer)]
        if storage.arrival is not None:
            return ", ".join(["is coming in", *words]), []
        contents = manager._contents(storage)
        if not contents.arrays:
            words.append("no place of it is known")
        elif contents.is_shared:
            words.append("somebody holds the container of a place")
        elif not manager.device.is_exclusive(contents.arrays, contents.references):
            words.append(_counts(contents))
        if storage.refused_at == manager.recorder.clock:
            words.append("refused since the function began")
        known_s = storage.recompute_s
        candidate = manager._candidate(storage)
        storage.recompute_s = known_s
        suggestion = manager.policy.suggest(candidate)
        words.append(
            f"recompute {candidate.recompute_s * 1e3:.2f} ms (noted: {known_s}), "
            f"offload {candidate.offload_s * 1e3:.2f} ms, "
            f"{'expired, ' if candidate.is_expired else ''}"
            f"suggested: {None if suggestion is None else suggestion.technique.value}"
        )
        return ", ".join(words), list(contents.arrays)


def _producer(producer: Any) -> str:
    function = producer.function()
    label = "of a dead function" if function is None else f"of {type(function).__name__}"
    return f"{label}, op {producer.op_id}"


def _counts(contents: Any) -> str:
    """Say which arrays somebody unknown refers to."""
    counts = [
        # Besides those in places: the list's and the argument's.
        (sys.getrefcount(contents.arrays[index]) - 2, references)
        for index, references in enumerate(contents.references)
    ]
    return "in use: " + ", ".join(f"{n} references, {known} known" for n, known in counts)


# -- who refers to an array --


def _holders(arrays: list[Any]) -> tuple[str, ...]:
    found: dict[str, None] = {}
    for array in arrays:
        for holder in (*_in_frames(array), *_in_objects(array, arrays)):
            found[holder] = None
    return tuple(found)[:_MOST_HOLDERS]


def _in_frames(array: Any) -> list[str]:
    found = []
    frame: types.FrameType | None = sys._getframe(1)
    while frame is not None:
        is_function = frame.f_locals is not frame.f_globals
        if is_function and frame.f_globals.get("__name__") != __name__:
            variables = dict(frame.f_locals)
            for name, value in variables.items():
                if value is array or (
                    type(value) in (tuple, list) and any(item is array for item in value)
                ):
                    found.append(f"local {name!r} of {_where(frame)}")
            if sys.version_info < (3, 13):
                frame.f_locals.clear()  # a picture that would keep them alive
        frame = frame.f_back
    return found


def _in_objects(array: Any, ours: list[Any]) -> list[str]:
    found = []
    for holder in gc.get_referrers(array):
        if holder is ours or isinstance(holder, types.FrameType):
            continue
        if isinstance(holder, dict):
            names = [name for name, value in holder.items() if value is array]
            owners = [o for o in gc.get_referrers(holder) if getattr(o, "__dict__", None) is holder]
            kind = type(owners[0]).__name__ if owners else "dict"
            found += [f"{kind}.{name}" for name in names]
        elif isinstance(holder, list | tuple):
            owners = [
                f"{type(owner).__name__}" for owner in gc.get_referrers(holder) if owner is not ours
            ]
            found.append(f"{type(holder).__name__} of {len(holder)} in {owners[:3]}")
        else:
            names = [n for n, v in getattr(holder, "__dict__", {}).items() if v is array]
            found += [f"{type(holder).__name__}.{name}" for name in names or ("?",)]
    return found


def _where(frame: types.FrameType) -> str:
    module = str(frame.f_globals.get("__name__"))
    return f"{module}.{frame.f_code.co_name}:{frame.f_lineno}"


def _stack() -> tuple[str, ...]:
    return tuple(
        f"  {_where(frame)}"
        for frame, _ in reversed(list(traceback.walk_stack(sys._getframe(1))))
        if str(frame.f_globals.get("__name__")).startswith(("chainer.", "dynamemo."))
    )
