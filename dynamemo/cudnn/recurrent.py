"""Recurrent layers over packed sequences, with the signatures that Chainer calls.

Chainer was written for an interface that cuDNN 9 no longer has; this is it, on the one that took
its place. There a descriptor of a layer also holds the length of the input vectors, which Chainer
tells later: every function here that learns it sets the descriptor once more.

Sequences are packed: ``xs`` is ``(sum of lengths, vector)``, all first steps, then all second ones;
``lengths[t]`` is how many sequences have a step ``t``, and never grows.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Sequence
from typing import Any

from dynamemo.cudnn import context, names, settings
from dynamemo.cudnn.dropout import DropoutStates
from dynamemo.cudnn.library import Descriptor, ffi

__all__ = [
    "create_rnn_descriptor",
    "getRNNParamsSize",
    "get_rnn_lin_layer_bias_params",
    "get_rnn_lin_layer_matrix_params",
    "rnn_backward_data",
    "rnn_backward_weights",
    "rnn_forward_inference",
    "rnn_forward_training",
    "sequence_lengths",
]

_DOUBLE_BIAS = 2
_INFERENCE, _TRAINING = 0, 1
_ADD_TO_GRADIENT = 0


class _Layer(Descriptor):
    """Descriptor of a recurrent layer, and all that has to be said to set it again."""

    __slots__ = ("_dropout", "_fixed", "_hidden", "_layers")

    def __init__(
        self,
        hidden_size: int,
        layers: int,
        dropout: Descriptor,
        *,
        cell: int,
        direction: int,
        input_mode: int,
        data_type: int,
    ) -> None:
        box = ffi.new("uintptr_t *")
        context.library.CreateRNNDescriptor(box)
        super().__init__(int(box[0]), context.library.DestroyRNNDescriptor)
        is_double = data_type == names.CUDNN_DATA_DOUBLE
        precision = names.CUDNN_DATA_DOUBLE if is_double else names.CUDNN_DATA_FLOAT
        self._fixed = (
            *(names.CUDNN_RNN_ALGO_STANDARD, cell, _DOUBLE_BIAS, direction, input_mode),
            *(data_type, precision, _math_type(data_type)),
        )
        self._hidden, self._layers, self._dropout = hidden_size, layers, dropout
        _known[self.value] = self
        self.set_input(hidden_size)

    def set_input(self, input_size: int) -> None:
        context.library.SetRNNDescriptor_v8(
            *(self.value, *self._fixed, input_size, self._hidden, self._hidden, self._layers),
            *(self._dropout.value, names.CUDNN_RNN_PADDED_IO_DISABLED),
        )


#: Layers by what cuDNN knows them by, which is all that Chainer hands over in one place.
_known: weakref.WeakValueDictionary[int, _Layer] = weakref.WeakValueDictionary()


def create_rnn_descriptor(
    hidden_size: int,
    num_layers: int,
    dropout_desc: Descriptor,
    input_mode: int,
    direction: int,
    mode: int,
    data_type: int,
    algo: int | None = None,
) -> Descriptor:
    """Return a new descriptor of recurrent layers; the standard algorithm is always used."""
    return _Layer(
        hidden_size,
        num_layers,
        dropout_desc,
        cell=mode,
        direction=direction,
        input_mode=input_mode,
        data_type=data_type,
    )


def getRNNParamsSize(  # noqa: N802  as in CuPy
    handle: int,
    rnnDesc: int,  # noqa: N803
    xDesc: int,  # noqa: N803
    dataType: int,  # noqa: N803
) -> int:
    """Return the bytes of all weights and biases together."""
    _known[rnnDesc].set_input(_vector_length(xDesc))
    return context.byte_count(context.library.GetRNNWeightSpaceSize, handle, rnnDesc)


def get_rnn_lin_layer_matrix_params(
    handle: int, rnn_desc: Any, layer: int, x_desc: Any, w_desc: Any, w: Any, lin_layer_id: int
) -> Any:
    """Return the part of `w` that holds one weight matrix, flat: a view."""
    return _parameters(handle, rnn_desc, layer, x_desc, w, lin_layer_id)[0]


def get_rnn_lin_layer_bias_params(
    handle: int, rnn_desc: Any, layer: int, x_desc: Any, w_desc: Any, w: Any, lin_layer_id: int
) -> Any:
    """Return the part of `w` that holds one bias, flat: a view."""
    return _parameters(handle, rnn_desc, layer, x_desc, w, lin_layer_id)[1]


def _parameters(
    handle: int, rnn_desc: _Layer, layer: int, x_desc: Descriptor, w: Any, linear_layer: int
) -> tuple[Any, Any]:
    library = context.library
    rnn_desc.set_input(_vector_length(x_desc.value))
    descriptors = library.create("Tensor"), library.create("Tensor")
    addresses = ffi.new("uintptr_t[2]")
    library.GetRNNWeightParams(
        *(handle, rnn_desc.value, layer, w.nbytes, w.data.ptr, linear_layer),
        *(descriptors[0].value, addresses, descriptors[1].value, addresses + 1),
    )
    flat = w.reshape(w.size)
    views = []
    for descriptor, address in zip(descriptors, addresses, strict=True):
        start = (address - w.data.ptr) // w.dtype.itemsize
        views.append(flat[start : start + math.prod(_shape(descriptor.value))])
    return views[0], views[1]


def rnn_forward_inference(
    states: DropoutStates,
    direction_mode: int,
    rnn_mode: int,
    hx: Any,
    cx: Any,
    w: Any,
    xs: Any,
    lengths: Sequence[int],
) -> tuple[Any, Any, Any]:
    """Apply recurrent layers without what backward needs.

    Parameters
    ----------
    states : DropoutStates
    direction_mode, rnn_mode : int
        ``CUDNN_UNIDIRECTIONAL`` or ``CUDNN_BIDIRECTIONAL``; ``CUDNN_LSTM`` and the like.
    hx, cx : cupy.ndarray
        ``(layers × directions, sequences, hidden)``; `cx` is None but for LSTM.
    w : cupy.ndarray
        All weights and biases as cuDNN lays them out.
    xs : cupy.ndarray
        ``(sum of lengths, vector)``.

    Returns
    -------
    tuple
        Last hidden state, last cell state or None, and the outputs.
    """
    return _forward(_Pass(states, direction_mode, rnn_mode, hx, xs, lengths), _INFERENCE, cx, w)[1:]


def rnn_forward_training(
    states: DropoutStates,
    direction_mode: int,
    rnn_mode: int,
    hx: Any,
    cx: Any,
    w: Any,
    xs: Any,
    lengths: Sequence[int],
) -> tuple[Any, Any, Any, Any]:
    """Apply recurrent layers; the first value returned is the reserve memory for backward.

    See `rnn_forward_inference`.
    """
    return _forward(_Pass(states, direction_mode, rnn_mode, hx, xs, lengths), _TRAINING, cx, w)


def rnn_backward_data(
    states: DropoutStates,
    direction_mode: int,
    rnn_mode: int,
    hx: Any,
    cx: Any,
    w: Any,
    xs: Any,
    ys: Any,
    reserve_space: Any,
    dhy: Any,
    dcy: Any,
    dys: Any,
    lengths: Sequence[int],
) -> tuple[Any, Any, Any]:
    """Return the gradients of `hx`, of `cx` (None but for LSTM) and of `xs`.

    Changes the reserve memory: `rnn_backward_weights` comes after it.
    """
    step = _Pass(states, direction_mode, rnn_mode, hx, xs, lengths)
    w, ys, dys, dhy = (context.contiguous(array) for array in (w, ys, dys, dhy))
    dhx = context.cupy.empty(step.hx.shape, step.hx.dtype)
    dxs = context.cupy.empty(step.xs.shape, step.xs.dtype)
    cell, dcx = (0, 0, 0, 0), None
    if cx is not None:
        cx, dcy = context.contiguous(cx), context.contiguous(dcy)
        dcx = context.cupy.empty(cx.shape, cx.dtype)
        cell = (step.h.value, cx.data.ptr, dcy.data.ptr, dcx.data.ptr)
    workspace_bytes, reserve_bytes = step.scratch_bytes(_TRAINING)
    workspace = context.allocate(workspace_bytes)
    context.library.RNNBackwardData_v8(
        *(step.handle, step.rnn.value, 0, step.y.value, ys.data.ptr, dys.data.ptr),
        *(step.x.value, dxs.data.ptr),
        *(step.h.value, step.hx.data.ptr, dhy.data.ptr, dhx.data.ptr, *cell),
        *(w.nbytes, w.data.ptr, workspace_bytes, context.address(workspace)),
        *(reserve_bytes, context.address(reserve_space)),
    )
    return dhx, dcx, dxs


def rnn_backward_weights(
    states: DropoutStates,
    direction_mode: int,
    rnn_mode: int,
    xs: Any,
    hx: Any,
    ys: Any,
    w: Any,
    reserve_space: Any,
    lengths: Sequence[int],
) -> Any:
    """Return the gradient of all weights and biases, laid out as `w` is."""
    step = _Pass(states, direction_mode, rnn_mode, hx, xs, lengths)
    ys = context.contiguous(ys)
    dw = context.cupy.zeros(w.shape, w.dtype)
    workspace_bytes, reserve_bytes = step.scratch_bytes(_TRAINING)
    workspace = context.allocate(workspace_bytes)
    context.library.RNNBackwardWeights_v8(
        *(step.handle, step.rnn.value, _ADD_TO_GRADIENT, 0, step.x.value, step.xs.data.ptr),
        *(step.h.value, step.hx.data.ptr, step.y.value, ys.data.ptr),
        *(dw.nbytes, dw.data.ptr, workspace_bytes, context.address(workspace)),
        *(reserve_bytes, context.address(reserve_space)),
    )
    return dw


class _Pass:
    """The descriptors of one pass through recurrent layers."""

    def __init__(
        self,
        states: DropoutStates,
        direction: int,
        cell: int,
        hx: Any,
        xs: Any,
        lengths: Sequence[int],
    ) -> None:
        self.handle = context.get_handle()
        self.hx, self.xs = context.contiguous(hx), context.contiguous(xs)
        directions = 2 if direction == names.CUDNN_BIDIRECTIONAL else 1
        hidden = hx.shape[2]
        self.rnn = _Layer(
            hidden,
            hx.shape[0] // directions,
            states._desc,
            cell=cell,
            direction=direction,
            input_mode=names.CUDNN_LINEAR_INPUT,
            data_type=context.get_data_type(xs.dtype),
        )
        self.rnn.set_input(xs.shape[1])
        self.y_shape = (xs.shape[0], hidden * directions)
        self.x = _sequences(xs.dtype, xs.shape[1], lengths)
        self.y = _sequences(xs.dtype, hidden * directions, lengths)
        self.h = context.tensor_descriptor(hx.dtype, hx.shape)

    def scratch_bytes(self, mode: int) -> tuple[int, int]:
        """Return the bytes of workspace and of reserve memory."""
        boxes = ffi.new("size_t[2]")
        context.library.GetRNNTempSpaceSizes(
            self.handle, self.rnn.value, mode, self.x.value, boxes, boxes + 1
        )
        return int(boxes[0]), int(boxes[1])


def _forward(step: _Pass, mode: int, cx: Any, w: Any) -> tuple[Any, Any, Any, Any]:
    w = context.contiguous(w)
    hy = context.cupy.empty(step.hx.shape, step.hx.dtype)
    ys = context.cupy.empty(step.y_shape, step.xs.dtype)
    cell, cy = (0, 0, 0), None
    if cx is not None:
        cx = context.contiguous(cx)
        cy = context.cupy.empty(cx.shape, cx.dtype)
        cell = (step.h.value, cx.data.ptr, cy.data.ptr)
    workspace_bytes, reserve_bytes = step.scratch_bytes(mode)
    workspace, reserve = context.allocate(workspace_bytes), context.allocate(reserve_bytes)
    context.library.RNNForward(
        *(step.handle, step.rnn.value, mode, 0, step.x.value, step.xs.data.ptr),
        *(step.y.value, ys.data.ptr, step.h.value, step.hx.data.ptr, hy.data.ptr, *cell),
        *(w.nbytes, w.data.ptr, workspace_bytes, context.address(workspace)),
        *(reserve_bytes, context.address(reserve)),
    )
    return reserve, hy, cy, ys


def _sequences(dtype: Any, vector: int, lengths: Sequence[int]) -> Descriptor:
    """Return the descriptor of packed sequences of vectors."""
    descriptor: Descriptor = context.library.create("RNNData")
    steps = sequence_lengths(lengths)
    context.library.SetRNNDataDescriptor(
        *(descriptor.value, context.get_data_type(dtype)),
        *(names.CUDNN_RNN_DATA_LAYOUT_SEQ_MAJOR_PACKED, len(lengths), len(steps), vector),
        *(context.ints(steps), ffi.NULL),
    )
    return descriptor


def sequence_lengths(lengths: Sequence[int]) -> tuple[int, ...]:
    """Turn the number of sequences at each step into the number of steps of each sequence.

    >>> sequence_lengths([3, 2, 2, 1])
    (4, 3, 1)
    """
    return tuple(sum(1 for count in lengths if count > place) for place in range(int(lengths[0])))


def _math_type(data_type: int) -> int:
    if data_type == names.CUDNN_DATA_HALF:
        return names.CUDNN_TENSOR_OP_MATH
    if data_type == names.CUDNN_DATA_FLOAT and not settings.tensor_core_is_allowed("f", "auto"):
        return names.CUDNN_FMA_MATH
    return names.CUDNN_DEFAULT_MATH


def _vector_length(descriptor: int) -> int:
    """Return the second extent of a tensor."""
    return _shape(descriptor)[1]


def _shape(descriptor: int) -> tuple[int, ...]:
    most = 8
    kind, ndim = ffi.new("int *"), ffi.new("int *")
    shape, strides = ffi.new("int[]", most), ffi.new("int[]", most)
    context.library.GetTensorNdDescriptor(descriptor, most, kind, ndim, shape, strides)
    return tuple(shape[i] for i in range(ndim[0]))
