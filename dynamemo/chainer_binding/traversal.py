"""What is known of Chainer's backprop while it runs: readers that only look, frames, its lists."""

from __future__ import annotations

import types
from typing import Any

from chainer import _backprop, function_node, variable

from dynamemo.lazy import PEEKERS


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
    """A backward that runs now: what it needs is held, so it cannot be evicted."""

    __slots__ = ("caller_id", "function", "held", "op_id", "started")

    def __init__(self, function: Any, op_id: int, caller_id: int) -> None:
        self.function = function
        self.op_id = op_id
        self.caller_id = caller_id
        self.held: list[Any] = []


def forget_arrays(traversal: types.FrameType) -> None:
    """Empty the lists of arrays that backprop keeps for hooks until the next function.

    They would hold the function's inputs and gradients in place. Nobody else is there to read them.
    """
    local = traversal.f_locals
    for name in ("in_data", "out_grad_array", "out_grad_data"):
        arrays = local.get(name)
        if type(arrays) is list:
            arrays[:] = [None] * len(arrays)
    if isinstance(local, dict):
        # Up to Python 3.12 a picture of the frame, which would keep alive what the frame deletes.
        local.clear()
