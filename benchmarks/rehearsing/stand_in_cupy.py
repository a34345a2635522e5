"""What Chainer meets in place of CuPy: modules whose arrays are phantoms.

Everything that is not here is NumPy's of the same name, which does with phantoms what `phantom` and
`array_functions` say.
"""

from __future__ import annotations

import re
import types
from typing import Any

import numpy

from benchmarks.rehearsing import array_functions
from benchmarks.rehearsing.gpu import present
from benchmarks.rehearsing.phantom import Device, Phantom, new, reduced, touched_bytes, written


class StandIn(types.ModuleType):
    """A module that answers with NumPy's functions where it has none of its own."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(numpy, name)


def empty(shape: Any, dtype: Any = float, order: str = "C") -> Phantom:
    """Make an array."""
    return new(shape, numpy.dtype(dtype))


def zeros(shape: Any, dtype: Any = float, order: str = "C") -> Phantom:
    """Make an array and let a kernel fill it."""
    return written(empty(shape, dtype))


def full(shape: Any, value: Any, dtype: Any = None, order: str = "C") -> Phantom:
    """Make an array and let a kernel fill it."""
    return written(empty(shape, numpy.asarray(value).dtype if dtype is None else dtype))


def arange(*bounds: Any, dtype: Any = None) -> Phantom:
    """Make an array of as many elements as NumPy's has."""
    start, stop, step = (0, *bounds, 1) if len(bounds) == 1 else (*bounds, 1)[:3]
    count = max(0, -int(-(stop - start) // step))
    return written(empty(count, dtype or numpy.arange(*bounds[:1]).dtype))


def array(item: Any, dtype: Any = None, copy: bool = True, **_: Any) -> Phantom:
    """Take an array of the host, or copy a phantom."""
    if isinstance(item, Phantom):
        return item.astype(dtype or item.dtype, copy=copy)
    host = item if isinstance(item, numpy.ndarray) else numpy.asarray(item)
    return new(host.shape, numpy.dtype(dtype or host.dtype))


def asarray(item: Any, dtype: Any = None, **_: Any) -> Phantom:
    """Take an array of the host, or a phantom as it is."""
    return array(item, dtype, copy=False)


def ascontiguousarray(item: Any, dtype: Any = None) -> Phantom:
    """Return the array where it is in C order, else a copy that is."""
    item = asarray(item, dtype)
    return item if item.flags.c_contiguous else item.copy()


def asnumpy(item: Any, *_: Any) -> Any:
    """Return an array of the host, of zeros."""
    return item.get() if isinstance(item, Phantom) else numpy.asarray(item)


def get_array_module(*arrays: Any) -> Any:
    """Return this module where one of the arrays is a phantom, else NumPy."""
    return cupy if any(isinstance(item, Phantom) for item in arrays) else numpy


def _drawn(shape: Any, dtype: Any) -> Phantom:
    return written(empty(() if shape is None else shape, dtype))


def _named_draw(*given: Any, size: Any = None, dtype: Any = float, **_: Any) -> Phantom:
    return _drawn(size, dtype)


def _shaped_draw(*shape: Any, dtype: Any = float, **_: Any) -> Phantom:
    return _drawn(shape, dtype)


class ElementwiseKernel:
    """One kernel over arrays that are broadcast against each other."""

    def __init__(self, inputs: str, outputs: str, operation: str, name: str, **_: Any) -> None:
        self._inputs = _parameters(inputs)
        self._outputs = _parameters(outputs)

    def __call__(self, *given: Any, size: Any = None, **_: Any) -> Any:
        """Return the outputs that were given, or new ones."""
        count = len(self._inputs)
        results = given[count:] or self._new_outputs(given)
        present().work(sum(map(touched_bytes, (*given[:count], *results))))
        return results if len(results) > 1 else results[0]

    def _new_outputs(self, given: Any) -> tuple[Phantom, ...]:
        pairs = list(zip(self._inputs, given, strict=True))
        shapes = [a.shape for (_, is_raw), a in pairs if not is_raw and hasattr(a, "shape")]
        shape = numpy.broadcast_shapes(*shapes)
        return tuple(new(shape, _dtype_of(kind, pairs)) for kind, _ in self._outputs)


class ReductionKernel:
    """One kernel that reduces what arrays give that are broadcast against each other."""

    def __init__(self, inputs: str, outputs: str, *_: Any, **__: Any) -> None:
        self._inputs = _parameters(inputs)
        self._outputs = _parameters(outputs)

    def __call__(self, *given: Any, axis: Any = None, keepdims: bool = False, **_: Any) -> Any:
        """Return a new array."""
        pairs = list(zip(self._inputs, given, strict=False))
        longest = max(
            (a for (_, is_raw), a in pairs if not is_raw and isinstance(a, Phantom)),
            key=lambda a: a.size,
        )
        kind = _dtype_of(self._outputs[0][0], pairs)
        return reduced(longest, axis, {"keepdims": keepdims}, dtype=kind)


class RawKernel:
    """A kernel that writes into arrays that it is given."""

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def __call__(self, grid: Any, block: Any, given: Any, **_: Any) -> None:
        """Take the time of touching its arrays."""
        present().work(sum(map(touched_bytes, given)))


def _parameters(text: str) -> list[tuple[str, bool]]:
    """Return the type of each parameter, and whether it is raw."""
    found = []
    for part in filter(None, (piece.strip() for piece in text.split(","))):
        words = re.split(r"\s+", part)
        found.append((words[-2], words[0] == "raw"))
    return found


def _dtype_of(kind: str, pairs: Any) -> Any:
    if len(kind) > 1:
        return numpy.dtype(kind)
    for (other, _), item in pairs:
        if other == kind and hasattr(item, "dtype"):
            return item.dtype
    return numpy.dtype("f")


def _rsqrt(x: Any, dtype: Any = None, **_: Any) -> Phantom:
    return written(new(x.shape, dtype or x.dtype), reads=1)


def _scatter_add(target: Any, index: Any, value: Any) -> None:
    written(value, reads=2)


def _zero_pool() -> types.SimpleNamespace:
    return types.SimpleNamespace(free_all_blocks=lambda: None)


class _Moment:
    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def record(self, *_: Any) -> _Moment:
        return self

    def synchronize(self) -> None:
        pass

    done = True


random = types.SimpleNamespace(
    rand=_shaped_draw,
    randn=_shaped_draw,
    random_sample=_named_draw,
    standard_normal=lambda size=None, dtype=float: _drawn(size, dtype),
    normal=_named_draw,
    uniform=_named_draw,
    seed=lambda *_: None,
)
cuda = types.SimpleNamespace(
    Device=Device, Event=_Moment, Stream=_Moment, get_current_stream=lambda *_: _Moment()
)
cupyx = types.SimpleNamespace(rsqrt=_rsqrt, scatter_add=_scatter_add)

cupy = StandIn("cupy", "A stand-in: arrays that are never touched.")
for _own in (
    *(empty, zeros, full, arange, array, asarray, ascontiguousarray, asnumpy),
    *(get_array_module, ElementwiseKernel, ReductionKernel, RawKernel),
):
    setattr(cupy, _own.__name__, _own)
cupy.__dict__.update(
    ones=zeros,
    ndarray=Phantom,
    random=random,
    cuda=cuda,
    broadcast_to=array_functions.broadcast_to,
    get_default_memory_pool=_zero_pool,
    get_default_pinned_memory_pool=_zero_pool,
)
