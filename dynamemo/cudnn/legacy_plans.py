"""Plans from cuDNN's older interface: one algorithm each, of at most eight for a direction.

The second source, for convolutions that the graph interface has no engine for, and to compare with
it. Here float32 uses TF32 unless the math type forbids it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from dynamemo.cudnn import context, names
from dynamemo.cudnn.errors import CudnnError
from dynamemo.cudnn.library import Descriptor, Library, ffi
from dynamemo.cudnn.plans import Convolution, Direction

__all__ = ["LegacyPlan", "LegacyPlans"]

_RESULTS_AT_MOST = 16
_TENSOR_CORE_MATH = (names.CUDNN_TENSOR_OP_MATH, names.CUDNN_TENSOR_OP_MATH_ALLOW_CONVERSION)
_QUERIES = {
    Direction.FORWARD: "GetConvolutionForwardAlgorithm_v7",
    Direction.DATA: "GetConvolutionBackwardDataAlgorithm_v7",
    Direction.FILTER: "GetConvolutionBackwardFilterAlgorithm_v7",
}


class LegacyPlans:
    """Asks the heuristics of the older interface for algorithms."""

    def __init__(self, library: Library) -> None:
        self._library = library

    def propose(self, convolution: Convolution, handle: int) -> Sequence[LegacyPlan]:
        """Return plans by expected speed; none where cuDNN has none."""
        convolution = convolution.with_two_axes()
        try:
            arrays = _Arrays(self._library, convolution)
            asked = arrays.description(_asked_math(convolution))
            results = self._results(convolution.direction, arrays, asked, handle)
        except CudnnError:
            return ()
        return tuple(
            LegacyPlan(convolution, arrays, result)
            for result in results
            if _is_usable(convolution, result)
        )

    def _results(
        self, direction: Direction, arrays: _Arrays, description: Descriptor, handle: int
    ) -> list[Any]:
        count = ffi.new("int *")
        results = ffi.new("algorithm_t[]", _RESULTS_AT_MOST)
        x, w, y = arrays.x.value, arrays.w.value, arrays.y.value
        first, second, written = {
            Direction.FORWARD: (x, w, y),
            Direction.DATA: (w, y, x),
            Direction.FILTER: (x, y, w),
        }[direction]
        query = getattr(self._library, _QUERIES[direction])
        query(handle, first, second, description.value, written, _RESULTS_AT_MOST, count, results)
        return [results[i] for i in range(count[0])]


class LegacyPlan:
    """One algorithm under one math type. Nothing is left to build."""

    def __init__(self, convolution: Convolution, arrays: _Arrays, result: Any) -> None:
        math_type = result.math_type if convolution.allow_tensor_core else names.CUDNN_FMA_MATH
        self.tag = f"algorithm {result.algorithm} math {math_type}"
        self.workspace_bytes = int(result.memory)
        self._direction = convolution.direction
        self._arrays = arrays
        self._description = arrays.description(math_type)
        self._algorithm = int(result.algorithm)
        self._one = context.ONE[convolution.dtype_char]
        self._zero = context.ZERO[convolution.dtype_char]
        library = arrays.library
        self._function = {
            Direction.FORWARD: library.ConvolutionForward,
            Direction.DATA: library.ConvolutionBackwardData,
            Direction.FILTER: library.ConvolutionBackwardFilter,
        }[convolution.direction]

    def build(self, handle: int) -> None:
        """Do nothing."""

    def execute(self, handle: int, x: int, w: int, y: int, workspace: int) -> None:
        """Enqueue the algorithm."""
        arrays = self._arrays
        x_pair, w_pair, y_pair = (arrays.x.value, x), (arrays.w.value, w), (arrays.y.value, y)
        if self._direction is Direction.FORWARD:
            read, written = (*x_pair, *w_pair), y_pair
        elif self._direction is Direction.DATA:
            read, written = (*w_pair, *y_pair), x_pair
        else:
            read, written = (*x_pair, *y_pair), w_pair
        self._function(
            handle,
            self._one,
            *read,
            self._description.value,
            self._algorithm,
            workspace,
            self.workspace_bytes,
            self._zero,
            *written,
        )


class _Arrays:
    """The descriptors of a convolution's three arrays, and of the convolution."""

    def __init__(self, library: Library, convolution: Convolution) -> None:
        dtype = _Dtype(convolution.dtype_char)
        self.library = library
        self.x = context.tensor_descriptor(dtype, convolution.x_shape, convolution.x_layout)
        self.y = context.tensor_descriptor(dtype, convolution.y_shape, convolution.x_layout)
        self.w = context.filter_descriptor(dtype, convolution.w_shape, convolution.w_layout)
        self._convolution = convolution
        self._descriptions: dict[int, Descriptor] = {}

    def description(self, math_type: int) -> Descriptor:
        """Return the descriptor of pads, strides and the like under a math type."""
        description = self._descriptions.get(math_type)
        if description is None:
            description = new_convolution_descriptor(
                self.library,
                self._convolution.pad,
                self._convolution.stride,
                dilation=self._convolution.dilation,
                groups=self._convolution.groups,
                dtype_char=self._convolution.dtype_char,
                math_type=math_type,
            )
            self._descriptions[math_type] = description
        return description


class _Dtype:
    """What `context` reads of a dtype."""

    __slots__ = ("char",)

    def __init__(self, char: str) -> None:
        self.char = char


def new_convolution_descriptor(
    library: Library,
    pad: tuple[int, ...],
    stride: tuple[int, ...],
    *,
    dilation: tuple[int, ...],
    groups: int,
    dtype_char: str,
    math_type: int,
    mode: int = names.CUDNN_CROSS_CORRELATION,
) -> Descriptor:
    """Return a new descriptor of a convolution in the older interface."""
    descriptor = library.create("Convolution")
    compute_type = names.CUDNN_DATA_DOUBLE if dtype_char == "d" else names.CUDNN_DATA_FLOAT
    library.SetConvolutionNdDescriptor(
        descriptor.value,
        len(pad),
        context.ints(pad),
        context.ints(stride),
        context.ints(dilation),
        mode,
        compute_type,
    )
    library.SetConvolutionGroupCount(descriptor.value, groups)
    library.SetConvolutionMathType(descriptor.value, math_type)
    return descriptor


def _asked_math(convolution: Convolution) -> int:
    if not convolution.allow_tensor_core:
        return names.CUDNN_FMA_MATH
    return names.CUDNN_TENSOR_OP_MATH if convolution.dtype_char == "e" else names.CUDNN_DEFAULT_MATH


def _is_usable(convolution: Convolution, result: Any) -> bool:
    if result.status or (convolution.is_deterministic and not result.determinism):
        return False
    return convolution.allow_tensor_core or result.math_type not in _TENSOR_CORE_MATH
