"""What kernels of our own work out: how it is shared out, and when cuDNN does it instead."""

import numpy
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynamemo.cudnn import layers, names, normalization, resident_normalization
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
    assert [name for name, _ in cupy.launches] == ["normalize", "normalize_backward"]
    width = 4 if area == (56, 56) and not x.data.ptr & 15 else 1
    for (_, launch), count in zip(cupy.launches, (10 + 7, 10 + 5), strict=True):
        assert launch["options"][0] == f"-DWIDTH={width}"
        assert launch["enable_cooperative_groups"]
        numbers = launch["arguments"][10:15]
        assert [type(number) for number in numbers] == [numpy.uint32] * 5
        assert numbers[:3] == (64, area[0] * area[1], 64 * area[0] * area[1])
        assert len(launch["arguments"]) == count
    assert (gx.shape, ggamma.shape, gbeta.shape) == (x.shape, (64,), (64,))


def test_a_block_that_has_a_channel_to_itself_waits_for_nobody(fakes):
    cupy, _ = fakes

    normalize(array(16, 512, 7, 7))

    assert [launch["enable_cooperative_groups"] for _, launch in cupy.launches] == [False, False]
    assert [launch["blocks"] for _, launch in cupy.launches] == [512, 512]
    assert all(launch["arguments"][8:10] == (0, 0) for _, launch in cupy.launches)


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


@pytest.mark.parametrize("dtype", ["e", "f", "d"])
@pytest.mark.parametrize("mode", [0, 3])
def test_the_gradient_of_max_pooling_goes_to_the_first_maximum(fakes, dtype, mode):
    _, functions = fakes
    x, y = array(1, 2, 4, 5, dtype=dtype), array(1, 2, 2, 2, dtype=dtype)

    gx = layers.pooling_backward(x, y, y, (2, 3), (2, 2), (0, 0), mode)

    expected = [[1, 0, 1, 0, 0], [0] * 5] * 2
    assert gx[0].tolist() == [expected, expected]
    assert functions.names() == []


def test_other_poolings_are_left_to_cudnn(fakes):
    _, functions = fakes
    x, y = array(1, 2, 4, 4), array(1, 2, 2, 2)

    layers.pooling_backward(
        x, y, y, (2, 2), (2, 2), (0, 0), names.CUDNN_POOLING_AVERAGE_COUNT_EXCLUDE_PADDING
    )

    assert functions.names() == ["cudnnPoolingBackward"]
