"""The gradient of max pooling over two axes: each element of the input gathers what is its own.

cuDNN's deterministic kernel takes ten times as long as the memory traffic. Here a block first finds
where the maximum of each window is, for some rows of one plane or for several planes, and then lets
every element take the gradients of the windows whose maximum it is.

Covers float32. What it does not cover is left to cuDNN.

1. The same bits each time: the windows of an element are added up in one order, without atomics.
2. Ties are as in Chainer's own path: the first maximum of a window gets its gradient.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

from dynamemo.cudnn import names
from dynamemo.cudnn.kernels import Kernel, arguments

__all__ = ["Share", "share_of", "write"]

_MODES = (names.CUDNN_POOLING_MAX, names.CUDNN_POOLING_MAX_DETERMINISTIC)
#: Elements of the input that a block should have.
_WORTH_A_BLOCK = 4096
#: Bytes of shared memory that a block may take without asking for more than usual.
_MOST_SHARED_BYTES = 40 << 10


@dataclass(frozen=True, slots=True)
class Share:
    """What of the input a block works on."""

    #: Rows of a plane, and planes; several only where the rows are all that a plane has.
    rows: int
    planes: int
    #: Windows that touch those rows, at most.
    windows: int

    @property
    def shared_bytes(self) -> int:
        """Bytes of shared memory: of each window, where its maximum is, and its gradient."""
        return self.windows * 8


@functools.lru_cache(maxsize=1024)
def share_of(h: int, w: int, oh: int, ow: int, window: tuple[int, ...]) -> Share | None:
    """Share the input out; None where even one row has too many windows.

    Examples
    --------
    >>> share_of(112, 112, 56, 56, (3, 3, 2, 2, 0, 0))
    Share(rows=36, planes=1, windows=1120)
    >>> share_of(14, 14, 7, 7, (2, 2, 2, 2, 0, 0))
    Share(rows=14, planes=20, windows=980)
    """
    kh, _, sy, *_ = window

    def windows(rows: int) -> int:
        return min(oh, (rows + kh - 2) // sy + 2) * ow

    rows = max(1, min(h, _WORTH_A_BLOCK // w))
    while rows > 1 and windows(rows) * 8 > _MOST_SHARED_BYTES:
        rows //= 2
    if windows(rows) * 8 > _MOST_SHARED_BYTES:
        return None
    if rows < h:
        return Share(rows, 1, windows(rows))
    planes = max(1, min(_WORTH_A_BLOCK // (h * w), _MOST_SHARED_BYTES // (8 * oh * ow)))
    return Share(h, planes, oh * ow * planes)


def write(x: Any, gy: Any, gx: Any, window: tuple[int, ...], mode: int) -> bool:
    """Write the gradient of `x` into `gx`; return False, with nothing done, for what is cuDNN's.

    Parameters
    ----------
    x, gy, gx : cupy.ndarray
        ``(n, c, h, w)``, C-contiguous.
    window : tuple of int
        Height and width of the window, of its steps, and of the pad.
    mode : int
        ``CUDNN_POOLING_MAX`` or another.
    """
    if x.ndim != 4 or x.dtype.char != "f" or mode not in _MODES or not gx.size or not gy.size:
        return False
    extents = (*x.shape[2:], *gy.shape[2:])
    share = share_of(*extents, window)
    if share is None:
        return False
    planes = x.shape[0] * x.shape[1]
    bands = -(-extents[0] // share.rows)
    numbers = (*extents, *window, share.rows, share.planes, planes)
    given = arguments((x.data.ptr, gy.data.ptr, gx.data.ptr), numbers)
    blocks = -(-planes // share.planes) * bands
    _get_kernel().launch(x.data.device_id, blocks, given, shared_bytes=share.shared_bytes)
    return True


def _get_kernel() -> Kernel:
    if not _kernels:
        _kernels.append(Kernel("max_pooling_gradient", _SOURCE))
    return _kernels[0]


_kernels: list[Kernel] = []

_SOURCE = r"""
extern "C" __global__ void max_pooling_gradient(const Arguments given) {
    extern __shared__ int chosen[];
    const int *n = (const int*)given.numbers, h = n[0], w = n[1], oh = n[2], ow = n[3];
    const int kh = n[4], kw = n[5], sy = n[6], sx = n[7], ph = n[8], pw = n[9];
    const int bands = (h + n[10] - 1) / n[10];
    const int first_plane = blockIdx.x / bands * n[11];
    const int planes = min(n[11], n[12] - first_plane);
    const int first_row = blockIdx.x % bands * n[10], rows = min(n[10], h - first_row);
    const int top = first_row + ph < kh ? 0 : (first_row + ph - kh) / sy + 1;
    const int bottom = min(oh, (first_row + rows - 1 + ph) / sy + 1);
    const int windows = max(bottom - top, 0) * ow;
    float* gradients = (float*)(chosen + windows * planes);
    const float* x = given.at[0] + (size_t)first_plane * h * w;
    const float* gy = given.at[1] + (size_t)first_plane * oh * ow;
    float* gx = given.at[2] + (size_t)first_plane * h * w;

    for (int i = threadIdx.x; i < windows * planes; i += THREADS) {
        const int plane = i / windows, window = i - plane * windows;
        const int oy = top + window / ow, ox = window % ow;
        const int end_row = min(h, oy * sy - ph + kh);
        const int left = max(0, ox * sx - pw), right = min(w, ox * sx - pw + kw);
        int place = -1;
        float most = 0;
        for (int row = max(0, oy * sy - ph); row < end_row; ++row)
            for (int column = left; column < right; ++column) {
                const float value = x[((size_t)plane * h + row) * w + column];
                if (place < 0 || value > most || (value != value && most == most)) {
                    place = row * w + column;
                    most = value;
                }
            }
        chosen[i] = place;
        gradients[i] = gy[(size_t)plane * oh * ow + top * ow + window];
    }
    __syncthreads();

    const int elements = rows * w;
    for (int i = threadIdx.x; i < elements * planes; i += THREADS) {
        const int plane = i / elements, element = i - plane * elements;
        const int row = first_row + element / w, column = element % w;
        const int first_y = row + ph < kh ? 0 : (row + ph - kh) / sy + 1;
        const int end_y = min(oh, (row + ph) / sy + 1);
        const int first_x = column + pw < kw ? 0 : (column + pw - kw) / sx + 1;
        const int end_x = min(ow, (column + pw) / sx + 1);
        float sum = 0;
        for (int oy = first_y; oy < end_y; ++oy)
            for (int ox = first_x; ox < end_x; ++ox) {
                const int window = plane * windows + (oy - top) * ow + ox;
                if (chosen[window] == row * w + column) sum += gradients[window];
            }
        gx[((size_t)plane * h + row) * w + column] = sum;
    }
}
"""
