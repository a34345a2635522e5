"""Passes over float32 arrays that read and write four elements at a time: ReLU, and a bias.

CuPy's kernels take one element at a time and reach half the bandwidth of an H200; cuDNN's ReLU
three quarters. Of half and double precision, and of arrays at odd addresses, nothing is done here.
"""

from __future__ import annotations

from typing import Any

from dynamemo.cudnn import names
from dynamemo.cudnn.kernels import THREADS, Kernel, arguments, is_aligned

__all__ = ["add_bias", "rectify", "rectify_gradient"]

#: Elements are counted in 32 bits.
_LEAST_TOO_MANY = 1 << 32


def rectify(x: Any, y: Any, mode: int) -> bool:
    """Write the ReLU of `x` into `y`; return False, with nothing done, where it is not for here."""
    addresses = (x.data.ptr, y.data.ptr)
    if not _is_relu(x, mode) or not is_aligned(*addresses):
        return False
    _launch("rectify", x, addresses)
    return True


def rectify_gradient(y: Any, gy: Any, gx: Any, mode: int) -> bool:
    """Write the gradient of a ReLU's input into `gx`, as `rectify` does."""
    addresses = (y.data.ptr, gy.data.ptr, gx.data.ptr)
    if not _is_relu(y, mode) or gy.dtype.char != "f" or not is_aligned(*addresses):
        return False
    _launch("rectify_gradient", y, addresses)
    return True


def add_bias(y: Any, bias: Any, area: int) -> bool:
    """Add ``(c,)`` to ``(n, c, ...)`` of `area` elements a channel, in place, as `rectify` does."""
    addresses = (y.data.ptr, bias.data.ptr)
    if not (_is_for_here(y) and bias.dtype.char == "f") or area & 3 or not is_aligned(addresses[0]):
        return False
    _launch("add_bias", y, addresses, area // 4, bias.size)
    return True


def _is_relu(array: Any, mode: int) -> bool:
    return mode == names.CUDNN_ACTIVATION_RELU and _is_for_here(array)


def _is_for_here(array: Any) -> bool:
    return bool(array.dtype.char == "f" and array.size < _LEAST_TOO_MANY)


def _launch(name: str, array: Any, addresses: tuple[int, ...], *numbers: int) -> None:
    kernel = _kernels.get(name)
    if kernel is None:
        kernel = _kernels[name] = Kernel(name, _SOURCE)
    size = array.size
    blocks = (size // 4 + THREADS) // THREADS
    kernel.launch(array.data.device_id, blocks, arguments(addresses, (size, *numbers)))


_kernels: dict[str, Kernel] = {}

_SOURCE = r"""
// Thread i has the elements from 4i; the one behind the last four has what is left, one by one.
#define PLACE const u32 i = blockIdx.x * THREADS + threadIdx.x, fours = given.numbers[0] / 4
#define FOR_THE_REST if (i == fours) for (u32 k = 4 * fours; k < given.numbers[0]; ++k)

__device__ float rectified(float x) { return x <= 0 ? 0 : x; }
__device__ float passed(float y, float gy) { return y > 0 ? gy : 0; }

extern "C" __global__ void rectify(const Arguments given) {
    PLACE;
    const float* x = given.at[0];
    float* y = given.at[1];
    if (i < fours) {
        float4 four = ((const float4*)x)[i];
        four.x = rectified(four.x);
        four.y = rectified(four.y);
        four.z = rectified(four.z);
        four.w = rectified(four.w);
        ((float4*)y)[i] = four;
    }
    FOR_THE_REST y[k] = rectified(x[k]);
}

extern "C" __global__ void rectify_gradient(const Arguments given) {
    PLACE;
    const float *y = given.at[0], *gy = given.at[1];
    float* gx = given.at[2];
    if (i < fours) {
        const float4 kept = ((const float4*)y)[i];
        float4 four = ((const float4*)gy)[i];
        four.x = passed(kept.x, four.x);
        four.y = passed(kept.y, four.y);
        four.z = passed(kept.z, four.z);
        four.w = passed(kept.w, four.w);
        ((float4*)gx)[i] = four;
    }
    FOR_THE_REST gx[k] = passed(y[k], gy[k]);
}

extern "C" __global__ void add_bias(const Arguments given) {
    PLACE;
    if (i >= fours) return;
    float4* y = (float4*)given.at[0];
    const float bias = given.at[1][i / given.numbers[1] % given.numbers[2]];
    float4 four = y[i];
    y[i] = make_float4(four.x + bias, four.y + bias, four.z + bias, four.w + bias);
}
"""
