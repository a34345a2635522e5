"""What Chainer meets in place of cuDNN: its functions, with the memory and seconds they take.

Arrays are made in the order in which `dynamemo.cudnn` makes them, workspaces included, so that
memory is short at the same moments.
"""

from __future__ import annotations

import math
import types
from typing import Any

import numpy

from benchmarks.rehearsing.gpu import present
from benchmarks.rehearsing.phantom import Phantom, new, written
from dynamemo.cudnn import names, settings

#: What the plans ask for that cuDNN 9 puts first on an H200, measured at ResNet-50, batch 64, for
#: each layer and direction (`benchmarks.convolution --workspaces`): 1×1 convolutions of stride 1
#: are matrix products and ask for next to nothing, or for that many partial sums of a filter's
#: gradient; all others copy what they read and write into another layout.
_POINTWISE_WORKSPACE_BYTES = 400
_PARTIAL_FILTERS = 64


def _convolve(x: Any, w: Any, y: Any, stride: Any, *, is_filter: bool = False) -> None:
    """Take a workspace and the time of a convolution from `x` to `y`, in whichever direction."""
    gpu = present()
    nbytes = x.nbytes + w.nbytes + y.nbytes
    if w.shape[2:] == stride == (1,) * (w.ndim - 2):
        workspace_bytes = _PARTIAL_FILTERS * w.nbytes if is_filter else _POINTWISE_WORKSPACE_BYTES
        rate = gpu.roofline.pointwise_flops_per_s
    else:
        workspace_bytes = nbytes
        rate = gpu.roofline.convolution_flops_per_s
    workspace_bytes = min(workspace_bytes, int(settings.current.limit_bytes(nbytes)))
    _take_workspace(workspace_bytes)
    gpu.work(nbytes + 2 * workspace_bytes, 2.0 * y.size * math.prod(w.shape[1:]), rate)


def _take_workspace(nbytes: int) -> None:
    """Take memory and give it back, as `dynamemo.cudnn.running` does: with a second try."""
    try:
        new(nbytes, numpy.uint8)
    except MemoryError:
        if not settings.make_room():
            raise
        new(nbytes, numpy.uint8)


def convolution_forward(
    x: Any, w: Any, b: Any, y: Any, pad: Any, stride: Any, *_: Any, **__: Any
) -> None:
    """Write `y`."""
    _convolve(x, w, y, tuple(stride))
    if b is not None:
        written(y, reads=1)


def convolution_backward_filter(
    x: Any, gy: Any, gw: Any, pad: Any, stride: Any, *_: Any, **__: Any
) -> None:
    """Write `gw`."""
    _convolve(x, gw, gy, tuple(stride), is_filter=True)


def convolution_backward_data(
    w: Any, x: Any, b: Any, y: Any, pad: Any, stride: Any, *_: Any, **__: Any
) -> None:
    """Write `y`, which is the input of the convolution that this is the gradient of."""
    _convolve(y, w, x, tuple(stride))
    if b is not None:
        written(y, reads=1)


def batch_normalization_forward_training_ex(
    x: Any, gamma: Any, beta: Any, running_mean: Any, running_var: Any, mean: Any, inv_std: Any,
    *_: Any, **__: Any
) -> tuple[Any, Any, Any, Any]:  # fmt: skip
    """Return no reserve memory, the output, the mean and the inverse deviation."""
    y = new(x.shape, x.dtype)
    mean = new(gamma.shape, gamma.dtype) if mean is None else mean
    inv_std = new(gamma.shape, gamma.dtype) if inv_std is None else inv_std
    return None, written(y, reads=1), mean, inv_std


def batch_normalization_backward(
    x: Any, gamma: Any, gy: Any, *_: Any, **__: Any
) -> tuple[Any, Any, Any]:
    """Return the three gradients."""
    gx = new(x.shape, x.dtype)
    ggamma, gbeta = new(gamma.shape, gamma.dtype), new(gamma.shape, gamma.dtype)
    return written(gx, reads=2), ggamma, gbeta


def batch_normalization_forward_inference(x: Any, *_: Any, **__: Any) -> Any:
    """Return the output."""
    return written(new(x.shape, x.dtype), reads=1)


def activation_forward(x: Any, *_: Any, **__: Any) -> Any:
    """Return the output."""
    return written(new(x.shape, x.dtype), reads=1)


def activation_backward(x: Any, y: Any, gy: Any, *_: Any, **__: Any) -> Any:
    """Return the gradient."""
    return written(new(x.shape, x.dtype), reads=2)


def pooling_forward(x: Any, y: Any, *_: Any, **__: Any) -> Any:
    """Write and return `y`."""
    present().work(x.nbytes + y.nbytes)
    return y


def pooling_backward(x: Any, y: Any, gy: Any, *_: Any, **__: Any) -> Any:
    """Return the gradient."""
    present().work(2 * x.nbytes + gy.nbytes)
    return new(x.shape, x.dtype)


def softmax_forward(x: Any, *_: Any, **__: Any) -> Any:
    """Return the output."""
    return written(new(x.shape, x.dtype), reads=1)


def softmax_backward(y: Any, gy: Any, *_: Any, **__: Any) -> Any:
    """Return the gradient."""
    return written(new(y.shape, y.dtype), reads=2)


class DropoutStates:
    """What draws. It keeps a byte an element, and has the numbers it draws while it does."""

    def __init__(self, *_: Any) -> None:
        pass

    def forward(self, handle: Any, x: Any, ratio: float) -> tuple[Any, Any]:
        """Return which elements stayed, and the output."""
        drawn = written(new(x.shape, numpy.float32))
        is_kept = new(x.shape, numpy.bool_)
        y = new(x.shape, x.dtype)
        present().work(drawn.nbytes + x.nbytes + is_kept.nbytes + y.nbytes)
        return is_kept, y

    def backward(self, handle: Any, gy: Any, ratio: float, states: Phantom) -> Any:
        """Return the gradient."""
        return written(new(gy.shape, gy.dtype), reads=1)


VERSION = 91900

libcudnn = types.SimpleNamespace(
    **{name: value for name, value in vars(names).items() if name.startswith("CUDNN_")},
    getVersion=lambda: VERSION,
    get_build_version=lambda: VERSION,
)
cudnn = types.SimpleNamespace(
    activation_backward=activation_backward,
    activation_forward=activation_forward,
    batch_normalization_backward=batch_normalization_backward,
    batch_normalization_forward_inference=batch_normalization_forward_inference,
    batch_normalization_forward_training_ex=batch_normalization_forward_training_ex,
    convolution_backward_data=convolution_backward_data,
    convolution_backward_filter=convolution_backward_filter,
    convolution_forward=convolution_forward,
    pooling_backward=pooling_backward,
    pooling_forward=pooling_forward,
    softmax_backward=softmax_backward,
    softmax_forward=softmax_forward,
    is_tensor_core_available=lambda dtype: dtype.char == "e",
    get_max_workspace_size=settings.get_max_workspace_size,
    set_max_workspace_size=settings.set_max_workspace_size,
    DropoutStates=DropoutStates,
)
