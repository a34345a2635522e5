"""What kernels of our own work out: how it is shared out, and when cuDNN does it instead."""

import numpy
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynamemo.cudnn import elementwise, layers, names, normalization, resident_normalization
from dynamemo.cudnn.max_pooling_gradient import share_of
from dynamemo.cudnn.resident_normalization import Limits, layout_of
from tests.cudnn.fakes import FakeArray

SPATIAL = names.CUDNN_BATCHNORM_SPATIAL


def array(*shape, dtype="f"):
    return numpy.ones(shape, dtype).view(FakeArray)


@given(
    channels=st.integers(1, 5000),
    elements=st.integers(1, 1 << 24),
    arrays=st.integers(1, 2),
    multiprocessors=st.integers(1, 200),
    kibibytes=st.integers(16, 228),
)
def test_every_element_is_kept_by_one_block_and_waiting_blocks_are_all_running(
    channels, elements, arrays, multiprocessors, kibibytes
):
    limits = Limits(multiprocessors, kibibytes << 10, (kibibytes - 1) << 10)
    layout = layout_of(channels, elements, arrays, limits)

    if layout is None:
        assert elements * 4 * arrays > multiprocessors * (kibibytes - 4 << 10) / 2
        return
    assert layout.part * layout.group >= elements
    assert layout.part % 4 == 0
    assert layout.shared_bytes == layout.part * 4 * arrays <= (kibibytes - 1 << 10) - 1024
    assert 1 <= layout.groups <= channels
    if layout.group > 1:
        on_one = (kibibytes << 10) // (layout.shared_bytes + 1024 + 512)
        assert layout.blocks <= multiprocessors * min(on_one, 2)
        assert layout.group <= 512


def normalize(x, mode=SPATIAL, layout=0):
    channels = x.shape[3 if layout else 1]
    parameter = array(channels, dtype="d" if x.dtype.char == "d" else "f")
    reserve, y, mean, inv_std = normalization.batch_normalization_forward_training_ex(
        *(x, parameter, parameter, parameter, parameter, None, None),
        *(2e-5, 0.9, True, mode, False, layout),
    )
    return normalization.batch_normalization_backward(
        *(x, parameter, y, mean, inv_std, 2e-5, True, mode, False, layout), reserve_space=reserve
    )


@pytest.mark.parametrize("area", [(56, 56), (21, 21)])
def test_large_arrays_are_normalised_by_one_launch_in_each_direction(fakes, area):
    cupy, functions = fakes
    x = array(64, 64, *area)

    gx, ggamma, gbeta = normalize(x)

    assert functions.names() == []
    assert [launch.name for launch in cupy.launches] == ["normalize", "normalize_backward"]
    width = 4 if area == (56, 56) and not x.data.ptr & 15 else 1
    for launch in cupy.launches:
        assert launch.options == (f"-DWIDTH={width}",)
        assert launch.is_cooperative
        assert launch.numbers[:3] == [64, area[0] * area[1], 64 * area[0] * area[1]]
        assert launch.addresses[0] == x.data.ptr
        assert launch.addresses[9] - launch.addresses[8] == launch.blocks * 16
    assert cupy.launches[0].scalars == pytest.approx([2e-5, 0.1])
    assert (gx.shape, ggamma.shape, gbeta.shape) == (x.shape, (64,), (64,))


def test_a_block_that_has_a_channel_to_itself_waits_for_nobody(fakes):
    cupy, _ = fakes

    normalize(array(16, 512, 7, 7))

    for launch in cupy.launches:
        assert not launch.is_cooperative
        assert launch.blocks == 512
        assert launch.addresses[8:] == [0, 0]


@pytest.mark.parametrize(
    ("x", "options"),
    [
        (array(2, 3, 4, 4), {}),
        (array(16, 64, 32, 32, dtype="e"), {}),
        (array(16, 64, 32, 32, dtype="d"), {}),
        (array(16, 32, 32, 64), {"layout": names.CUDNN_TENSOR_NHWC}),
        (array(16, 64, 32, 32), {"mode": names.CUDNN_BATCHNORM_SPATIAL_PERSISTENT}),
        (array(2, 1, 2000, 2000), {}),
    ],
    ids=["small", "half", "double", "nhwc", "persistent", "too large"],
)
def test_what_is_not_done_here_is_left_to_cudnn(fakes, x, options, monkeypatch):
    cupy, functions = fakes
    if x.shape[2] == 2000:
        limits = Limits(32, 64 << 10, 63 << 10)
        monkeypatch.setattr(resident_normalization, "_limits_of", lambda device: limits)

    normalize(x, **options)

    assert cupy.launches == []
    assert len(functions.names()) == 2


def test_a_device_without_cooperative_launch_leaves_all_to_cudnn(fakes, monkeypatch):
    cupy, functions = fakes
    none = {"CooperativeLaunch": 0}
    monkeypatch.setattr(cupy.cuda, "Device", lambda *_: type("Device", (), {"attributes": none}))

    normalize(array(16, 64, 32, 32))

    assert (cupy.launches, len(functions.names())) == ([], 2)


def at(array, offset):
    """Return the array's data from an address that is a multiple of 16 but for an offset."""
    memory = numpy.zeros(array.nbytes + 32, numpy.uint8).view(FakeArray)
    start = -memory.data.ptr % 16 + offset
    copied = memory[start : start + array.nbytes].view(array.dtype).reshape(array.shape)
    copied[...] = array
    return copied


@pytest.mark.parametrize("size", [1, 4, 7, 2048, 2049])
def test_relu_takes_four_elements_at_a_time_and_what_is_left(fakes, size, monkeypatch):
    cupy, functions = fakes
    monkeypatch.setattr(cupy, "empty", lambda shape, dtype: at(array(*shape), 0))
    x = at(array(size), 0)

    y = layers.activation_forward(x, names.CUDNN_ACTIVATION_RELU)
    gx = layers.activation_backward(y, y, x, names.CUDNN_ACTIVATION_RELU)

    forward, backward = cupy.launches
    assert forward.addresses[:2] == [x.data.ptr, y.data.ptr]
    assert backward.addresses[:3] == [y.data.ptr, x.data.ptr, gx.data.ptr]
    for launch in cupy.launches:
        assert launch.numbers[0] == size
        assert launch.blocks * 512 > size // 4
    assert functions.names() == []


@pytest.mark.parametrize(
    ("x", "mode"),
    [
        (at(array(8), 4), names.CUDNN_ACTIVATION_RELU),
        (array(8, dtype="e"), names.CUDNN_ACTIVATION_RELU),
        (array(8, dtype="d"), names.CUDNN_ACTIVATION_RELU),
        (array(8), names.CUDNN_ACTIVATION_TANH),
    ],
)
def test_other_activations_are_left_to_cudnn(fakes, x, mode):
    cupy, functions = fakes

    y = layers.activation_forward(x, mode)
    layers.activation_backward(x, y, x, mode)

    assert functions.names() == ["cudnnActivationForward", "cudnnActivationBackward"]
    assert cupy.launches == []


@pytest.mark.parametrize(
    ("y", "is_ours"),
    [
        (at(array(2, 3, 6, 6), 0), True),
        (at(array(2, 3, 6, 6), 4), False),
        (at(array(2, 3, 5, 5), 0), False),
        (at(array(2, 3, 6, 6, dtype="d"), 0), False),
    ],
)
def test_a_bias_is_added_to_four_elements_at_a_time(fakes, y, is_ours):
    cupy, _ = fakes
    bias = array(3, dtype=y.dtype)

    assert elementwise.add_bias(y, bias, y.shape[2] * y.shape[3]) is is_ours

    for launch in cupy.launches:
        assert launch.numbers[:3] == [y.size, 9, 3]
        assert launch.addresses[:2] == [y.data.ptr, bias.data.ptr]
    assert len(cupy.launches) == is_ours


@given(
    h=st.integers(1, 300),
    w=st.integers(1, 6000),
    kernel=st.integers(1, 9),
    step=st.integers(1, 9),
    pad=st.integers(0, 4),
    data=st.data(),
)
def test_a_block_has_room_for_every_window_of_its_rows(h, w, kernel, step, pad, data):
    pad = min(pad, kernel - 1)
    oh, ow = ((size + 2 * pad - kernel) // step + 1 for size in (h, w))
    if oh < 1 or ow < 1:
        return
    share = share_of(h, w, oh, ow, (kernel, kernel, step, step, pad, pad))

    if share is None:
        assert ow * 8 * 2 > 40 << 10 or kernel > step
        return
    assert 1 <= share.rows <= h
    assert share.planes == 1 or share.rows == h
    assert share.shared_bytes <= 48 << 10
    first = data.draw(st.integers(0, (h - 1) // share.rows)) * share.rows
    last = min(h, first + share.rows) - 1
    touching = [o for o in range(oh) if o * step - pad <= last and first < o * step - pad + kernel]
    assert len(touching) * ow * share.planes <= share.windows


@pytest.mark.parametrize("mode", [0, 3])
def test_the_gradient_of_max_pooling_is_one_launch(fakes, mode):
    cupy, functions = fakes
    x, y = array(2, 3, 112, 100), array(2, 3, 56, 50)

    gx = layers.pooling_backward(x, y, y, (3, 2), (2, 2), (1, 0), mode)

    (launch,) = cupy.launches
    assert launch.addresses[:3] == [x.data.ptr, y.data.ptr, gx.data.ptr]
    assert launch.numbers[:10] == [112, 100, 56, 50, 3, 2, 2, 2, 1, 0]
    rows, planes, all_planes = launch.numbers[10:]
    assert (planes, all_planes) == (1, 6)
    assert launch.blocks == 6 * -(-112 // rows)
    assert functions.names() == []


@pytest.mark.parametrize(
    ("x", "y", "mode"),
    [
        (array(1, 2, 4, 4), array(1, 2, 2, 2), names.CUDNN_POOLING_AVERAGE_COUNT_EXCLUDE_PADDING),
        (array(1, 2, 4, 4, dtype="e"), array(1, 2, 2, 2, dtype="e"), names.CUDNN_POOLING_MAX),
        (array(1, 2, 4, 4, dtype="d"), array(1, 2, 2, 2, dtype="d"), names.CUDNN_POOLING_MAX),
        (array(1, 1, 4, 40000), array(1, 1, 2, 20000), names.CUDNN_POOLING_MAX),
    ],
    ids=["average", "half", "double", "too wide"],
)
def test_other_poolings_are_left_to_cudnn(fakes, x, y, mode):
    cupy, functions = fakes

    layers.pooling_backward(x, y, y, (2, 2), (2, 2), (0, 0), mode)

    assert functions.names() == ["cudnnPoolingBackward"]
    assert cupy.launches == []
