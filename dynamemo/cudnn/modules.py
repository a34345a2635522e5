"""The two modules that CuPy 14 no longer has: what they hold, and how they are put in place.

`cupy.cudnn` gets the functions on arrays, `cupy.cuda.cudnn` the enumerations and a few functions on
addresses; both hold what Chainer 7.8.1 and its tests read, under the names of CuPy 7 to 13.

1. Where CuPy has such modules of its own, nothing is touched.
2. Unlike other stand-ins of `dynamemo.compat` these are seen by everybody: programs of the time
   import them too, and Chainer's tests patch them by name.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

from dynamemo.cudnn import (
    context,
    convolution,
    dropout,
    layers,
    legacy_plans,
    names,
    normalization,
    recurrent,
    settings,
    transformer,
)
from dynamemo.cudnn.errors import CudnnError
from dynamemo.cudnn.library import Descriptor, Library, load

__all__ = ["array_module", "enumeration_module", "install"]

_ARRAY_FUNCTIONS = (convolution, dropout, layers, normalization, recurrent, transformer)
_ADDRESS_FUNCTIONS = (
    recurrent.getRNNParamsSize,
    transformer.spatialTfGridGeneratorBackward,
    transformer.spatialTfGridGeneratorForward,
    transformer.spatialTfSamplerBackward,
    transformer.spatialTfSamplerForward,
)


def install(cupy: Any) -> None:
    """Load cuDNN and put both modules in place.

    Parameters
    ----------
    cupy : module
        CuPy 14 or later.

    Raises
    ------
    CudnnError
        If cuDNN cannot be used; nothing was put in place.
    """
    library = load()
    cuda_major = cupy.cuda.runtime.runtimeGetVersion() // 1000
    if library.runtime_version() // 1000 != cuda_major:
        raise CudnnError(
            f"the cuDNN found is built for CUDA {library.runtime_version() // 1000}, CuPy for "
            f"CUDA {cuda_major}: install dynamemo with the extra cuda{cuda_major}"
        )
    context.attach(cupy, library)
    cupy.cudnn = sys.modules["cupy.cudnn"] = array_module()
    cupy.cuda.cudnn = sys.modules["cupy.cuda.cudnn"] = enumeration_module(library)


def array_module() -> ModuleType:
    """Return the module of functions on arrays."""
    module = ModuleType("cupy.cudnn", "cuDNN under CuPy arrays, by dynamemo.")
    for source in _ARRAY_FUNCTIONS:
        for name in source.__all__:
            setattr(module, name, getattr(source, name))
    for function in (
        context.get_data_type,
        context.get_handle,
        context.reset_handles,
        settings.get_max_workspace_size,
        settings.set_max_workspace_size,
        create_convolution_descriptor,
        create_filter_descriptor,
        create_tensor_descriptor,
        create_tensor_nd_descriptor,
        create_uninitialized_tensor_descriptor,
        is_tensor_core_available,
    ):
        setattr(module, function.__name__, function)
    module.Descriptor = Descriptor  # type: ignore[attr-defined]
    return module


def enumeration_module(library: Library) -> ModuleType:
    """Return the module of enumerations and of functions on addresses."""
    module = ModuleType("cupy.cuda.cudnn", "cuDNN's enumerations, by dynamemo.")
    for name, value in vars(names).items():
        if name.startswith("CUDNN_"):
            setattr(module, name, value)
    for function in _ADDRESS_FUNCTIONS:
        setattr(module, function.__name__, function)
    version = library.version()
    module.CuDNNError = CudnnError  # type: ignore[attr-defined]
    module.getVersion = lambda: version  # type: ignore[attr-defined]
    module.get_build_version = lambda: version  # type: ignore[attr-defined]
    return module


def create_tensor_descriptor(arr: Any, format: int = names.CUDNN_TENSOR_NCHW) -> Descriptor:
    """Return the descriptor of a C-contiguous array of at least three axes."""
    _require_contiguous(arr)
    return context.tensor_descriptor(arr.dtype, arr.shape, format)


def create_tensor_nd_descriptor(arr: Any) -> Descriptor:
    """Return the descriptor of a C-contiguous array, none for one without elements."""
    if not arr.size:
        return Descriptor(0, None)
    _require_contiguous(arr)
    return context.tensor_descriptor(arr.dtype, arr.shape)


def create_uninitialized_tensor_descriptor() -> Descriptor:
    """Return a new descriptor of an array, to be set by a call of cuDNN."""
    descriptor: Descriptor = context.library.create("Tensor")
    return descriptor


def create_filter_descriptor(arr: Any, format: int = names.CUDNN_TENSOR_NCHW) -> Descriptor:
    """Return the descriptor of a C-contiguous array of filters."""
    _require_contiguous(arr)
    return context.filter_descriptor(arr.dtype, arr.shape, format)


def create_convolution_descriptor(
    pad: tuple[int, ...],
    stride: tuple[int, ...],
    dtype: Any,
    mode: int = names.CUDNN_CROSS_CORRELATION,
    dilation: tuple[int, ...] | None = None,
    use_tensor_core: bool = False,
    groups: int = 1,
) -> Descriptor:
    """Return a new descriptor of a convolution in cuDNN's older interface."""
    return legacy_plans.new_convolution_descriptor(
        context.library,
        pad,
        stride,
        dilation=dilation or (1,) * len(pad),
        groups=groups,
        dtype_char=dtype.char,
        math_type=names.CUDNN_TENSOR_OP_MATH if use_tensor_core else names.CUDNN_DEFAULT_MATH,
        mode=mode,
    )


def is_tensor_core_available(dtype: Any) -> bool:
    """Tell whether arrays of that dtype are multiplied by tensor cores."""
    capability = context.cupy.cuda.Device().compute_capability
    return bool(dtype.char == "e" and int(capability) >= 70)


def _require_contiguous(array: Any) -> None:
    if not array.flags.c_contiguous:
        raise ValueError("cuDNN takes C-contiguous arrays only here; make a copy of it")
