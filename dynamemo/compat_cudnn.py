"""Give Chainer 7.8.1 the cuDNN that CuPy 14 no longer has, before it looks for it.

Covers when that is done and what is said where it cannot be; what is put in place is the matter of
`dynamemo.cudnn`. Chainer's own convolution takes over where cuDNN has no plan for one.

1. Without CuPy, with an older one, with ``DYNAMEMO_CUDNN=0`` or ``CHAINER_CUDNN=0``,
   nothing is done and nothing is said.
2. Where cuDNN is missing, Chainer works without it, and one warning says what to install.
"""

from __future__ import annotations

import functools
import os
import warnings
import weakref
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any

from dynamemo.compat_cupy import FIRST_MENDED_MAJOR

#: Elements from which on a second launch costs less than a slow reduction.
LEAST_SUMMED_IN_TWO_STEPS = 1 << 18

#: Why cuDNN is not in place, None where it is or nobody asked.
_reason: str | None = None


def prepare() -> None:
    """Put cuDNN in place for Chainer, which is about to look for it."""
    global _reason
    if _is_switched_off():
        return
    try:
        import cupy
    except Exception:  # Chainer asks the same, takes any exception for "no CUDA", and tells it.
        return
    if int(cupy.__version__.split(".")[0]) < FIRST_MENDED_MAJOR:
        return
    # Only here, since most of dynamemo cannot be imported yet when `compat` is.
    from dynamemo.cudnn import CudnnError
    from dynamemo.cudnn.modules import install

    try:
        install(cupy)
    except CudnnError as error:
        _reason = str(error)


def _is_switched_off() -> bool:
    """Tell whether the user wants no cuDNN. Chainer reads its own switch as an integer."""
    switches = ("DYNAMEMO_CUDNN", "CHAINER_CUDNN")
    return any(os.environ.get(switch, "1").strip() == "0" for switch in switches)


def _mend_backend(module: ModuleType) -> None:
    """Say what is missing in place of Chainer's advice to install CuPy anew.

    Where nothing is, let the choice of plans see Chainer's `cudnn_deterministic`, which Chainer
    does not hand to every function.
    """
    cuda: Any = module
    if cuda.cudnn_enabled:
        from dynamemo.cudnn import settings

        settings.must_repeat = lambda: bool(cuda.config.cudnn_deterministic)
    if _reason is None:
        return
    check = cuda.check_cuda_available
    has_warned = False

    @functools.wraps(check)
    def check_cuda_available() -> None:
        nonlocal has_warned
        check()
        if not has_warned:
            has_warned = True
            warnings.warn(f"Chainer runs without cuDNN: {_reason}", stacklevel=2)

    check_cuda_available._already_warned = True  # type: ignore[attr-defined]
    cuda.check_cuda_available = check_cuda_available


def _mend_functions(
    class_names: tuple[str, ...], method: str, **reset: object
) -> Callable[[ModuleType], None]:
    """Return a mend that lets functions do without cuDNN where it has no way.

    `reset` are the attributes by which a function would remember that it used cuDNN.
    """

    def mend(module: ModuleType) -> None:
        chainer_module: Any = module
        if chainer_module.cuda.cudnn_enabled:
            for name in class_names:
                _fall_back(getattr(module, name), method, chainer_module.chainer, reset)

    return mend


def _mend_sum(module: ModuleType) -> None:
    """Sum the gradient of a bias, over all axes but that of the channels, in two steps.

    CuPy reduces the last axis at the speed of the memory, but these axes at a tenth of it. In half
    precision it would round between the steps, so there nothing is done.
    """
    chainer_sum: Any = module
    cuda = chainer_sum.chainer.backends.cuda
    if not cuda.cudnn_enabled:
        return
    forward = chainer_sum.Sum.forward

    @functools.wraps(forward)
    def forward_in_two_steps(self: Any, inputs: tuple[Any, ...]) -> Any:
        (x,) = inputs
        if (
            not isinstance(x, cuda.ndarray)
            or x.size < LEAST_SUMMED_IN_TWO_STEPS
            or x.dtype.char not in "fd"
            or self.keepdims
            or self.axis is None
            or {axis % x.ndim for axis in self.axis} != {*range(x.ndim)} - {1}
            or not x.flags.c_contiguous
        ):
            return forward(self, inputs)
        return (x.reshape(*x.shape[:2], -1).sum(axis=2).sum(axis=0),)

    chainer_sum.Sum.forward = forward_in_two_steps


def _mend_cudnn_pooling(module: ModuleType) -> None:
    """Let cuDNN's pooling refer to its function weakly, which refers to it.

    Otherwise all that led up to a pooling layer, the largest arrays of many networks, waits for the
    cycle collector.
    """

    def function_of(pooling: Any) -> Any:
        return pooling._function_ref()

    def set_function(pooling: Any, function: Any) -> None:
        pooling._function_ref = weakref.ref(function)

    chainer_pooling: Any = module
    chainer_pooling._CudnnPoolingNDImpl.func = property(function_of, set_function)


def _fall_back(function_class: Any, method: str, chainer: Any, reset: dict[str, object]) -> None:
    from dynamemo.cudnn import NoPlanError

    original = getattr(function_class, method)

    @functools.wraps(original)
    def with_fallback(self: Any, inputs: tuple[Any, ...]) -> Any:
        try:
            return original(self, inputs)
        except NoPlanError:
            vars(self).update(reset)
            with chainer.using_config("use_cudnn", "never"):
                return original(self, inputs)

    setattr(function_class, method, with_fallback)


#: For each module of Chainer, what is done before it is loaded.
PREPARATIONS: Mapping[str, Callable[[], None]] = {"chainer.backends.cuda": prepare}

_CONNECTION = "chainer.functions.connection."
_POOLING = "chainer.functions.pooling."

#: For each module of Chainer, what is done to it once it has been loaded.
MENDS: Mapping[str, Callable[[ModuleType], None]] = {
    "chainer.backends.cuda": _mend_backend,
    _CONNECTION + "convolution_2d": _mend_functions(
        ("Convolution2DFunction", "Convolution2DGradW"), "forward_gpu"
    ),
    _CONNECTION + "deconvolution_2d": _mend_functions(("Deconvolution2DFunction",), "forward_gpu"),
    _CONNECTION + "convolution_nd": _mend_functions(
        ("ConvolutionND", "ConvolutionNDGradW"), "forward"
    ),
    _CONNECTION + "deconvolution_nd": _mend_functions(("DeconvolutionND",), "forward"),
    "chainer.functions.math.sum": _mend_sum,
    _POOLING + "pooling_nd": _mend_cudnn_pooling,
    _POOLING + "average_pooling_2d": _mend_functions(
        ("AveragePooling2D",), "forward_gpu", _used_cudnn=False
    ),
    _POOLING + "average_pooling_nd": _mend_functions(
        ("AveragePoolingND",), "forward_gpu", _cudnn_pool=None
    ),
    _POOLING + "max_pooling_nd": _mend_functions(
        ("MaxPoolingND",), "forward_gpu", _cudnn_pool=None
    ),
}
