"""Stand-ins for cuDNN and CuPy, over which everything but the arithmetic runs.

`FakeFunctions` has every C function that is declared, and checks each call against its declaration:
the number of arguments, and that each converts to its C type. `FakeCupy` has NumPy arrays in host
memory that answer like CuPy's.
"""

from __future__ import annotations

import functools
import itertools
import re
from collections import Counter
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy

from dynamemo.cudnn import context, kernels
from dynamemo.cudnn.declarations import DECLARATIONS
from dynamemo.cudnn.library import Library, ffi

ALL_FUNCTIONS = tuple(re.findall(r"\bcudnn\w+(?=\()", DECLARATIONS))
_PROTOTYPES = {
    name: [part.strip() for part in " ".join(arguments.split()).split(",")]
    for name, arguments in re.findall(r"\b(cudnn\w+)\(([^)]*)\)", DECLARATIONS)
}
#: Of an H200.
ATTRIBUTES = {
    "CooperativeLaunch": 1,
    "MultiProcessorCount": 132,
    "MaxSharedMemoryPerMultiprocessor": 233472,
    "MaxSharedMemoryPerBlockOptin": 232448,
}
#: Bytes that every query of a size gives.
QUERIED_BYTES = 640


class FakeFunctions:
    """Declared functions that do nothing, and note what they were called with."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, tuple[Any, ...]]] = []
        self.live: Counter[str] = Counter()
        self._numbers = itertools.count(1000)
        self._shapes: dict[int, list[int]] = {}
        #: Status that functions return, by name.
        self.statuses: dict[str, int] = {}

    def cudnnGetVersion(self) -> int:
        return 91900

    def cudnnGetCudartVersion(self) -> int:
        return 13010

    def cudnnGetErrorString(self, status: int) -> Any:
        return ffi.new("char[]", b"CUDNN_STATUS_MADE_UP")

    def cudnnGetLastErrorString(self, message: Any, max_size: int) -> None:
        message[0] = b"\0"

    def __getattr__(self, name: str) -> Any:
        if name not in _PROTOTYPES:
            raise AttributeError(name)

        def function(*arguments: Any) -> int:
            self._check(name, arguments)
            self.calls.append((name, arguments))
            self._do(name, arguments)
            return self.statuses.get(name, 0)

        return function

    def names(self) -> list[str]:
        """Return the functions called that are not about descriptors and handles."""
        return [n for n, _ in self.calls if not re.search(r"Create|Destroy|Set|Get|Derive", n)]

    def last(self, name: str) -> tuple[Any, ...]:
        """Return the arguments of the last call of a function."""
        return next(args for called, args in reversed(self.calls) if called == name)

    def _check(self, name: str, arguments: tuple[Any, ...]) -> None:
        declared = _PROTOTYPES[name]
        assert len(arguments) == len(declared), (name, declared, arguments)
        for text, argument in zip(declared, arguments, strict=True):
            if "*" in text:
                assert isinstance(argument, ffi.CData), (name, text, argument)
                continue
            # Raises what a true call would raise: for None, floats in place of integers, overflow.
            c_type = text.rsplit(" ", 1)[0].replace("const ", "")
            ffi.new(f"{c_type} *", argument)

    def _do(self, name: str, arguments: tuple[Any, ...]) -> None:
        if name == "cudnnCreate" or re.fullmatch(r"cudnnCreate\w+Descriptor", name):
            arguments[0][0] = next(self._numbers)
            self.live[name.replace("Create", "")] += 1
        elif name == "cudnnDestroy" or re.fullmatch(r"cudnnDestroy\w+Descriptor", name):
            self.live[name.replace("Destroy", "")] -= 1
        elif name == "cudnnSetTensorNdDescriptor":
            self._shapes[arguments[0]] = list(arguments[3][0 : arguments[2]])
        elif name == "cudnnGetTensorNdDescriptor":
            shape = self._shapes[arguments[0]]
            arguments[3][0] = len(shape)
            arguments[4][0 : len(shape)] = shape
        elif name == "cudnnGetRNNWeightParams":
            self._shapes[arguments[6]] = [1, 2, 3]
            self._shapes[arguments[8]] = [1, 2, 1]
            arguments[7][0], arguments[9][0] = arguments[4] + 8, arguments[4] + 32
        elif re.search(r"Size$|Sizes$|SpaceSize", name):
            for argument in arguments:
                if isinstance(argument, ffi.CData) and ffi.typeof(argument).item.cname == "size_t":
                    argument[0] = QUERIED_BYTES


class FakeArray(numpy.ndarray):
    """A NumPy array that tells its address as CuPy's does."""

    @property
    def data(self) -> Any:  # type: ignore[override]
        return SimpleNamespace(ptr=self.__array_interface__["data"][0], device_id=0)


class FakeMemory:
    """What the fake allocator gives."""

    def __init__(self, nbytes: int) -> None:
        self._bytes = numpy.empty(nbytes, numpy.uint8)
        self.ptr = self._bytes.__array_interface__["data"][0]
        self.mem = SimpleNamespace(size=nbytes)

    def memset_async(self, value: int, nbytes: int) -> None:
        self._bytes[:nbytes] = value


class FakeEvent:
    """An event of a clock that `FakeCupy` holds."""

    def __init__(self, cupy: FakeCupy) -> None:
        self._cupy = cupy
        self.time_ms = 0.0

    def record(self) -> None:
        self.time_ms = self._cupy.clock_ms

    def synchronize(self) -> None:
        self._cupy.waits += 1


class Launch(NamedTuple):
    """A kernel of our own that was launched."""

    name: str
    options: tuple[str, ...]
    is_cooperative: bool
    blocks: int
    shared_bytes: int
    addresses: list[int]
    numbers: list[int]
    scalars: list[float]


def read_arguments(place: int) -> tuple[list[int], list[int], list[float]]:
    """Read the structure that is the only argument of our kernels."""
    given = kernels._ffi.cast("arguments_t **", place)[0]
    return list(given.at), list(given.numbers), list(given.scalars)


class FakeCupy:
    """The part of CuPy that is used."""

    __version__ = "14.0.0"
    dtype = numpy.dtype
    float32 = numpy.float32
    bool_ = numpy.bool_

    def __init__(self) -> None:
        self.stream = 7
        self.device = 0
        #: The time on the device, and how often the host waited for it.
        self.clock_ms = 0.0
        self.waits = 0
        self.allocated: list[int] = []
        #: Larger requests of memory fail.
        self.limit_bytes = 1 << 40
        #: The kernels launched.
        self.launches: list[Launch] = []
        self._kernels: list[tuple[str, Any]] = []
        self.random = SimpleNamespace(rand=self._rand)
        self.cuda = SimpleNamespace(
            device=SimpleNamespace(get_device_id=lambda: self.device),
            runtime=SimpleNamespace(runtimeGetVersion=lambda: 13010),
            get_current_stream=lambda: SimpleNamespace(ptr=self.stream),
            get_elapsed_time=lambda start, stop: stop.time_ms - start.time_ms,
            driver=SimpleNamespace(
                launchKernel=functools.partial(self._launch, False),
                launchCooperativeKernel=functools.partial(self._launch, True),
            ),
            Event=lambda: FakeEvent(self),
            Device=lambda *_: SimpleNamespace(compute_capability="90", attributes=ATTRIBUTES),
            alloc=self._alloc,
        )

    def empty(self, shape: Any, dtype: Any) -> Any:
        return numpy.empty(shape, dtype).view(FakeArray)

    def zeros(self, shape: Any, dtype: Any) -> Any:
        return numpy.zeros(shape, dtype).view(FakeArray)

    def ascontiguousarray(self, array: Any) -> Any:
        return numpy.ascontiguousarray(array).view(FakeArray)

    def ElementwiseKernel(self, inputs: str, outputs: str, operation: str, name: str) -> Any:
        return {
            "dynamemo_add_bias": _add_bias,
            "dynamemo_dropout_forward": _dropout_forward,
            "dynamemo_dropout_backward": _dropout_backward,
        }[name]

    def RawKernel(self, source: str, name: str, options: Any) -> Any:
        self._kernels.append((name, options))
        return SimpleNamespace(kernel=SimpleNamespace(ptr=len(self._kernels) - 1))

    def _launch(self, is_cooperative: bool, function: int, blocks: int, *rest: int) -> None:
        name, options = self._kernels[function]
        shared_bytes, stream, place = rest[5:8]
        assert stream == self.stream
        self.launches.append(
            Launch(name, options, is_cooperative, blocks, shared_bytes, *read_arguments(place))
        )

    def _rand(self, *shape: int, dtype: Any) -> Any:
        return numpy.random.RandomState(0).rand(*shape).astype(dtype)

    def _alloc(self, nbytes: int) -> FakeMemory:
        if nbytes > self.limit_bytes:
            raise MemoryError(nbytes)
        self.allocated.append(nbytes)
        return FakeMemory(nbytes)


def _add_bias(x: Any, bias: Any, area: int, channels: int, y: Any) -> None:
    places = numpy.arange(x.size) // area % channels
    y[...] = x + bias[places].reshape(x.shape)


def _dropout_forward(x: Any, random: Any, scale: Any, ratio: float, is_kept: Any, y: Any) -> None:
    is_kept[...] = random >= ratio
    y[...] = x * (is_kept * scale)


def _dropout_backward(gy: Any, is_kept: Any, scale: Any, gx: Any) -> None:
    gx[...] = gy * (is_kept * scale)


def attach_fakes() -> tuple[FakeCupy, FakeFunctions]:
    """Put both in place, and return them."""
    cupy, functions = FakeCupy(), FakeFunctions()
    context.attach(cupy, Library(functions))
    return cupy, functions
