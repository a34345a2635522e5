"""Convolution, its two gradients, and deconvolution, with the signatures that Chainer calls.

Any number of spatial axes; channels second or last, as a layout says. Which plan does the work is
the matter of `running`.
"""

from __future__ import annotations

from typing import Any

from dynamemo.cudnn import context, elementwise, names, settings
from dynamemo.cudnn.running import run

__all__ = ["convolution_backward_data", "convolution_backward_filter", "convolution_forward"]


def convolution_forward(
    x: Any,
    W: Any,  # noqa: N803  as in CuPy, from where Chainer knows the names
    b: Any,
    y: Any,
    pad: tuple[int, ...],
    stride: tuple[int, ...],
    dilation: tuple[int, ...],
    groups: int,
    *,
    auto_tune: bool,
    tensor_core: bool | str,
    d_layout: int = names.CUDNN_TENSOR_NCHW,
    w_layout: int = names.CUDNN_TENSOR_NCHW,
) -> None:
    """Write the convolution of `x` with `W`, plus `b` where it is given, into `y`.

    Parameters
    ----------
    x, W, y : cupy.ndarray
        ``(n, c, h, w)``, ``(o, c / groups, kh, kw)`` and ``(n, o, oh, ow)``, or with the channels
        last where a layout says so. Any number of spatial axes.
    b : cupy.ndarray or None
        ``(o,)``.
    auto_tune : bool
        Measure the candidates at the first call, which waits for the device; not under Chainer's
        `cudnn_deterministic`.
    tensor_core : bool or str
        Chainer's `use_cudnn_tensor_core`.

    Raises
    ------
    NoPlanError
        If cuDNN has no plan; nothing was written.
    """
    # Chainer knows of no switch for this direction: its algorithms always were deterministic.
    flags = (True, settings.is_tuned(auto_tune), tensor_core)
    shape = (pad, stride, dilation, groups, d_layout, w_layout)
    run("forward", (context.contiguous(x), context.contiguous(W), y), shape, flags)
    if b is not None:
        _add_bias(y, b, d_layout)


def convolution_backward_filter(
    x: Any,
    gy: Any,
    gW: Any,  # noqa: N803
    pad: tuple[int, ...],
    stride: tuple[int, ...],
    dilation: tuple[int, ...],
    groups: int,
    *,
    deterministic: bool,
    auto_tune: bool,
    tensor_core: bool | str,
    d_layout: int = names.CUDNN_TENSOR_NCHW,
    w_layout: int = names.CUDNN_TENSOR_NCHW,
) -> None:
    """Write the gradient of the filters into `gW`. See `convolution_forward`."""
    flags = (bool(deterministic), settings.is_tuned(auto_tune), tensor_core)
    shape = (pad, stride, dilation, groups, d_layout, w_layout)
    run("filter", (context.contiguous(x), gW, context.contiguous(gy)), shape, flags)


def convolution_backward_data(
    W: Any,  # noqa: N803
    x: Any,
    b: Any,
    y: Any,
    pad: tuple[int, ...],
    stride: tuple[int, ...],
    dilation: tuple[int, ...],
    groups: int,
    *,
    deterministic: bool,
    auto_tune: bool,
    tensor_core: bool | str,
    d_layout: int = names.CUDNN_TENSOR_NCHW,
    w_layout: int = names.CUDNN_TENSOR_NCHW,
) -> None:
    """Write the deconvolution of `x` with `W`, plus `b` where it is given, into `y`.

    It is the gradient of a convolution's input; `x` is then the gradient of its output.
    See `convolution_forward`.
    """
    flags = (bool(deterministic), settings.is_tuned(auto_tune), tensor_core)
    shape = (pad, stride, dilation, groups, d_layout, w_layout)
    run("data", (y, context.contiguous(W), context.contiguous(x)), shape, flags)
    if b is not None:
        _add_bias(y, b, d_layout)


def _add_bias(y: Any, bias: Any, layout: int) -> None:
    """Add ``(c,)`` to every pixel of `y`, in place."""
    channels = bias.size
    area = 1 if layout == names.CUDNN_TENSOR_NHWC else y.size // (y.shape[0] * channels)
    bias = context.contiguous(bias)
    if elementwise.add_bias(y, bias, area):
        return
    # Divisions in 32 bits hide behind the memory traffic, those in 64 bits would not.
    kernel = _bias_kernel("long long" if y.size >> 32 else "unsigned int")
    kernel(y, bias, area, channels, y)


def _bias_kernel(index_type: str) -> Any:
    kernel = _bias_kernels.get(index_type)
    if kernel is None:
        kernel = _bias_kernels[index_type] = context.cupy.ElementwiseKernel(
            "T x, raw T bias, int64 area, int64 channels",
            "T y",
            f"y = x + bias[({index_type})i / ({index_type})area % ({index_type})channels]",
            "dynamemo_add_bias",
        )
    return kernel


_bias_kernels: dict[str, Any] = {}
