"""Every layer, over a library that checks each call against its declaration."""

import gc
import threading

import numpy
import pytest

from dynamemo.cudnn import (
    context,
    dropout,
    layers,
    modules,
    names,
    normalization,
    recurrent,
    transformer,
)
from dynamemo.cudnn.errors import CudnnError, NoPlanError
from dynamemo.cudnn.legacy_plans import LegacyPlans
from dynamemo.cudnn.library import load
from tests.cudnn.fakes import ALL_FUNCTIONS, QUERIED_BYTES, FakeArray

DTYPES = ["e", "f", "d"]


def array(*shape, dtype="f"):
    return numpy.ones(shape, dtype).view(FakeArray)


def normalize(x, parameter, mode, *, running=None, layout=0, is_for_conv2d=True):
    running = parameter if running is None else running
    return normalization.batch_normalization_forward_training_ex(
        *(x, parameter, parameter, running, running.copy(), None, None),
        *(2e-5, 0.9, is_for_conv2d, mode, False),
        d_layout=layout,
    )


@pytest.mark.parametrize("dtype", DTYPES)
def test_batch_normalization(fakes, dtype):
    _, functions = fakes
    x, parameter = array(4, 3, 5, 5, dtype=dtype), array(3, dtype=dtype)

    reserve, y, mean, inv_std = normalize(x, parameter, names.CUDNN_BATCHNORM_SPATIAL)
    gx, ggamma, gbeta = normalization.batch_normalization_backward(
        x, parameter, y, mean, inv_std, 2e-5, True, names.CUDNN_BATCHNORM_SPATIAL, False
    )
    out = normalization.batch_normalization_forward_inference(
        x, parameter, parameter, mean, inv_std, 2e-5, True, names.CUDNN_BATCHNORM_SPATIAL
    )

    wide = "f" if dtype == "e" else dtype
    assert reserve is None
    assert [a.dtype.char for a in (y, gx, out)] == [dtype] * 3
    assert [a.dtype.char for a in (mean, inv_std, ggamma, gbeta)] == [wide] * 4
    assert functions.names() == [
        "cudnnBatchNormalizationForwardTraining",
        "cudnnBatchNormalizationBackward",
        "cudnnBatchNormalizationForwardInference",
    ]
    assert functions.last("cudnnBatchNormalizationForwardTraining")[11] == pytest.approx(0.1)


def test_persistent_batch_normalization_hands_its_reserve_on(fakes):
    cupy, functions = fakes
    x, parameter = array(4, 5, 5, 8), array(8)

    reserve, y, mean, inv_std = normalize(
        x, parameter, names.CUDNN_BATCHNORM_SPATIAL_PERSISTENT, layout=names.CUDNN_TENSOR_NHWC
    )
    normalization.batch_normalization_backward(
        *(x, parameter, y, mean, inv_std, 2e-5, True),
        *(names.CUDNN_BATCHNORM_SPATIAL_PERSISTENT, False, names.CUDNN_TENSOR_NHWC),
        reserve_space=reserve,
    )

    assert functions.names() == [
        "cudnnBatchNormalizationForwardTrainingEx",
        "cudnnBatchNormalizationBackwardEx",
    ]
    for name in functions.names():
        assert functions.last(name)[-2:] == (reserve.ptr, QUERIED_BYTES)
    assert cupy.allocated == [QUERIED_BYTES] * 3


def test_running_statistics_in_half_precision_are_written_back(fakes):
    x, running = array(4, 3, 5, 5, dtype="e"), array(3, dtype="e")

    normalize(x, array(3), names.CUDNN_BATCHNORM_SPATIAL, running=running)

    assert running.dtype.char == "e"


def test_batch_normalization_over_the_last_axis(fakes):
    _, functions = fakes

    normalize(array(4, 5, 3), array(3), names.CUDNN_BATCHNORM_PER_ACTIVATION, is_for_conv2d=False)

    _, _, ndim, shape, _ = next(
        arguments for name, arguments in functions.calls if name == "cudnnSetTensorNdDescriptor"
    )
    assert list(shape[0:ndim]) == [20, 3, 1, 1]


@pytest.mark.parametrize("dtype", DTYPES)
def test_pooling(fakes, dtype):
    _, functions = fakes
    x, y = array(2, 3, 4, 4, 4, dtype=dtype), array(2, 3, 2, 2, 2, dtype=dtype)
    window = ((2, 2, 2), (2, 2, 2), (0, 0, 0), names.CUDNN_POOLING_MAX)

    layers.pooling_forward(x, y, *window)
    gx = layers.pooling_backward(x, y, y, *window)

    assert gx.shape == x.shape
    assert functions.names() == ["cudnnPoolingForward", "cudnnPoolingBackward"]


@pytest.mark.parametrize(("status", "error"), [(2000, NoPlanError), (5000, CudnnError)])
def test_only_a_refused_pooling_is_left_to_chainer(fakes, status, error):
    _, functions = fakes
    functions.statuses["cudnnPoolingForward"] = status

    with pytest.raises(CudnnError) as caught:
        layers.pooling_forward(array(1, 1, 4, 4), array(1, 1, 2, 2), (2, 2), (2, 2), (0, 0), 0)

    assert type(caught.value) is error


@pytest.mark.parametrize(("axis", "merged"), [(1, (2, 3, 20)), (-1, (24, 5, 1)), (0, (1, 2, 60))])
def test_softmax_along_an_axis(fakes, axis, merged):
    _, functions = fakes
    x = array(2, 3, 4, 5)

    y = layers.softmax_forward(x, axis, names.CUDNN_SOFTMAX_LOG)
    layers.softmax_backward(y, y, axis, names.CUDNN_SOFTMAX_LOG)

    assert functions.names() == ["cudnnSoftmaxForward", "cudnnSoftmaxBackward"]
    assert list(functions.last("cudnnSetTensorNdDescriptor")[3][0:3]) == list(merged)


@pytest.mark.parametrize("shape", [(), (3,), (2, 3), (2, 3, 4, 5, 6)])
def test_activations_of_any_shape(fakes, shape):
    _, functions = fakes
    x = array(*shape)

    y = layers.activation_forward(x, names.CUDNN_ACTIVATION_CLIPPED_RELU, 6.0)
    gx = layers.activation_backward(x, y, x, names.CUDNN_ACTIVATION_CLIPPED_RELU, 6.0)

    assert y.shape == gx.shape == shape
    assert functions.names() == ["cudnnActivationForward", "cudnnActivationBackward"]
    assert functions.last("cudnnSetActivationDescriptor")[3] == 6.0


def test_without_elements_cudnn_is_not_asked(fakes):
    _, functions = fakes
    x = array(0, 3)

    layers.activation_forward(x, names.CUDNN_ACTIVATION_RELU)
    layers.activation_backward(x, x, x, names.CUDNN_ACTIVATION_RELU)
    layers.softmax_forward(x, 1, names.CUDNN_SOFTMAX_LOG)
    layers.softmax_backward(x, x, 1, names.CUDNN_SOFTMAX_LOG)

    assert functions.calls == []


def test_descriptors_are_made_once_for_each_shape(fakes):
    _, functions = fakes

    for _ in range(3):
        layers.activation_forward(array(2, 3), names.CUDNN_ACTIVATION_TANH)

    created = [name for name, _ in functions.calls if "Create" in name]
    assert created == [
        "cudnnCreate",
        "cudnnCreateTensorDescriptor",
        "cudnnCreateActivationDescriptor",
    ]


@pytest.mark.parametrize("is_lstm", [False, True])
@pytest.mark.parametrize("direction", [names.CUDNN_UNIDIRECTIONAL, names.CUDNN_BIDIRECTIONAL])
def test_recurrent_layers(fakes, is_lstm, direction):
    _, functions = fakes
    states = dropout.DropoutStates(None, 5)
    directions = direction + 1
    hx, w, xs = array(2 * directions, 3, 4), array(50, 1, 1), array(7, 6)
    cx = array(*hx.shape) if is_lstm else None
    mode = names.CUDNN_LSTM if is_lstm else names.CUDNN_GRU
    lengths = [3, 3, 1]

    reserve, hy, cy, ys = recurrent.rnn_forward_training(
        states, direction, mode, hx, cx, w, xs, lengths
    )
    dhx, dcx, dxs = recurrent.rnn_backward_data(
        states, direction, mode, hx, cx, w, xs, ys, reserve, hy, cy, ys, lengths
    )
    dw = recurrent.rnn_backward_weights(states, direction, mode, xs, hx, ys, w, reserve, lengths)
    inferred = recurrent.rnn_forward_inference(states, direction, mode, hx, cx, w, xs, lengths)

    assert ys.shape == inferred[2].shape == (7, 4 * directions)
    assert (dhx.shape, dxs.shape, dw.shape) == (hx.shape, xs.shape, w.shape)
    assert (cy is None) == (dcx is None) == (not is_lstm)
    assert functions.names() == [
        "cudnnRNNForward",
        "cudnnRNNBackwardData_v8",
        "cudnnRNNBackwardWeights_v8",
        "cudnnRNNForward",
    ]
    settings = functions.last("cudnnSetRNNDescriptor_v8")
    assert settings[9:13] == (6, 4, 4, 2), "input, hidden, projection, layers"
    steps = functions.last("cudnnSetRNNDataDescriptor")
    assert list(steps[6][0:3]) == [3, 2, 2]


def test_recurrent_parameters_are_views(fakes):
    states = dropout.DropoutStates(None, 5)
    layer = recurrent.create_rnn_descriptor(
        4, 1, states._desc, 0, 0, names.CUDNN_GRU, names.CUDNN_DATA_FLOAT
    )
    x_descriptor = modules.create_tensor_nd_descriptor(array(1, 6, 1))
    w = array(50, 1, 1)

    nbytes = recurrent.getRNNParamsSize(1, layer.value, x_descriptor.value, 0)
    given = (1, layer, 0, x_descriptor, None, w, 0)
    matrix = recurrent.get_rnn_lin_layer_matrix_params(*given)
    bias = recurrent.get_rnn_lin_layer_bias_params(*given)
    matrix[...] = 2
    bias[...] = 3

    assert nbytes == QUERIED_BYTES
    assert w.ravel().tolist()[:10] == [1, 1, 2, 2, 2, 2, 2, 2, 3, 3]


def test_dropout_applied_again_gives_the_same(fakes):
    states = dropout.DropoutStates(None, 5)
    x = array(3, 4, dtype="e")

    is_kept, y = states.forward(None, x, 0.5)

    assert y.dtype == x.dtype
    assert (states.backward(None, x, 0.5, is_kept) == y).all()
    assert set(y.ravel().tolist()) <= {0.0, 2.0}


def test_spatial_transformer(fakes):
    _, functions = fakes
    shape = numpy.array((2, 1, 3, 4), numpy.int32)
    made = transformer.create_spatial_transformer_descriptor(
        names.CUDNN_SAMPLER_BILINEAR, numpy.dtype("f"), 4, shape.ctypes.data
    )

    transformer.spatialTfGridGeneratorForward(1, made.value, 2, 3)
    transformer.spatialTfGridGeneratorBackward(1, made.value, 2, 3)
    transformer.spatialTfSamplerForward(1, made.value, 2, 3, 4, 5, 6, 7, 8)
    transformer.spatialTfSamplerBackward(1, made.value, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13)

    assert len(functions.names()) == 4


def test_descriptors_are_destroyed_with_their_owners(fakes):
    _, functions = fakes

    made = modules.create_uninitialized_tensor_descriptor()
    assert functions.live["cudnnTensorDescriptor"] == 1
    del made
    gc.collect()

    assert functions.live["cudnnTensorDescriptor"] == 0


def test_each_thread_has_a_handle_and_each_handle_follows_the_stream(fakes):
    cupy, functions = fakes
    handles = {context.get_handle(), context.get_handle()}
    thread = threading.Thread(target=lambda: handles.add(context.get_handle()))
    thread.start()
    thread.join()
    cupy.stream = 11
    context.get_handle()

    assert len(handles) == 2
    assert functions.last("cudnnSetStream")[1] == 11
    assert [name for name, _ in functions.calls].count("cudnnSetStream") == 3


def test_a_failure_names_the_function_and_the_status(fakes):
    _, functions = fakes
    functions.statuses["cudnnSoftmaxForward"] = 3001

    with pytest.raises(CudnnError, match=r"cudnnSoftmaxForward.*MADE_UP.*3001") as caught:
        layers.softmax_forward(array(2, 3), 1, names.CUDNN_SOFTMAX_LOG)

    assert caught.value.is_refusal


def test_types_that_cudnn_does_not_take_are_named(fakes):
    with pytest.raises(TypeError, match="int32"):
        layers.softmax_forward(array(2, 3, dtype="i"), 1, names.CUDNN_SOFTMAX_LOG)


def test_the_legacy_source_without_algorithms_has_no_plans(fakes):
    from dynamemo.cudnn.plans import Convolution, Direction

    shape = ((1, 1), (1, 1), (1, 1), 1)
    for direction in Direction:
        wanted = Convolution(direction, "f", (2, 3, 5, 5), (4, 3, 3, 3), (2, 4, 5, 5), *shape)
        assert LegacyPlans(context.library).propose(wanted, 1) == ()


def test_every_declared_function_is_in_the_installed_library():
    try:
        library = load()
    except CudnnError as error:
        pytest.skip(str(error))

    assert [name for name in ALL_FUNCTIONS if not hasattr(library._functions, name)] == []
