"""The functions of Chainer that CuPy 14 breaks give on a GPU what they give on a CPU."""

import warnings

import numpy as np
import pytest
from chainer import Variable, functions, links, using_config
from chainer.backends import cuda

pytestmark = pytest.mark.gpu

FLOATS = ["float16", "float32", "float64"]
TOLERANCE = {"float16": 2e-2, "float32": 1e-4, "float64": 1e-6}


def assert_same(on_gpu, on_cpu):
    assert on_gpu.dtype == on_cpu.dtype
    tolerance = TOLERANCE[on_cpu.dtype.name]
    np.testing.assert_allclose(on_gpu.get(), on_cpu, rtol=tolerance, atol=tolerance)


def outputs_and_gradients(function, arrays, gy=None):
    """Return the output of a function and the gradient of each array."""
    variables = [Variable(array) for array in arrays]
    y = function(*variables)
    y.grad = y.xp.ones_like(y.array) if gy is None else gy
    y.backward()
    return [y.array, *(variable.grad for variable in variables)]


def assert_same_on_both(function, arrays):
    on_cpu = outputs_and_gradients(function, arrays)
    on_gpu = outputs_and_gradients(function, [cuda.to_gpu(array) for array in arrays])
    for gpu, cpu in zip(on_gpu, on_cpu, strict=True):
        assert_same(gpu, cpu)


def uniform(*shape, dtype):
    return np.random.default_rng(1).uniform(-1, 1, shape).astype(dtype)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize(
    "limits",
    [
        (-0.75, 0.5),
        (np.float32(-0.75), np.float32(0.5)),
        (np.float64(-0.75), np.float64(0.5)),
        (None, np.float32(0.5)),
        (np.float64(-0.75), None),
        (-1, 2),
    ],
)
@pytest.mark.parametrize("shape", [(3, 2), ()])
def test_clip(cupy, dtype, limits, shape):
    x = uniform(*shape, dtype=dtype)
    assert_same_on_both(lambda x: functions.clip(x, *limits), [x])


@pytest.mark.parametrize("dtype", ["uint8", "uint16", "uint32", "int8", "int64", "bool", *FLOATS])
@pytest.mark.parametrize("padding", [0, -1, np.int64(-1)])
def test_pad_sequence(cupy, dtype, padding):
    xs = [np.arange(length * 3).reshape(length, 3).astype(dtype) for length in (2, 1, 5)]
    on_cpu = functions.pad_sequence(xs, padding=padding).array
    on_gpu = functions.pad_sequence([cupy.array(x) for x in xs], padding=padding).array
    assert on_gpu.dtype == on_cpu.dtype
    np.testing.assert_array_equal(on_gpu.get(), on_cpu)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("reduce", ["sum", "no"])
def test_negative_sampling(cupy, dtype, reduce):
    x, w = uniform(3, 4, dtype=dtype), uniform(5, 4, dtype=dtype)

    def function(x, w):
        def sample(shape):
            return x.xp.arange(np.prod(shape), dtype="int32").reshape(shape) % 5

        t = x.xp.array([-1, 1, 2], "int32")
        return functions.negative_sampling(x, t, w, sample, 2, reduce=reduce)

    assert_same_on_both(function, [x, w])


@pytest.mark.parametrize("dtype", FLOATS)
def test_hierarchical_softmax(cupy, dtype):
    tree = links.BinaryHierarchicalSoftmax.create_huffman_tree({0: 8, 1: 5, 2: 6, 3: 4})
    x, t = uniform(3, 4, dtype=dtype), np.array([0, 2, 3], "int32")
    with using_config("dtype", np.dtype(dtype)):
        link = links.BinaryHierarchicalSoftmax(4, tree, dtype=dtype)
    link.cleargrads()  # a new parameter's gradient is NaN
    on_cpu = outputs_and_gradients(lambda x: link(x, t), [x])
    gradient_on_cpu = link.W.grad
    link.cleargrads()
    link.to_device("@cupy:0")
    on_gpu = outputs_and_gradients(lambda x: link(x, cuda.to_gpu(t)), [cuda.to_gpu(x)])
    for gpu, cpu in zip([*on_gpu, link.W.grad], [*on_cpu, gradient_on_cpu], strict=True):
        assert_same(gpu, cpu)


@pytest.mark.parametrize("mode", ["bilinear", "nearest"])
def test_resize_images(cupy, mode):
    x = uniform(2, 3, 4, 5, dtype="float32")
    assert_same_on_both(lambda x: functions.resize_images(x, (8, 6), mode=mode), [x])


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("w_shape", [(), (2,), (2, 3, 4)])
def test_prelu(cupy, dtype, w_shape):
    x, w = uniform(1, 2, 3, 4, 5, 6, dtype=dtype), uniform(*w_shape, dtype=dtype)
    assert_same_on_both(functions.prelu, [x, w])


def test_prelu_sums_the_gradient_of_a_slope_in_single_precision(cupy):
    x, gy = uniform(64, 1000, dtype="float16"), uniform(64, 1000, dtype="float16") + np.float16(1)
    w = np.array(0.25, "float16")
    on_gpu = outputs_and_gradients(
        functions.prelu, [cuda.to_gpu(x), cuda.to_gpu(w)], gy=cuda.to_gpu(gy)
    )
    exact = (x.astype("float64") * gy)[x < 0].sum()
    np.testing.assert_allclose(float(on_gpu[2].get()), exact, rtol=6e-4)


def test_no_warning_asks_for_cudnn(cupy):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        cuda.check_cuda_available()
