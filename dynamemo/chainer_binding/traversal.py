"""What is known of Chainer's backprop while it runs: readers that only look, frames, its lists."""

from __future__ import annotations

import sys
import types
from typing import Any

from chainer import _backprop, function_node, variable

from dynamemo.lazy import PEEKERS, has_holes, holes_of, names_with_holes


def _nested_code(code: types.CodeType) -> list[types.CodeType]:
    return [code] + [const for const in code.co_consts if isinstance(const, types.CodeType)]


# Backprop lists the data of all inputs before the hook runs, and only for hooks; the check of a
# gradient's type only compares classes. Both take None for data that was not retained.
for _reader in (
    _backprop._backprop_to_all,
    function_node._backprop,
    variable._check_grad_type,
):
    PEEKERS.update(_nested_code(_reader.__code__))


class Frame:
    """A backward that runs now: what it needs is held while others are evicted."""

    __slots__ = ("caller_id", "function", "has_forgotten", "held", "is_released", "op_id")

    def __init__(self, function: Any, op_id: int, caller_id: int) -> None:
        self.function = function
        self.op_id = op_id
        #: Identity of the Python frame of the traversal that runs it.
        self.caller_id = caller_id
        #: References that keep from eviction what the backward reads.
        self.held: list[Any] | tuple[()] = ()
        #: Memory is so short that nothing is held any more.
        self.is_released = False
        #: The traversal's lists were emptied.
        self.has_forgotten = False


def bring_in(function: Any) -> None:
    """Restore what is away of what a function's backward reads."""
    for index in function._input_indexes_to_retain or ():
        _restore(function.inputs[index], "_data")
    inner = function.__dict__.get("_function")
    for owner in (function,) if inner is None else (function, inner):
        if has_holes(owner):
            for name in names_with_holes(owner):
                getattr(owner, name)
    for index in function._output_indexes_to_retain or ():
        node = function.outputs[index]()
        if node is not None:
            _restore(node, "_data")


def _restore(node: Any, name: str) -> None:
    if has_holes(node):
        for hole in holes_of(node, name):
            hole.restore()


def needed_by(function: Any) -> list[Any]:
    """Return references to what is there of what a function's backward reads."""
    needed = []
    if function.inputs is not None:
        for index in function._input_indexes_to_retain or ():
            needed.append(function.inputs[index].__dict__.get("_data"))
    inner = function.__dict__.get("_function")
    for owner in (function,) if inner is None else (function, inner):
        needed += owner.__dict__.values()
    for index in function._output_indexes_to_retain or ():
        node = function.outputs[index]()
        if node is not None:
            needed.append(node.__dict__.get("_data"))
    return needed


def forget_arrays(frames: list[Frame]) -> None:
    """Empty the lists of arrays that backprop keeps for hooks until the next function.

    They would hold the functions' inputs and gradients in place. For traversals of which nobody
    else is there to read them.
    """
    wanted = {
        frame.caller_id: frame
        for frame in frames
        if not frame.has_forgotten and frame.function._n_local_function_hooks == 0
    }
    python_frame: types.FrameType | None = sys._getframe(1)
    while wanted and python_frame is not None:
        frame = wanted.pop(id(python_frame), None)
        if frame is not None:
            frame.has_forgotten = True
            _empty_lists(python_frame)
        python_frame = python_frame.f_back


def _empty_lists(traversal: types.FrameType) -> None:
    local = traversal.f_locals
    for name in ("in_data", "out_grad_array", "out_grad_data"):
        arrays = local.get(name)
        if type(arrays) is list:
            arrays[:] = [None] * len(arrays)
    if isinstance(local, dict):
        # Up to Python 3.12 a picture of the frame, which would keep alive what the frame deletes.
        local.clear()
