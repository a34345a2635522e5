"""NumPy's functions over phantoms: what each makes and what its kernel takes.

Functions that only make views run as NumPy has them.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy

from benchmarks.rehearsing.gpu import present
from benchmarks.rehearsing.phantom import Phantom, like, new, product, written
from dynamemo.allocator import root_array

_made_here: dict[Any, Callable[..., Any]] = {}

#: Make views, by methods that phantoms have.
_VIEWS = frozenset(
    {
        *(numpy.array_split, numpy.atleast_1d, numpy.atleast_2d, numpy.broadcast_shapes),
        *(numpy.dsplit, numpy.expand_dims, numpy.hsplit, numpy.moveaxis, numpy.ndim),
        *(numpy.ravel, numpy.reshape, numpy.rollaxis, numpy.shape, numpy.size, numpy.split),
        *(numpy.squeeze, numpy.swapaxes, numpy.transpose, numpy.vsplit),
        *(numpy.result_type, numpy.can_cast, numpy.iscomplexobj, numpy.may_share_memory),
    }
)
#: Call the method of that name.
_METHODS = {
    **{getattr(numpy, name): name for name in ("all", "any", "argmax", "argmin", "clip", "copy")},
    **{getattr(numpy, name): name for name in ("max", "mean", "min", "repeat", "std", "sum")},
    **{getattr(numpy, name): name for name in ("take", "var")},
    numpy.amax: "max",
    numpy.amin: "min",
}


def known(function: Any) -> Callable[..., Any] | None:
    """Return what stands in for a function of NumPy's; None where nothing does."""
    if function in _VIEWS:
        return function._implementation  # type: ignore[no-any-return]
    if function in _METHODS:
        return _method(_METHODS[function])
    return _made_here.get(function)


def _method(name: str) -> Callable[..., Any]:
    def call(x: Any, *given: Any, **options: Any) -> Any:
        return getattr(x, name)(*given, **options)

    return call


def _stands_in(function: Any) -> Callable[[Any], Any]:
    def note(made: Any) -> Any:
        _made_here[function] = made
        return made

    return note


@_stands_in(numpy.concatenate)
def _concatenate(arrays: Any, axis: Any = 0, out: Any = None, **_: Any) -> Any:
    first = arrays[0]
    if out is None:
        shape = list(first.shape)
        shape[axis] = sum(array.shape[axis] for array in arrays)
        out = new(tuple(shape), numpy.result_type(*(array.dtype for array in arrays)))
    return written(out, reads=1)


@_stands_in(numpy.stack)
def _stack(arrays: Any, axis: int = 0, out: Any = None, **_: Any) -> Any:
    shape = list(arrays[0].shape)
    shape.insert(axis % (len(shape) + 1), len(arrays))
    return written(new(tuple(shape), arrays[0].dtype) if out is None else out, reads=1)


@_stands_in(numpy.dot)
def _dot(a: Any, b: Any, out: Any = None) -> Any:
    return product(a, b, out=out)


@_stands_in(numpy.tensordot)
def _tensordot(a: Any, b: Any, axes: Any = 2) -> Any:
    if isinstance(axes, int):
        axes = (range(-axes, 0), range(axes))
    left, right = (
        [axis % array.ndim for axis in ([side] if isinstance(side, int) else side)]
        for array, side in zip((a, b), axes, strict=True)
    )
    kept_a = [n for axis, n in enumerate(a.shape) if axis not in left]
    kept_b = [n for axis, n in enumerate(b.shape) if axis not in right]
    made = new((*kept_a, *kept_b), a.dtype)
    gpu = present()
    flops = 2.0 * made.size * math.prod(a.shape[axis] for axis in left)
    gpu.work(a.nbytes + b.nbytes + made.nbytes, flops, gpu.roofline.product_flops_per_s)
    return made


@_stands_in(numpy.where)
def _where(condition: Any, x: Any, y: Any) -> Any:
    shape = numpy.broadcast_shapes(*(numpy.shape(item) for item in (condition, x, y)))
    kinds = [item if isinstance(item, int | float) else item.dtype for item in (x, y)]
    return written(new(shape, numpy.result_type(*kinds)), reads=2)


@_stands_in(numpy.copyto)
def _copyto(target: Any, source: Any, **_: Any) -> None:
    if isinstance(target, Phantom):
        written(target, reads=isinstance(source, Phantom))
    else:
        target[...] = 0


@_stands_in(numpy.empty_like)
def _empty_like(x: Any, dtype: Any = None, order: str = "K", **options: Any) -> Any:
    if options.get("shape") is not None:
        return new(options["shape"], dtype or x.dtype)
    return like(x, dtype or x.dtype, order)


@_stands_in(numpy.full_like)
def _full_like(x: Any, value: Any, dtype: Any = None, order: str = "K", **options: Any) -> Any:
    return _filled_like(x, dtype, order, **options)


@_stands_in(numpy.zeros_like)
@_stands_in(numpy.ones_like)
def _filled_like(x: Any, dtype: Any = None, order: str = "K", **options: Any) -> Any:
    return written(_empty_like(x, dtype, order, **options))


@_stands_in(numpy.tile)
def _tile(x: Any, repeats: Any) -> Any:
    repeats = (repeats,) if isinstance(repeats, int) else tuple(repeats)
    depth = max(x.ndim, len(repeats))
    shape = (1,) * (depth - x.ndim) + x.shape
    repeats = (1,) * (depth - len(repeats)) + repeats
    return written(new(tuple(n * r for n, r in zip(shape, repeats, strict=True)), x.dtype), reads=1)


@_stands_in(numpy.broadcast_to)
def broadcast_to(x: Any, shape: Any, **_: Any) -> Any:
    """Return a view with strides of 0 on the array that owns the memory."""
    shape = (shape,) if isinstance(shape, int) else tuple(shape)
    missing = len(shape) - x.ndim
    strides = (0,) * missing + tuple(
        0 if n == 1 and wanted != 1 else stride
        for n, wanted, stride in zip(x.shape, shape[missing:], x.strides, strict=True)
    )
    if numpy.broadcast_shapes(x.shape, shape) != shape:
        raise ValueError(f"{x.shape} cannot be broadcast to {shape}")
    root = root_array(x)[0]
    offset = x.__array_interface__["data"][0] - root.__array_interface__["data"][0]
    return numpy.ndarray.__new__(Phantom, shape, x.dtype, root, offset, strides)


@_stands_in(numpy.broadcast_arrays)
def _broadcast_arrays(*arrays: Any, **_: Any) -> Any:
    shape = numpy.broadcast_shapes(*(array.shape for array in arrays))
    return [array if array.shape == shape else broadcast_to(array, shape) for array in arrays]
