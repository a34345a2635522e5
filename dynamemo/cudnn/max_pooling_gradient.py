"""The gradient of max pooling over two axes: each element of the input gathers what is its own.

cuDNN's deterministic kernel takes about ten times as long as the memory traffic. Here every element
looks at the few windows that it is in, and takes the gradient of those whose first maximum it is.

1. The same bits each time: the windows of an element are added up in one order, without atomics.
2. Ties are as in Chainer's own path: the first maximum of a window gets its gradient.
"""

from __future__ import annotations

from typing import Any

import numpy

from dynamemo.cudnn import context, names

__all__ = ["can_do", "write"]

_MODES = (names.CUDNN_POOLING_MAX, names.CUDNN_POOLING_MAX_DETERMINISTIC)


def can_do(x: Any, mode: int) -> bool:
    """Tell whether the gradient of a pooling of `x`, ``(n, c, ...)``, is worked out here."""
    return x.ndim == 4 and mode in _MODES and x.size < 1 << 31


def write(x: Any, y: Any, gy: Any, gx: Any, *, window: tuple[int, ...]) -> None:
    """Write the gradient of `x` into `gx`.

    Parameters
    ----------
    x, y, gy, gx : cupy.ndarray
        ``(n, c, h, w)``, C-contiguous.
    window : tuple of int
        Height and width of the window, of its steps, and of the pad.
    """
    extents = map(numpy.int32, (*x.shape[2:], *y.shape[2:], *window))
    _kernel("double" if x.dtype.char == "d" else "float")(x, y, gy, *extents, gx)


def _kernel(sum_type: str) -> Any:
    """Return the kernel that compares and adds up in a type: for half precision in single."""
    kernel = _kernels.get(sum_type)
    if kernel is None:
        kernel = _kernels[sum_type] = context.cupy.ElementwiseKernel(
            "raw T x, raw T y, raw T gy, int32 h, int32 w, int32 oh, int32 ow, "
            "int32 kh, int32 kw, int32 sy, int32 sx, int32 ph, int32 pw",
            "T gx",
            f"typedef {sum_type} A;{_OPERATION}",
            "dynamemo_max_pooling_gradient",
        )
    return kernel


_kernels: dict[str, Any] = {}

_OPERATION = """
const int place = i;
const int plane = place / (h * w);
const int row = place / w - plane * h;
const int column = place - (plane * h + row) * w;
const int x_plane = plane * h * w;
const int y_plane = plane * oh * ow;
const A value = static_cast<A>(x[place]);
const int top = row + ph < kh ? 0 : (row + ph - kh) / sy + 1;
const int bottom = min(oh, (row + ph) / sy + 1);
const int left = column + pw < kw ? 0 : (column + pw - kw) / sx + 1;
const int right = min(ow, (column + pw) / sx + 1);
A sum = 0;
for (int oy = top; oy < bottom; ++oy) {
    for (int ox = left; ox < right; ++ox) {
        const int window = y_plane + oy * ow + ox;
        const A most = static_cast<A>(y[window]);
        if (!(most == value || (most != most && value != value))) continue;
        const int first_column = max(0, ox * sx - pw);
        const int end_column = min(w, ox * sx - pw + kw);
        bool is_first = true;
        for (int r = max(0, oy * sy - ph); is_first && r <= row; ++r) {
            const int end = r == row ? column : end_column;
            for (int c = first_column; is_first && c < end; ++c) {
                const A other = static_cast<A>(x[x_plane + r * w + c]);
                is_first = !(other == most || (other != other && most != most));
            }
        }
        if (is_first) sum += static_cast<A>(gy[window]);
    }
}
gx = static_cast<T>(sum);
"""
