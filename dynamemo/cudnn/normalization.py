"""BatchNormalization: training, inference and backward, with the signatures that Chainer calls.

Half-precision arrays are normalised with statistics and parameters in single precision, which is
what cuDNN takes: others are converted on the way in, and running statistics back on the way out.
"""

from __future__ import annotations

from typing import Any

from dynamemo.cudnn import context, names, resident_normalization
from dynamemo.cudnn.library import Descriptor

__all__ = [
    "batch_normalization_backward",
    "batch_normalization_forward_inference",
    "batch_normalization_forward_training",
    "batch_normalization_forward_training_ex",
]

_ONLY_NORMALIZE = names.CUDNN_BATCHNORM_OPS_BN


def batch_normalization_forward_training(
    x: Any,
    gamma: Any,
    beta: Any,
    running_mean: Any,
    running_var: Any,
    mean: Any,
    inv_std: Any,
    eps: float,
    decay: float,
    is_for_conv2d: bool,
    cudnn_mode: int,
    debug: bool,
    d_layout: int = names.CUDNN_TENSOR_NCHW,
) -> tuple[Any, Any, Any]:
    """Normalise by the statistics of the batch; see `batch_normalization_forward_training_ex`.

    Returns
    -------
    tuple of cupy.ndarray
        The output, the mean, and the inverse of the standard deviation.
    """
    # Whoever calls this one cannot hand the reserve space on, so the mode that needs none is taken.
    if cudnn_mode == names.CUDNN_BATCHNORM_SPATIAL_PERSISTENT:
        cudnn_mode = names.CUDNN_BATCHNORM_SPATIAL
    return batch_normalization_forward_training_ex(
        *(x, gamma, beta, running_mean, running_var, mean, inv_std),
        *(eps, decay, is_for_conv2d, cudnn_mode, debug),
        d_layout=d_layout,
    )[1:]


def batch_normalization_forward_training_ex(
    x: Any,
    gamma: Any,
    beta: Any,
    running_mean: Any,
    running_var: Any,
    mean: Any,
    inv_std: Any,
    eps: float,
    decay: float,
    is_for_conv2d: bool,
    cudnn_mode: int,
    debug: bool,
    d_layout: int = names.CUDNN_TENSOR_NCHW,
) -> tuple[Any, Any, Any, Any]:
    """Normalise by the statistics of the batch, and update the running ones in place.

    Parameters
    ----------
    x : cupy.ndarray
        ``(n, c, h, w)``, or ``(n, h, w, c)`` under NHWC; without `is_for_conv2d` ``(..., c)``.
    gamma, beta, running_mean, running_var : cupy.ndarray
        ``(c,)``.
    mean, inv_std : cupy.ndarray or None
        Where the statistics of the batch are written; new arrays if None.
    decay : float
        Share of the running statistics that stays.
    debug : bool
        Means nothing any more.

    Returns
    -------
    tuple
        Reserve memory or None, the output, the mean, and the inverse of the standard deviation.
    """
    x = context.contiguous(x)
    y = context.cupy.empty(x.shape, x.dtype)
    wide = _parameter_dtype(x.dtype)
    parameters = _converted(gamma, wide), _converted(beta, wide)
    running = _converted(running_mean, wide), _converted(running_var, wide)
    mean = context.cupy.empty(parameters[0].shape, wide) if mean is None else mean
    inv_std = context.cupy.empty(parameters[0].shape, wide) if inv_std is None else inv_std
    arrays = (x, y, parameters, running, (mean, inv_std))
    form = (is_for_conv2d, cudnn_mode, d_layout)
    reserve = None
    if resident_normalization.can_do(x, *form):
        resident_normalization.forward(*arrays, eps=eps, share=1.0 - decay)
    else:
        reserve = _forward(*arrays, eps=eps, share=1.0 - decay, form=form)
    for array, now in zip((running_mean, running_var), running, strict=True):
        if now is not array:
            array[...] = now
    return reserve, y, mean, inv_std


def _forward(
    x: Any,
    y: Any,
    parameters: tuple[Any, Any],
    running: tuple[Any, Any],
    saved: tuple[Any, Any],
    *,
    eps: float,
    share: float,
    form: tuple[bool, int, int],
) -> Any:
    """Let cuDNN do what `resident_normalization.forward` does; return reserve memory or None."""
    handle = context.get_handle()
    _, mode, _ = form
    descriptor, derived = (owner.value for owner in _descriptors(x, *form))
    scales = context.ONE[x.dtype.char], context.ZERO[x.dtype.char]
    rest = (
        *(derived, *(array.data.ptr for array in parameters), share),
        *(*(array.data.ptr for array in running), eps),
        *(array.data.ptr for array in saved),
    )
    data, output = (descriptor, x.data.ptr), (descriptor, y.data.ptr)
    if mode != names.CUDNN_BATCHNORM_SPATIAL_PERSISTENT:
        context.library.BatchNormalizationForwardTraining(
            handle, mode, *scales, *data, *output, *rest
        )
        return None
    workspace, reserve = _extra_memory(handle, mode, descriptor, derived)
    context.library.BatchNormalizationForwardTrainingEx(
        *(handle, mode, _ONLY_NORMALIZE, *scales, *data, 0, 0, *output, *rest, 0),
        *_sized(workspace),
        *_sized(reserve),
    )
    return reserve


def batch_normalization_forward_inference(
    x: Any,
    gamma: Any,
    beta: Any,
    mean: Any,
    var: Any,
    eps: float,
    is_for_conv2d: bool,
    cudnn_mode: int,
    d_layout: int = names.CUDNN_TENSOR_NCHW,
) -> Any:
    """Normalise by given statistics, and return the output."""
    x = context.contiguous(x)
    y = context.cupy.empty(x.shape, x.dtype)
    handle = context.get_handle()
    descriptor, derived = _descriptors(x, is_for_conv2d, cudnn_mode, d_layout)
    wide = _parameter_dtype(x.dtype)
    gamma, beta = _converted(gamma, wide), _converted(beta, wide)
    mean, var = _converted(mean, wide), _converted(var, wide)
    context.library.BatchNormalizationForwardInference(
        *(handle, cudnn_mode, context.ONE[x.dtype.char], context.ZERO[x.dtype.char]),
        *(descriptor.value, x.data.ptr, descriptor.value, y.data.ptr),
        *(derived.value, gamma.data.ptr, beta.data.ptr, mean.data.ptr, var.data.ptr, eps),
    )
    return y


def batch_normalization_backward(
    x: Any,
    gamma: Any,
    gy: Any,
    mean: Any,
    inv_std: Any,
    eps: float,
    is_for_conv2d: bool,
    cudnn_mode: int,
    debug: bool,
    d_layout: int = names.CUDNN_TENSOR_NCHW,
    *,
    reserve_space: Any = None,
) -> tuple[Any, Any, Any]:
    """Return the gradients of the input, of gamma and of beta.

    Parameters
    ----------
    mean, inv_std : cupy.ndarray
        What the forward pass in training gave.
    reserve_space : memory or None
        What `batch_normalization_forward_training_ex` gave.
    """
    x, gy = context.contiguous(x), context.contiguous(gy)
    gx = context.cupy.empty(x.shape, x.dtype)
    if reserve_space is None and cudnn_mode == names.CUDNN_BATCHNORM_SPATIAL_PERSISTENT:
        cudnn_mode = names.CUDNN_BATCHNORM_SPATIAL
    wide = _parameter_dtype(x.dtype)
    gamma, mean, inv_std = (_converted(array, wide) for array in (gamma, mean, inv_std))
    if gy.dtype != x.dtype:
        gy = gy.astype(x.dtype)
    ggamma = context.cupy.empty(gamma.shape, wide)
    gbeta = context.cupy.empty(gamma.shape, wide)
    if resident_normalization.can_do(x, is_for_conv2d, cudnn_mode, d_layout):
        resident_normalization.backward(x, gy, gx, gamma, (mean, inv_std), (ggamma, gbeta))
        return gx, ggamma, gbeta
    handle = context.get_handle()
    descriptor, derived = _descriptors(x, is_for_conv2d, cudnn_mode, d_layout)
    one, zero = context.ONE[x.dtype.char], context.ZERO[x.dtype.char]
    scales = (one, zero, one, zero)
    value = descriptor.value
    gradients = (ggamma.data.ptr, gbeta.data.ptr, eps, mean.data.ptr, inv_std.data.ptr)
    if reserve_space is not None:
        workspace = _backward_workspace(handle, cudnn_mode, value, derived.value)
        context.library.BatchNormalizationBackwardEx(
            *(handle, cudnn_mode, _ONLY_NORMALIZE, *scales, value, x.data.ptr, 0, 0),
            *(value, gy.data.ptr, 0, 0, value, gx.data.ptr),
            *(derived.value, gamma.data.ptr, 0, *gradients, 0),
            *_sized(workspace),
            *_sized(reserve_space),
        )
    else:
        context.library.BatchNormalizationBackward(
            *(handle, cudnn_mode, *scales, value, x.data.ptr, value, gy.data.ptr),
            *(value, gx.data.ptr, derived.value, gamma.data.ptr, *gradients),
        )
    return gx, ggamma, gbeta


def _descriptors(
    x: Any, is_for_conv2d: bool, cudnn_mode: int, layout: int
) -> tuple[Descriptor, Descriptor]:
    """Return the descriptors of the array, and of its statistics and parameters."""
    if is_for_conv2d:
        shape = x.shape
    else:
        layout = names.CUDNN_TENSOR_NCHW
        shape = (x.size // x.shape[-1], x.shape[-1], 1, 1)
    array = context.tensor_descriptor(x.dtype, shape, layout)

    def derive() -> Descriptor:
        descriptor: Descriptor = context.library.create("Tensor")
        context.library.DeriveBNTensorDescriptor(descriptor.value, array.value, cudnn_mode)
        return descriptor

    key = ("statistics", x.dtype.char, shape, layout, cudnn_mode)
    return array, context.cached(key, derive)


def _parameter_dtype(dtype: Any) -> Any:
    return context.cupy.dtype("f" if dtype.char == "e" else dtype.char)


def _converted(array: Any, dtype: Any) -> Any:
    """Return the array, or a contiguous copy of it in that type."""
    if array.dtype != dtype:
        array = array.astype(dtype)
    return context.contiguous(array)


def _extra_memory(handle: int, mode: int, value: int, derived: int) -> tuple[Any, Any]:
    """Return the workspace and the reserve memory of a forward pass in training."""
    workspace_bytes = context.byte_count(
        context.library.GetBatchNormalizationForwardTrainingExWorkspaceSize,
        *(handle, mode, _ONLY_NORMALIZE, value, 0, value, derived, 0),
    )
    reserve_bytes = context.byte_count(
        context.library.GetBatchNormalizationTrainingExReserveSpaceSize,
        *(handle, mode, _ONLY_NORMALIZE, 0, value),
    )
    # Something is handed on even where no bytes are asked for: it tells the backward pass the mode.
    return context.allocate(workspace_bytes), context.allocate(max(reserve_bytes, 1))


def _backward_workspace(handle: int, mode: int, value: int, derived: int) -> Any:
    nbytes = context.byte_count(
        context.library.GetBatchNormalizationBackwardExWorkspaceSize,
        *(handle, mode, _ONLY_NORMALIZE, value, 0, value, 0, value, derived, 0),
    )
    return context.allocate(nbytes)


def _sized(memory: Any) -> tuple[int, int]:
    return (0, 0) if memory is None else (memory.ptr, memory.mem.size)
