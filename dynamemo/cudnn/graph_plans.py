"""Plans from cuDNN's graph interface: engines in the order of its heuristics, built when chosen.

Calls the C interface directly. NVIDIA's Python package for it (nvidia-cudnn-frontend) asks the same
library the same questions, but builds a C++ map and several descriptors at every execution, and
tells neither the numerical notes of a plan nor its workspace before it is built.

1. Without TF32 allowed, no plan for float32 uses tensor cores; no plan rounds float32 inputs to a
   narrower type by any other name.
2. A deterministic convolution gets no plan that cuDNN notes as non-deterministic.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Sequence
from enum import IntEnum

from dynamemo.cudnn import context, names
from dynamemo.cudnn.backend_descriptor import BackendDescriptor, Kind, Type
from dynamemo.cudnn.errors import CudnnError
from dynamemo.cudnn.library import Descriptor, Library, ffi
from dynamemo.cudnn.plans import Convolution, Direction

__all__ = ["GraphPlan", "GraphPlans", "Note", "is_allowed"]

#: Plans proposed for their speed at most; beyond them come only those with less workspace.
PROPOSED_AT_MOST = 16
#: Variant packs (finalised sets of addresses) that a plan keeps.
KEPT_PACKS = 64

#: Unique ids of the arrays in the graph, in the order of `GraphPlan.execute`.
X_ID, W_ID, Y_ID = 1, 2, 3


class Note(IntEnum):
    """``cudnnBackendNumericalNote_t``: what an engine does to numbers."""

    TENSOR_CORE = 0
    DOWN_CONVERT_INPUTS = 1
    REDUCED_PRECISION_REDUCTION = 2
    FFT = 3
    NONDETERMINISTIC = 4
    WINOGRAD = 5
    WINOGRAD_TILE_4X4 = 6
    WINOGRAD_TILE_6X6 = 7
    WINOGRAD_TILE_13X13 = 8
    STRICT_NAN_PROPAGATION = 9


class _Mode(IntEnum):
    """``cudnnBackendHeurMode_t``."""

    FALLBACK = 2
    A = 3


class _Attribute(IntEnum):
    """``cudnnBackendAttributeName_t``, those that are used."""

    CONVOLUTION_TYPE = 100
    CONVOLUTION_MODE = 101
    CONVOLUTION_DILATIONS = 102
    CONVOLUTION_STRIDES = 103
    CONVOLUTION_POST_PADS = 104
    CONVOLUTION_PRE_PADS = 105
    CONVOLUTION_AXES = 106
    HEURISTICS_MODE = 200
    HEURISTICS_GRAPH = 201
    HEURISTICS_RESULTS = 202
    CONFIGURATION_ENGINE = 300
    CONFIGURATION_KNOBS = 302
    CONFIGURATION_WORKSPACE = 303
    PLAN_HANDLE = 400
    PLAN_CONFIGURATION = 401
    PLAN_WORKSPACE = 402
    KNOB_TYPE = 600
    KNOB_VALUE = 601
    GRAPH_HANDLE = 800
    GRAPH_OPERATIONS = 801
    TENSOR_ALIGNMENT = 900
    TENSOR_TYPE = 901
    TENSOR_SHAPE = 902
    TENSOR_STRIDES = 903
    TENSOR_ID = 906
    PACK_IDS = 1000
    PACK_POINTERS = 1001
    PACK_WORKSPACE = 1003
    ENGINE_INDEX = 1301
    ENGINE_NUMERICAL_NOTES = 1303


#: Of each operation: its kind, and its attributes alpha, beta, convolution, w, x, y.
_OPERATIONS = {
    Direction.FORWARD: (Kind.CONVOLUTION_FORWARD, (700, 701, 702, 703, 704, 705)),
    Direction.DATA: (Kind.CONVOLUTION_DATA, (706, 707, 708, 709, 710, 711)),
    Direction.FILTER: (Kind.CONVOLUTION_FILTER, (712, 713, 714, 715, 716, 717)),
}

_KNOBS_AT_MOST = 44


class GraphPlans:
    """Asks cuDNN's heuristics for engines."""

    def __init__(self, library: Library) -> None:
        self._library = library

    def propose(self, convolution: Convolution, handle: int) -> Sequence[GraphPlan]:
        """Return plans by expected speed, not built yet; none where cuDNN has none."""
        try:
            graph = build_graph(self._library, convolution, handle)
        except CudnnError:
            return ()
        plans: dict[str, GraphPlan] = {}
        for mode in (_Mode.A, _Mode.FALLBACK):
            for configuration in self._configurations(graph, mode):
                plan = self._plan(convolution, configuration)
                if plan is not None:
                    plans.setdefault(plan.tag, plan)
        return _fast_and_lean(list(plans.values()))

    def _configurations(self, graph: BackendDescriptor, mode: _Mode) -> Iterator[BackendDescriptor]:
        heuristics = BackendDescriptor(self._library, Kind.HEURISTICS)
        with contextlib.suppress(CudnnError):
            heuristics.put(_Attribute.HEURISTICS_GRAPH, Type.DESCRIPTOR, graph)
            heuristics.put(_Attribute.HEURISTICS_MODE, Type.HEURISTICS_MODE, int(mode))
            heuristics.finalized()
            count = heuristics.count(_Attribute.HEURISTICS_RESULTS, Type.DESCRIPTOR)
            yield from heuristics.get_descriptors(
                _Attribute.HEURISTICS_RESULTS, Kind.ENGINE_CONFIGURATION, count
            )

    def _plan(self, convolution: Convolution, configuration: BackendDescriptor) -> GraphPlan | None:
        """Return the plan of an engine configuration, None where it must not be used."""
        try:
            (engine,) = configuration.get_descriptors(
                _Attribute.CONFIGURATION_ENGINE, Kind.ENGINE, 1
            )
            notes = frozenset(
                engine.get(_Attribute.ENGINE_NUMERICAL_NOTES, Type.NUMERICAL_NOTE, len(Note))
            )
            index = engine.find(_Attribute.ENGINE_INDEX, Type.INT64)
        except (CudnnError, ValueError):
            return None
        if not is_allowed(convolution, notes):
            return None
        return GraphPlan(self._library, configuration, f"engine {index}{_knobs(configuration)}")


def _fast_and_lean(plans: list[GraphPlan]) -> tuple[GraphPlan, ...]:
    """Return the first plans, and of the others each that needs less than all before it."""
    kept = plans[:PROPOSED_AT_MOST]
    for plan in plans[PROPOSED_AT_MOST:]:
        if plan.workspace_bytes < min(other.workspace_bytes for other in kept):
            kept.append(plan)
    return tuple(kept)


def is_allowed(convolution: Convolution, notes: frozenset[int]) -> bool:
    """Tell whether an engine with these numerical notes may do the convolution."""
    if convolution.is_deterministic and Note.NONDETERMINISTIC in notes:
        return False
    if not convolution.allow_tensor_core and Note.TENSOR_CORE in notes:
        return False
    if convolution.dtype_char == "f" and Note.DOWN_CONVERT_INPUTS in notes:
        return False
    # Sums in half precision, and Winograd with the largest tiles, lose more than Chainer allows.
    return Note.REDUCED_PRECISION_REDUCTION not in notes and Note.WINOGRAD_TILE_13X13 not in notes


def build_graph(library: Library, convolution: Convolution, handle: int) -> BackendDescriptor:
    """Return the graph of one operation, on the arrays that the convolution describes.

    Without a handle, 0, it needs no device, and has no plans.

    Raises
    ------
    CudnnError
        If cuDNN does not know such a convolution.
    """
    convolution = convolution.with_two_axes()
    kind, attributes = _OPERATIONS[convolution.direction]
    alpha, beta, description, w, x, y = attributes
    scale_type = Type.DOUBLE if convolution.dtype_char == "d" else Type.FLOAT
    operation = (
        BackendDescriptor(library, kind)
        .put(description, Type.DESCRIPTOR, _description(library, convolution))
        .put(x, Type.DESCRIPTOR, _tensor(library, convolution, X_ID))
        .put(w, Type.DESCRIPTOR, _tensor(library, convolution, W_ID))
        .put(y, Type.DESCRIPTOR, _tensor(library, convolution, Y_ID))
        .put(alpha, scale_type, 1.0)
        .put(beta, scale_type, 0.0)
        .finalized()
    )
    graph = BackendDescriptor(library, Kind.GRAPH)
    if handle:
        graph.put(_Attribute.GRAPH_HANDLE, Type.HANDLE, handle)
    return graph.put(_Attribute.GRAPH_OPERATIONS, Type.DESCRIPTOR, operation).finalized()


def _description(library: Library, convolution: Convolution) -> BackendDescriptor:
    is_double = convolution.dtype_char == "d"
    compute_type = names.CUDNN_DATA_DOUBLE if is_double else names.CUDNN_DATA_FLOAT
    return (
        BackendDescriptor(library, Kind.CONVOLUTION)
        .put(_Attribute.CONVOLUTION_AXES, Type.INT64, len(convolution.pad))
        .put(_Attribute.CONVOLUTION_TYPE, Type.DATA_TYPE, compute_type)
        .put(_Attribute.CONVOLUTION_MODE, Type.CONVOLUTION_MODE, names.CUDNN_CROSS_CORRELATION)
        .put(_Attribute.CONVOLUTION_PRE_PADS, Type.INT64, *convolution.pad)
        .put(_Attribute.CONVOLUTION_POST_PADS, Type.INT64, *convolution.pad)
        .put(_Attribute.CONVOLUTION_DILATIONS, Type.INT64, *convolution.dilation)
        .put(_Attribute.CONVOLUTION_STRIDES, Type.INT64, *convolution.stride)
        .finalized()
    )


def _tensor(library: Library, convolution: Convolution, uid: int) -> BackendDescriptor:
    raw_shape, layout = {
        X_ID: (convolution.x_shape, convolution.x_layout),
        W_ID: (convolution.w_shape, convolution.w_layout),
        Y_ID: (convolution.y_shape, convolution.x_layout),
    }[uid]
    strides = context.contiguous_strides(raw_shape)
    data_type = context._DATA_TYPES[convolution.dtype_char]
    return (
        BackendDescriptor(library, Kind.TENSOR)
        .put(_Attribute.TENSOR_TYPE, Type.DATA_TYPE, data_type)
        .put(_Attribute.TENSOR_SHAPE, Type.INT64, *context.channels_second(raw_shape, layout))
        .put(_Attribute.TENSOR_STRIDES, Type.INT64, *context.channels_second(strides, layout))
        .put(_Attribute.TENSOR_ID, Type.INT64, uid)
        .put(_Attribute.TENSOR_ALIGNMENT, Type.INT64, convolution.alignment_bytes)
        .finalized()
    )


def _knobs(configuration: BackendDescriptor) -> str:
    """Return the settings of an engine as text, nothing where cuDNN does not tell them."""
    with contextlib.suppress(CudnnError, IndexError):
        choices = configuration.get_descriptors(
            _Attribute.CONFIGURATION_KNOBS, Kind.KNOB_CHOICE, _KNOBS_AT_MOST
        )
        pairs = [
            (
                choice.get(_Attribute.KNOB_TYPE, Type.KNOB_TYPE)[0],
                choice.get(_Attribute.KNOB_VALUE, Type.INT64)[0],
            )
            for choice in choices
        ]
        return "".join(f" {kind}={value}" for kind, value in sorted(pairs))
    return ""


class GraphPlan:
    """One engine with its settings; the kernel is loaded or compiled by `build`.

    Parameters
    ----------
    library : Library
    configuration : BackendDescriptor
        The engine configuration.
    tag : str
    """

    def __init__(self, library: Library, configuration: BackendDescriptor, tag: str) -> None:
        self.tag = tag
        expected = configuration.find(_Attribute.CONFIGURATION_WORKSPACE, Type.INT64)
        #: Bytes; what the heuristics expect until the plan is built.
        self.workspace_bytes = max(expected or 0, 0)
        self._library = library
        self._configuration = configuration
        self._plan: BackendDescriptor | None = None
        self._pointer = 0
        self._packs: dict[tuple[int, int, int, int], Descriptor] = {}
        self._lock = threading.Lock()

    def build(self, handle: int) -> None:
        """Make the plan ready to run: milliseconds, or far more where a kernel is compiled.

        Raises
        ------
        CudnnError
            If the engine cannot do it after all.
        """
        with self._lock:
            if self._plan is not None:
                return
            plan = (
                BackendDescriptor(self._library, Kind.PLAN)
                .put(_Attribute.PLAN_HANDLE, Type.HANDLE, handle)
                .put(_Attribute.PLAN_CONFIGURATION, Type.DESCRIPTOR, self._configuration)
                .finalized()
            )
            self.workspace_bytes = plan.get(_Attribute.PLAN_WORKSPACE, Type.INT64)[0]
            self._pointer = plan.pointer
            self._plan = plan

    def execute(self, handle: int, x: int, w: int, y: int, workspace: int) -> None:
        """Enqueue the plan. Addresses that come again cost one call only."""
        key = (x, w, y, workspace)
        pack = self._packs.get(key)
        if pack is None:
            pack = self._new_pack(key)
        self._library.BackendExecute(handle, self._pointer, pack.value)

    def _new_pack(self, key: tuple[int, int, int, int]) -> Descriptor:
        library = self._library
        addresses = ffi.new("uintptr_t[5]", key)
        library.BackendCreateDescriptor(_PACK, addresses + 4)
        pack = Descriptor(addresses[4], library.BackendDestroyDescriptor)
        put = library.BackendSetAttribute
        put(pack.value, _PACK_IDS, _INT64, 3, _IDS)
        put(pack.value, _PACK_POINTERS, _POINTER, 3, addresses)
        put(pack.value, _PACK_WORKSPACE, _POINTER, 1, addresses + 3)
        library.BackendFinalize(pack.value)
        with self._lock:
            if len(self._packs) >= KEPT_PACKS:
                del self._packs[next(iter(self._packs))]
            self._packs[key] = pack
        return pack


_IDS = ffi.new("int64_t[]", [X_ID, W_ID, Y_ID])
# Plain integers: these are handed over at every call.
_PACK, _INT64, _POINTER = int(Kind.VARIANT_PACK), int(Type.INT64), int(Type.POINTER)
_PACK_IDS, _PACK_POINTERS = int(_Attribute.PACK_IDS), int(_Attribute.PACK_POINTERS)
_PACK_WORKSPACE = int(_Attribute.PACK_WORKSPACE)
