"""What every call of cuDNN needs: the library, CuPy, a handle on the right stream, descriptors.

Covers one handle for each thread and device, the scalars 0 and 1 in host memory, and descriptors
that are made once for each shape. Imports no CuPy: `attach` is given it when cuDNN is put in place,
so that everything here also runs over stand-ins without a GPU.

1. A handle is used by one thread only, and always on the stream that is CuPy's current one.
2. A descriptor that is in a cache is never changed.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, Final

from dynamemo.cudnn import names
from dynamemo.cudnn.library import Descriptor, Library, ffi

#: Descriptors of shapes kept at most; beyond it they are made anew.
CACHED_DESCRIPTORS = 4096

#: CuPy, and cuDNN, once `attach` was called.
cupy: Any = None
library: Any = None

_cache: dict[Any, Descriptor] = {}
_DATA_TYPES: Final = {
    "f": names.CUDNN_DATA_FLOAT,
    "d": names.CUDNN_DATA_DOUBLE,
    "e": names.CUDNN_DATA_HALF,
}
_ones = {"f": ffi.new("float *", 1.0), "d": ffi.new("double *", 1.0)}
_zeros = {"f": ffi.new("float *", 0.0), "d": ffi.new("double *", 0.0)}


def _addresses(scalars: dict[str, Any]) -> dict[str, int]:
    addresses = {kind: int(ffi.cast("uintptr_t", scalar)) for kind, scalar in scalars.items()}
    return addresses | {"e": addresses["f"]}


#: Host addresses of 1 and 0, in the type that cuDNN scales arrays of a dtype in.
ONE: Final = _addresses(_ones)
ZERO: Final = _addresses(_zeros)


class _Handle:
    """A cuDNN handle, and the stream it was last set to."""

    __slots__ = ("_descriptor", "stream", "value")

    def __init__(self) -> None:
        box = ffi.new("uintptr_t *")
        library.Create(box)
        self._descriptor = Descriptor(box[0], library.Destroy)
        self.value = int(box[0])
        self.stream = 0


class _Handles(threading.local):
    def __init__(self) -> None:
        self.by_device: dict[int, _Handle] = {}


_handles = _Handles()


def attach(cupy_module: Any, loaded: Library) -> None:
    """Set what all later calls use."""
    global cupy, library, _handles
    cupy, library = cupy_module, loaded
    _cache.clear()
    _handles = _Handles()


def get_handle() -> int:
    """Return this thread's handle for the current device, on the current stream."""
    device = cupy.cuda.device.get_device_id()
    handle = _handles.by_device.get(device)
    if handle is None:
        handle = _handles.by_device[device] = _Handle()
    stream = cupy.cuda.get_current_stream().ptr
    if stream != handle.stream:
        library.SetStream(handle.value, stream)
        handle.stream = stream
    return handle.value


def reset_handles() -> None:
    """Drop this thread's handles; the next call makes new ones."""
    _handles.by_device.clear()


def get_data_type(dtype: Any) -> int:
    """Return cuDNN's number for a dtype.

    Raises
    ------
    TypeError
        For any other than float16, float32 and float64.
    """
    try:
        return _DATA_TYPES[dtype.char]
    except KeyError:
        raise TypeError(f"cuDNN takes float16, float32 and float64 arrays, not {dtype}") from None


def contiguous(array: Any) -> Any:
    """Return the array, or a copy of it where it is not C-contiguous."""
    return array if array.flags.c_contiguous else cupy.ascontiguousarray(array)


def cached(key: Any, make: Callable[[], Descriptor]) -> Descriptor:
    """Return the descriptor under a key, made by `make` the first time."""
    descriptor = _cache.get(key)
    if descriptor is None:
        if len(_cache) >= CACHED_DESCRIPTORS:
            # Whoever is using one holds it.
            _cache.clear()
        descriptor = _cache[key] = make()
    return descriptor


def tensor_descriptor(dtype: Any, shape: tuple[int, ...], layout: int = 0) -> Descriptor:
    """Return the descriptor of a C-contiguous array.

    Parameters
    ----------
    dtype : numpy.dtype
    shape : tuple of int
        As the array has it: ``(n, h, w, c)`` where `layout` is ``CUDNN_TENSOR_NHWC``.
    layout : int
        ``CUDNN_TENSOR_NCHW`` for any number of axes from 3, or ``CUDNN_TENSOR_NHWC``.
    """
    return cached(("tensor", dtype.char, shape, layout), lambda: _new_tensor(dtype, shape, layout))


def _new_tensor(dtype: Any, shape: tuple[int, ...], layout: int) -> Descriptor:
    descriptor: Descriptor = library.create("Tensor")
    strides = contiguous_strides(shape)
    library.SetTensorNdDescriptor(
        descriptor.value,
        get_data_type(dtype),
        len(shape),
        ints(channels_second(shape, layout)),
        ints(channels_second(strides, layout)),
    )
    return descriptor


def filter_descriptor(dtype: Any, shape: tuple[int, ...], layout: int = 0) -> Descriptor:
    """Return the descriptor of C-contiguous filters: ``(o, i, ...)``, or ``(o, ..., i)``."""

    def make() -> Descriptor:
        descriptor: Descriptor = library.create("Filter")
        library.SetFilterNdDescriptor(
            descriptor.value,
            get_data_type(dtype),
            layout,
            len(shape),
            ints(channels_second(shape, layout)),
        )
        return descriptor

    return cached(("filter", dtype.char, shape, layout), make)


def channels_second(values: tuple[int, ...], layout: int) -> tuple[int, ...]:
    """Bring the entry of the channels to the second place, where `layout` has it last.

    >>> channels_second((8, 5, 6, 3), names.CUDNN_TENSOR_NHWC)
    (8, 3, 5, 6)
    """
    if layout == names.CUDNN_TENSOR_NCHW:
        return values
    return (values[0], values[-1], *values[1:-1])


def contiguous_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the strides, in elements, of a C-contiguous array.

    >>> contiguous_strides((2, 3, 4))
    (12, 4, 1)
    """
    strides = []
    stride = 1
    for extent in reversed(shape):
        strides.append(stride)
        stride *= extent
    return tuple(reversed(strides))


def ints(values: tuple[int, ...]) -> Any:
    """Return a C array of int."""
    return ffi.new("int[]", list(values))


def byte_count(query: Callable[..., None], *arguments: Any) -> int:
    """Return the ``size_t`` that a query of cuDNN writes behind its other arguments."""
    box = ffi.new("size_t *")
    query(*arguments, box)
    return int(box[0])


def allocate(nbytes: int) -> Any:
    """Return device memory from CuPy's current allocator, None for no bytes.

    The caller may drop it as soon as its work is enqueued: what takes the memory next is enqueued
    behind it, on the same stream.
    """
    return cupy.cuda.alloc(nbytes) if nbytes else None


def address(memory: Any) -> int:
    """Return the device address of what `allocate` gave."""
    return 0 if memory is None else int(memory.ptr)
