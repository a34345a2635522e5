"""Arrays with an address, a shape and a type, whose elements are never read or written.

In place of CuPy's: an operation on them makes what it would make, lets the clock go on by what its
kernel takes, and computes nothing. Views are NumPy's own. What nobody has written down here is done
as NumPy does it where little memory is touched by that, and refused by name where much would be.
"""

from __future__ import annotations

import functools
import math
import operator
from typing import Any

import numpy

from benchmarks.rehearsing.gpu import present

#: An operation that is not written down here touches at most so much.
MOST_TOUCHED_BYTES = 16 << 20


class NotRehearsedError(NotImplementedError):
    """An operation would touch large arrays: to be rehearsed, it has to be written down."""

    def __init__(self, name: str, nbytes: int) -> None:
        super().__init__(
            f"{name} is not rehearsed: NumPy's would touch {nbytes:,} bytes, more than "
            f"{MOST_TOUCHED_BYTES:,}; add it to benchmarks/rehearsing"
        )


class Device:
    """The only GPU."""

    id = 0

    def __init__(self, index: int = 0) -> None:
        if index != 0:
            raise ValueError(f"there is one rehearsed GPU, so no number {index}")

    def __enter__(self) -> Device:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Device)

    def __hash__(self) -> int:
        return 0

    def use(self) -> None:
        """Do nothing."""

    def synchronize(self) -> None:
        """Do nothing."""


_DEVICE = Device()


class Phantom(numpy.ndarray):
    """An array on the rehearsed GPU."""

    __slots__ = ()

    device = _DEVICE

    # -- operators and functions --

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **options: Any) -> Any:
        out = options.pop("out", None)
        if method == "reduce":
            (x,) = inputs
            return reduced(x, options.get("axis", 0), options, dtype=_reduced_dtype(ufunc, x))
        if method != "__call__":
            raise NotRehearsedError(f"{ufunc.__name__}.{method}", sum(map(touched_bytes, inputs)))
        if ufunc is numpy.matmul:
            return product(*inputs, out=None if out is None else out[0])
        shape = numpy.broadcast_shapes(*(numpy.shape(item) for item in inputs))
        kinds = _result_dtypes(ufunc, tuple(map(_kind, inputs)), options.get("dtype"))
        given = out or (None,) * len(kinds)
        results = tuple(
            new(shape, kind) if array is None else array
            for array, kind in zip(given, kinds, strict=True)
        )
        present().work(sum(map(touched_bytes, inputs)) + sum(map(touched_bytes, results)))
        return results if len(results) > 1 else results[0]

    def __array_function__(self, function: Any, types: Any, given: Any, options: Any) -> Any:
        from benchmarks.rehearsing import array_functions

        known = array_functions.known(function)
        if known is not None:
            return known(*given, **options)
        return _as_numpy_does(function, given, options)

    # -- reductions --

    def sum(self, axis: Any = None, dtype: Any = None, out: Any = None, **options: Any) -> Any:
        """Reduce."""
        return reduced(self, axis, options, dtype=dtype or _reduced_dtype(numpy.add, self), out=out)

    def mean(self, axis: Any = None, dtype: Any = None, out: Any = None, **options: Any) -> Any:
        """Reduce."""
        kind = self.dtype if self.dtype.kind == "f" else numpy.dtype("d")
        return reduced(self, axis, options, dtype=dtype or kind, out=out)

    var = std = mean

    def max(self, axis: Any = None, out: Any = None, **options: Any) -> Any:
        """Reduce."""
        return reduced(self, axis, options, dtype=self.dtype, out=out)

    min = max

    def argmax(self, axis: Any = None, dtype: Any = None, out: Any = None, **options: Any) -> Any:
        """Reduce."""
        return reduced(self, axis, options, dtype=dtype or numpy.dtype("l"), out=out)

    argmin = argmax

    def any(self, axis: Any = None, out: Any = None, **options: Any) -> Any:
        """Reduce."""
        return reduced(self, axis, options, dtype=numpy.dtype("?"), out=out)

    all = any

    # -- copies --

    def copy(self, order: str = "C") -> Phantom:
        """Make another of its kind."""
        made = like(self, self.dtype, order)
        present().work(touched_bytes(self) + made.nbytes)
        return made

    def __copy__(self) -> Phantom:
        return self.copy("K")

    def __deepcopy__(self, memo: Any) -> Phantom:
        return self.copy("K")

    def astype(self, dtype: Any, order: str = "K", *, copy: bool = True, **_: Any) -> Phantom:
        """Make another of that type, or return itself where it has it and that will do."""
        dtype = numpy.dtype(dtype)
        if dtype == self.dtype and not copy:
            return self
        made = like(self, dtype, order)
        present().work(touched_bytes(self) + made.nbytes)
        return made

    def reshape(self, *shape: Any, order: str = "C", **_: Any) -> Phantom:
        """Return a view where there is one, else a copy."""
        wanted = shape[0] if len(shape) == 1 else shape
        try:
            return super().reshape(wanted, copy=False)
        except ValueError:
            made = like(self, self.dtype, "C")
            present().work(touched_bytes(self) + made.nbytes)
            return made.reshape(wanted)

    def ravel(self, order: str = "C") -> Phantom:
        """Return a flat view where there is one, else a copy."""
        if order == "K" and not self.flags.c_contiguous:
            axes = sorted(range(self.ndim), key=lambda axis: -self.strides[axis])
            return self.transpose(axes).reshape(-1)
        return self.reshape(-1)

    def flatten(self, order: str = "C") -> Phantom:
        """Return a flat copy."""
        return self.copy().reshape(-1)

    def fill(self, value: Any) -> None:
        """Write it."""
        present().work(touched_bytes(self))

    def dot(self, other: Any, out: Any = None) -> Any:
        """Multiply matrices."""
        return product(self, other, out=out)

    def take(self, indices: Any, axis: Any = None, out: Any = None, **_: Any) -> Any:
        """Gather."""
        base = (self.size,) if axis is None else self.shape
        axis = 0 if axis is None else axis % self.ndim
        shape = base[:axis] + numpy.shape(indices) + base[axis + 1 :]
        return written(new(shape, self.dtype) if out is None else out, reads=1)

    def clip(self, *bounds: Any, out: Any = None, **_: Any) -> Any:
        """Bound."""
        return written(new(self.shape, self.dtype) if out is None else out, reads=1)

    def repeat(self, repeats: int, axis: Any = None) -> Any:
        """Repeat each element."""
        shape = [self.size] if axis is None else list(self.shape)
        shape[axis or 0] *= int(repeats)
        return written(new(tuple(shape), self.dtype), reads=1)

    # -- elements --

    def __getitem__(self, index: Any) -> Any:
        if _is_basic(index):
            # With an ellipsis, so that single elements are arrays too, as CuPy's are.
            entries = index if type(index) is tuple else (index,)
            if not any(entry is ... for entry in entries):
                entries = (*entries, ...)
            return super().__getitem__(entries)
        return written(new(_gathered_shape(self, index), self.dtype), reads=1)

    def __setitem__(self, index: Any, value: Any) -> None:
        if not _is_basic(index):
            nbytes = math.prod(_gathered_shape(self, index)) * self.itemsize
            present().work(2 * nbytes)
            return
        written(self[index], reads=isinstance(value, Phantom))

    def scatter_add(self, index: Any, value: Any) -> None:
        """Add where the index says."""
        present().work(3 * touched_bytes(value))

    def get(self, *_: Any, **__: Any) -> numpy.ndarray:
        """Return an array of the host, of zeros."""
        return numpy.zeros(self.shape, self.dtype)

    def set(self, array: Any, *_: Any) -> None:
        """Take elements of the host's."""
        present().work(self.nbytes)

    def reduced_view(self, *_: Any) -> Phantom:
        """Return itself: a view with fewer axes is for kernels only."""
        return self


def _refused(name: str) -> Any:
    def method(self: Phantom, *given: Any, **options: Any) -> Any:
        return _as_numpy_does(getattr(numpy.ndarray, name), (self, *given), options, name=name)

    return method


for _name in (
    *("argpartition", "argsort", "byteswap", "choose", "compress", "cumprod", "cumsum", "diagonal"),
    *("nonzero", "partition", "prod", "put", "round", "searchsorted", "sort", "tobytes", "tolist"),
    "trace",
):
    setattr(Phantom, _name, _refused(_name))


# -- making arrays --


def new(shape: Any, dtype: Any = None) -> Phantom:
    """Make an array in C order, with memory of its own. No kernel runs for that."""
    return present().make(lambda: numpy.ndarray.__new__(Phantom, shape, dtype or numpy.dtype("d")))


def like(array: Any, dtype: Any, order: str) -> Phantom:
    """Make an array of the same shape; under the order K its axes lie as the other's."""
    if order in "CA" or array.flags.c_contiguous:
        return new(array.shape, dtype)
    axes = sorted(range(array.ndim), key=lambda axis: -array.strides[axis])
    made = new(tuple(array.shape[axis] for axis in axes), dtype)
    return made.transpose([axes.index(axis) for axis in range(array.ndim)])


def written(array: Phantom, *, reads: int = 0) -> Phantom:
    """Let a kernel write an array that reads so many of its size; return it."""
    present().work(touched_bytes(array) * (1 + reads))
    return array


def reduced(x: Any, axis: Any, options: dict[str, Any], *, dtype: Any, out: Any = None) -> Phantom:
    """Reduce along axes, all of them for None."""
    axes = tuple(range(x.ndim)) if axis is None else axis
    axes = tuple(a % x.ndim for a in ((axes,) if isinstance(axes, int) else axes))
    if options.get("keepdims"):
        shape = tuple(1 if a in axes else n for a, n in enumerate(x.shape))
    else:
        shape = tuple(n for a, n in enumerate(x.shape) if a not in axes)
    made = new(shape, dtype) if out is None else out
    present().work(touched_bytes(x) + made.nbytes)
    return made


def product(a: Any, b: Any, out: Any = None) -> Phantom:
    """Multiply matrices, or stacks of them."""
    first = a.shape if a.ndim > 1 else (1, *a.shape)
    second = b.shape if b.ndim > 1 else (*b.shape, 1)
    stacked = numpy.broadcast_shapes(first[:-2], second[:-2])
    rows = first[-2:-1] if a.ndim > 1 else ()
    columns = second[-1:] if b.ndim > 1 else ()
    made = new((*stacked, *rows, *columns), a.dtype) if out is None else out
    gpu = present()
    flops = 2.0 * made.size * first[-1]
    gpu.work(
        touched_bytes(a) + touched_bytes(b) + made.nbytes, flops, gpu.roofline.product_flops_per_s
    )
    return made


# -- helpers --


def touched_bytes(item: Any) -> int:
    """Return the bytes under an array, 0 for what is none; a stride of 0 counts once."""
    if not isinstance(item, numpy.ndarray):
        return 0
    return math.prod(n for n, s in zip(item.shape, item.strides, strict=True) if s) * item.itemsize


def _kind(item: Any) -> Any:
    if isinstance(item, bool):
        return numpy.dtype("?")
    if isinstance(item, int | float | complex) and not isinstance(item, numpy.generic):
        return type(item)
    return item.dtype


@functools.lru_cache(4096)
def _result_dtypes(ufunc: Any, kinds: tuple[Any, ...], asked: Any) -> tuple[Any, ...]:
    resolved = ufunc.resolve_dtypes((*kinds, *(None,) * ufunc.nout))[ufunc.nin :]
    if asked is None or resolved[0] == numpy.dtype("?"):
        return tuple(resolved)
    return (numpy.dtype(asked),) * ufunc.nout


def _reduced_dtype(ufunc: Any, x: Any) -> Any:
    if ufunc is numpy.add and x.dtype.kind in "?iu":
        return numpy.dtype("l")
    return x.dtype


def _is_basic(index: Any) -> bool:
    entries = index if type(index) is tuple else (index,)
    return all(e is None or e is ... or isinstance(e, slice) or _is_integer(e) for e in entries)


def _is_integer(entry: Any) -> bool:
    return hasattr(entry, "__index__") and not isinstance(entry, bool | numpy.ndarray)


def _gathered_shape(x: Phantom, index: Any) -> tuple[int, ...]:
    if isinstance(index, numpy.ndarray) and index.dtype.kind in "iu":
        return index.shape + x.shape[1:]
    entries = index if type(index) is tuple else (index,)
    if any(isinstance(e, numpy.ndarray) and e.dtype.kind == "?" for e in entries):
        raise NotRehearsedError("indexing by a mask", x.nbytes)
    if x.nbytes > 64 * MOST_TOUCHED_BYTES and len(entries) > 1:
        raise NotRehearsedError("indexing by several arrays", x.nbytes)
    plain = tuple(
        numpy.zeros(numpy.shape(e), numpy.intp) if isinstance(e, list | numpy.ndarray) else e
        for e in entries
    )
    return numpy.broadcast_to(numpy.zeros((), "?"), x.shape)[plain].shape


def _as_numpy_does(function: Any, given: Any, options: Any, name: str | None = None) -> Any:
    """Run NumPy's own over small arrays; refuse it for large ones."""
    name = name or getattr(function, "__name__", str(function))
    arrays = [item for item in _flat((given, options)) if isinstance(item, Phantom)]
    nbytes = sum(map(operator.attrgetter("nbytes"), arrays))
    if nbytes > MOST_TOUCHED_BYTES:
        raise NotRehearsedError(name, nbytes)
    result = function(*_mapped(given, _plain), **_mapped(options, _plain))
    made = _mapped(result, _phantom)
    present().work(nbytes)
    return made


def _flat(item: Any) -> list[Any]:
    if isinstance(item, dict):
        item = tuple(item.values())
    if isinstance(item, list | tuple):
        return [leaf for part in item for leaf in _flat(part)]
    return [item]


def _mapped(item: Any, change: Any) -> Any:
    if isinstance(item, dict):
        return {key: _mapped(part, change) for key, part in item.items()}
    if isinstance(item, list | tuple):
        return type(item)([_mapped(part, change) for part in item])
    return change(item)


def _plain(item: Any) -> Any:
    return item.view(numpy.ndarray) if isinstance(item, Phantom) else item


def _phantom(item: Any) -> Any:
    if not isinstance(item, numpy.ndarray | numpy.generic):
        return item
    made = new(numpy.shape(item), item.dtype)
    if made.nbytes <= MOST_TOUCHED_BYTES:
        _plain(made)[...] = item
    return made
