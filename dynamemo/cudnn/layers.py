"""Pooling, softmax and activations, with the signatures that Chainer calls."""

from __future__ import annotations

import math
from typing import Any

from dynamemo.cudnn import context, elementwise, max_pooling_gradient, names, settings
from dynamemo.cudnn.errors import CudnnError, NoPlanError
from dynamemo.cudnn.library import Descriptor

__all__ = [
    "activation_backward",
    "activation_forward",
    "create_activation_descriptor",
    "create_pooling_descriptor",
    "pooling_backward",
    "pooling_forward",
    "softmax_backward",
    "softmax_forward",
]


def pooling_forward(
    x: Any,
    y: Any,
    ksize: tuple[int, ...],
    stride: tuple[int, ...],
    pad: tuple[int, ...],
    mode: int,
) -> Any:
    """Write the pooling of `x`, ``(n, c, ...)``, into `y`, and return it.

    Raises
    ------
    NoPlanError
        If cuDNN does not do such a pooling; nothing was written.
    """
    x = context.contiguous(x)
    handle = context.get_handle()
    pooling = _pooling(tuple(ksize), tuple(stride), tuple(pad), mode)
    x_descriptor = context.tensor_descriptor(x.dtype, x.shape)
    y_descriptor = context.tensor_descriptor(y.dtype, y.shape)
    try:
        context.library.PoolingForward(
            *(handle, pooling.value, context.ONE[x.dtype.char], x_descriptor.value, x.data.ptr),
            *(context.ZERO[x.dtype.char], y_descriptor.value, y.data.ptr),
        )
    except CudnnError as error:
        if error.is_refusal:
            raise NoPlanError(f"cuDNN does no pooling from {x.shape} to {y.shape}") from error
        raise
    return y


def pooling_backward(
    x: Any,
    y: Any,
    gy: Any,
    ksize: tuple[int, ...],
    stride: tuple[int, ...],
    pad: tuple[int, ...],
    mode: int,
) -> Any:
    """Return the gradient of the input of a pooling.

    Where several elements of a window are its maximum, the first gets the gradient.
    """
    x, y, gy = context.contiguous(x), context.contiguous(y), context.contiguous(gy)
    gx = context.cupy.empty(x.shape, x.dtype)
    if max_pooling_gradient.write(x, gy, gx, (*ksize, *stride, *pad), mode):
        return gx
    handle = context.get_handle()
    pooling = _pooling(tuple(ksize), tuple(stride), tuple(pad), mode)
    x_value = context.tensor_descriptor(x.dtype, x.shape).value
    y_value = context.tensor_descriptor(y.dtype, y.shape).value
    context.library.PoolingBackward(
        *(handle, pooling.value, context.ONE[x.dtype.char], y_value, y.data.ptr),
        *(y_value, gy.data.ptr, x_value, x.data.ptr, context.ZERO[x.dtype.char]),
        *(x_value, gx.data.ptr),
    )
    return gx


def create_pooling_descriptor(
    ksize: tuple[int, ...], stride: tuple[int, ...], pad: tuple[int, ...], mode: int
) -> Descriptor:
    """Return a new descriptor of a pooling."""
    if not len(ksize) == len(stride) == len(pad):
        raise ValueError(f"ksize {ksize}, stride {stride} and pad {pad} differ in length")
    descriptor: Descriptor = context.library.create("Pooling")
    context.library.SetPoolingNdDescriptor(
        *(descriptor.value, mode, names.CUDNN_PROPAGATE_NAN, len(ksize)),
        *(context.ints(ksize), context.ints(pad), context.ints(stride)),
    )
    return descriptor


def _pooling(
    ksize: tuple[int, ...], stride: tuple[int, ...], pad: tuple[int, ...], mode: int
) -> Descriptor:
    if mode == names.CUDNN_POOLING_MAX and not settings.current.nondeterministic:
        # Where windows overlap, the other adds gradients up in any order.
        mode = names.CUDNN_POOLING_MAX_DETERMINISTIC
    key = ("pooling", ksize, stride, pad, mode)
    return context.cached(key, lambda: create_pooling_descriptor(ksize, stride, pad, mode))


def softmax_forward(x: Any, axis: int, algorithm: int) -> Any:
    """Return the softmax, or its logarithm, along an axis."""
    x = context.contiguous(x)
    y = context.cupy.empty(x.shape, x.dtype)
    if not x.size:
        return y
    handle = context.get_handle()
    value = _along(x, axis).value
    context.library.SoftmaxForward(
        *(handle, algorithm, names.CUDNN_SOFTMAX_MODE_CHANNEL, context.ONE[x.dtype.char]),
        *(value, x.data.ptr, context.ZERO[x.dtype.char], value, y.data.ptr),
    )
    return y


def softmax_backward(y: Any, gy: Any, axis: int, algorithm: int) -> Any:
    """Return the gradient of the input of a softmax, from its output."""
    y, gy = context.contiguous(y), context.contiguous(gy)
    gx = context.cupy.empty(y.shape, y.dtype)
    if not y.size:
        return gx
    handle = context.get_handle()
    value = _along(y, axis).value
    context.library.SoftmaxBackward(
        *(handle, algorithm, names.CUDNN_SOFTMAX_MODE_CHANNEL, context.ONE[y.dtype.char]),
        *(value, y.data.ptr, value, gy.data.ptr, context.ZERO[y.dtype.char], value, gx.data.ptr),
    )
    return gx


def _along(array: Any, axis: int) -> Descriptor:
    """Return the descriptor of the array with that axis as the channels."""
    shape = array.shape
    axis %= len(shape)
    merged = (math.prod(shape[:axis]), shape[axis], math.prod(shape[axis + 1 :]), 1)
    return context.tensor_descriptor(array.dtype, merged)


def activation_forward(x: Any, mode: int, coef: float = 0.0) -> Any:
    """Return an activation of every element."""
    x = context.contiguous(x)
    y = context.cupy.empty(x.shape, x.dtype)
    if not x.size or elementwise.rectify(x, y, mode):
        return y
    handle = context.get_handle()
    value = _flat(x).value
    context.library.ActivationForward(
        *(handle, _activation(mode, coef).value, context.ONE[x.dtype.char], value, x.data.ptr),
        *(context.ZERO[x.dtype.char], value, y.data.ptr),
    )
    return y


def activation_backward(x: Any, y: Any, gy: Any, mode: int, coef: float = 0.0) -> Any:
    """Return the gradient of the input of an activation."""
    x, y, gy = context.contiguous(x), context.contiguous(y), context.contiguous(gy)
    gx = context.cupy.empty(x.shape, x.dtype)
    if not y.size or elementwise.rectify_gradient(y, gy, gx, mode):
        return gx
    handle = context.get_handle()
    value = _flat(x).value
    context.library.ActivationBackward(
        *(handle, _activation(mode, coef).value, context.ONE[x.dtype.char], value, y.data.ptr),
        *(value, gy.data.ptr, value, x.data.ptr, context.ZERO[x.dtype.char]),
        *(value, gx.data.ptr),
    )
    return gx


def create_activation_descriptor(
    mode: int, nan_prop_mode: int = names.CUDNN_PROPAGATE_NAN, coef: float = 0.0
) -> Descriptor:
    """Return a new descriptor of an activation; `coef` is the limit of a clipped ReLU."""
    descriptor: Descriptor = context.library.create("Activation")
    context.library.SetActivationDescriptor(descriptor.value, mode, nan_prop_mode, coef)
    return descriptor


def _activation(mode: int, coef: float) -> Descriptor:
    key = ("activation", mode, coef)
    return context.cached(key, lambda: create_activation_descriptor(mode, coef=coef))


def _flat(array: Any) -> Descriptor:
    """Return the descriptor of the array's elements in any shape with four axes."""
    shape = array.shape
    first = shape[0] if shape else 1
    return context.tensor_descriptor(array.dtype, (first, array.size // first, 1, 1))
