"""A convolution as cuDNN sees it, and the plans that can do it.

Values only. The three directions share one description: ``x`` and ``y`` are the input and output
of the *forward* convolution and ``w`` its filters, whichever of them is written.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import Protocol

from dynamemo.cudnn import names

__all__ = ["Convolution", "Direction", "Plan", "PlanSource"]


class Direction(Enum):
    """Which of the three arrays is computed from the other two."""

    FORWARD = "forward"
    #: The gradient of ``x``; also deconvolution.
    DATA = "data"
    #: The gradient of ``w``.
    FILTER = "filter"


@dataclass(frozen=True, slots=True)
class Convolution:
    """Everything that decides which plans can do a convolution, and how well.

    Shapes are as the arrays have them: ``(n, c, h, w)``, or ``(n, h, w, c)`` under the layout NHWC.
    """

    direction: Direction
    #: "e", "f" or "d", as in `numpy.dtype.char`; the same for the three arrays.
    dtype_char: str
    x_shape: tuple[int, ...]
    w_shape: tuple[int, ...]
    y_shape: tuple[int, ...]
    pad: tuple[int, ...]
    stride: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int
    #: `names.CUDNN_TENSOR_NCHW` or `names.CUDNN_TENSOR_NHWC`, of x and y, and of w.
    x_layout: int = names.CUDNN_TENSOR_NCHW
    w_layout: int = names.CUDNN_TENSOR_NCHW
    #: Whether tensor cores may be used: with float32 they round the inputs to TF32.
    allow_tensor_core: bool = True
    #: Whether only plans that always give the same bits may be used.
    is_deterministic: bool = True
    #: Bytes that every array's address is a multiple of.
    alignment_bytes: int = 16

    @property
    def touched_bytes(self) -> int:
        """Bytes that it reads and writes."""
        itemsize = {"e": 2, "f": 4, "d": 8}[self.dtype_char]
        return itemsize * sum(map(math.prod, (self.x_shape, self.w_shape, self.y_shape)))

    def with_two_axes(self) -> Convolution:
        """Return the same convolution with a spatial axis of 1 added where there is only one."""
        if len(self.pad) != 1:
            return self

        def widened(shape: tuple[int, ...], layout: int) -> tuple[int, ...]:
            place = 2 if layout == names.CUDNN_TENSOR_NCHW else 1
            return (*shape[:place], 1, *shape[place:])

        return replace(
            self,
            x_shape=widened(self.x_shape, self.x_layout),
            w_shape=widened(self.w_shape, self.w_layout),
            y_shape=widened(self.y_shape, self.x_layout),
            pad=(0, *self.pad),
            stride=(1, *self.stride),
            dilation=(1, *self.dilation),
        )

    def label(self) -> str:
        """Return a short description: input, filters, stride and what is not the usual."""
        text = f"{_times(self.x_shape)} * {_times(self.w_shape)}"
        text += f" /{_times(self.stride)} pad {_times(self.pad)}"
        if any(step != 1 for step in self.dilation):
            text += f" dilate {_times(self.dilation)}"
        if self.groups != 1:
            text += f" groups {self.groups}"
        if self.x_layout == names.CUDNN_TENSOR_NHWC:
            text += " nhwc"
        return f"{text} {self.dtype_char}"


class Plan(Protocol):
    """One way to do one convolution on one device. May be run by several threads at a time."""

    @property
    def tag(self) -> str:
        """Name of the plan, the same in every run."""
        ...

    @property
    def workspace_bytes(self) -> int:
        """Bytes of scratch memory; exact once `build` was called."""
        ...

    def build(self, handle: int) -> None:
        """Make it ready to run; do nothing the second time. Raises CudnnError if it cannot."""
        ...

    def execute(self, handle: int, x: int, w: int, y: int, workspace: int) -> None:
        """Enqueue it on the handle's stream. The arguments are device addresses."""
        ...


class PlanSource(Protocol):
    """Lists the plans for a convolution."""

    def propose(self, convolution: Convolution, handle: int) -> Sequence[Plan]:
        """Return plans by expected speed, fastest first; none where there are none."""
        ...


def _times(values: tuple[int, ...]) -> str:
    if len(set(values)) == 1:
        return str(values[0])
    return "×".join(map(str, values))
