"""cuDNN under Chainer gives what Chainer gives without it, and the same bits each time."""

import os

import numpy as np
import pytest
from chainer import Variable, functions, grad, links, using_config
from chainer.backends import cuda

from dynamemo import cudnn

pytestmark = pytest.mark.gpu

TOLERANCE = {"float16": 2e-2, "float32": 1e-4, "float64": 1e-6}
FLOATS = list(TOLERANCE)
SOURCES = ["graph", "legacy"]


@pytest.fixture(autouse=True)
def fresh():
    """Skip where cuDNN is not in use; start each test without plans, TF32 or a small limit."""
    if not cuda.cudnn_enabled:
        if os.environ.get("DYNAMEMO_REQUIRE_GPU") == "1":
            pytest.fail("DYNAMEMO_REQUIRE_GPU=1, but Chainer runs without cuDNN", pytrace=False)
        pytest.skip("Chainer runs without cuDNN")
    before = cuda.get_max_workspace_size()
    cuda.set_max_workspace_size(256 << 20)
    cudnn.forget()
    with cudnn.using_settings(tf32=False):
        yield
    cuda.set_max_workspace_size(before)


def uniform(*shape, dtype, seed=1):
    values = np.random.default_rng(seed).uniform(-1, 1, shape).astype(dtype)
    return cuda.to_gpu(values)


def outputs_and_gradients(function, arrays):
    """Return the output and, for a gradient of uniform noise, the gradient of each array."""
    variables = [Variable(array) for array in arrays]
    y = function(*variables)
    y.grad = uniform(*y.shape, dtype=y.dtype, seed=2)
    y.backward()
    return [y.array, *(variable.grad for variable in variables)]


def assert_close(one, other, scale=1.0):
    assert one.dtype == other.dtype
    tolerance = TOLERANCE[other.dtype.name] * scale
    cuda.cupy.testing.assert_allclose(
        one.astype("d"), other.astype("d"), rtol=tolerance, atol=tolerance
    )


def assert_same_as_without(function, arrays, *, scale=1.0, uses=True):
    before = cudnn.counters.runs
    with using_config("use_cudnn", "always"):
        with_cudnn = outputs_and_gradients(function, arrays)
    assert (cudnn.counters.runs > before) == uses
    with using_config("use_cudnn", "never"):
        without = outputs_and_gradients(function, arrays)
    for one, other in zip(with_cudnn, without, strict=True):
        assert_close(one, other, scale)


def same_bits(ones, others):
    return all((one == other).all() for one, other in zip(ones, others, strict=True))


CONVOLUTIONS = [
    {},
    {"stride": 2, "pad": 1},
    {"stride": (1, 2), "pad": (2, 0)},
    {"pad": 2, "dilate": 2},
    {"pad": 1, "groups": 2},
    {"pad": 1, "groups": 4, "stride": 2, "dilate": 2},
]


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("options", CONVOLUTIONS)
def test_convolution_2d(cupy, source, dtype, options):
    groups = options.get("groups", 1)
    arrays = [
        uniform(4, 8, 13, 11, dtype=dtype),
        uniform(12, 8 // groups, 3, 3, dtype=dtype),
        uniform(12, dtype=dtype),
    ]

    with cudnn.using_settings(source=source):
        assert_same_as_without(
            lambda x, w, b: functions.convolution_2d(x, w, b, **options), arrays, scale=3
        )


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("options", CONVOLUTIONS)
def test_deconvolution_2d(cupy, source, dtype, options):
    groups = options.get("groups", 1)
    arrays = [
        uniform(4, 8, 7, 6, dtype=dtype),
        uniform(8, 12 // groups, 3, 3, dtype=dtype),
        uniform(12, dtype=dtype),
    ]

    with cudnn.using_settings(source=source):
        assert_same_as_without(
            lambda x, w, b: functions.deconvolution_2d(x, w, b, **options), arrays, scale=3
        )


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("options", [{}, {"stride": 2, "pad": 1}, {"pad": 1, "groups": 2}])
def test_convolution_and_deconvolution_3d(cupy, dtype, options):
    groups = options.get("groups", 1)
    x, b = uniform(2, 4, 6, 7, 5, dtype=dtype), uniform(8, dtype=dtype)
    w = uniform(8, 4 // groups, 3, 3, 3, dtype=dtype)
    backwards = uniform(4, 8 // groups, 3, 3, 3, dtype=dtype)

    assert_same_as_without(
        lambda x, w, b: functions.convolution_nd(x, w, b, **options), [x, w, b], scale=3
    )
    assert_same_as_without(
        lambda x, w, b: functions.deconvolution_nd(x, w, b, **options), [x, backwards, b], scale=3
    )


def test_convolution_1d_is_chainers_own_and_ours_can_do_it(cupy):
    """Chainer asks cuDNN from two axes on; a program may call cupy.cudnn with one."""
    x, w = uniform(3, 4, 20, dtype="f"), uniform(6, 4, 3, dtype="f")
    y = cupy.empty((3, 6, 20), "f")

    cupy.cudnn.convolution_forward(
        x, w, None, y, (1,), (1,), (1,), 1, auto_tune=False, tensor_core="auto"
    )

    assert_close(y, functions.convolution_nd(x, w, pad=1).array)


def last(array):
    return cuda.cupy.ascontiguousarray(array.transpose(0, 2, 3, 1))


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_channels_last(cupy, dtype):
    """The arguments are those of Chainer's compute_mode "cudnn_fast"."""
    x, w, gy = (
        uniform(*shape, dtype=dtype) for shape in ((4, 8, 9, 9), (16, 8, 3, 3), (4, 16, 9, 9))
    )
    variables = Variable(x), Variable(w)
    with using_config("use_cudnn", "never"):
        y = functions.convolution_2d(*variables, pad=1)
        y.grad = gy
        y.backward()
    got_y, got_gx, got_gw = (cupy.empty(last(a).shape, dtype) for a in (gy, x, w))
    shape = ((1, 1), (1, 1), (1, 1), 1)
    layouts = {"d_layout": 1, "w_layout": 1, "auto_tune": False, "tensor_core": "auto"}

    cupy.cudnn.convolution_forward(last(x), last(w), None, got_y, *shape, **layouts)
    cupy.cudnn.convolution_backward_filter(
        last(x), last(gy), got_gw, *shape, deterministic=True, **layouts
    )
    cupy.cudnn.convolution_backward_data(
        last(w), last(gy), None, got_gx, *shape, deterministic=True, **layouts
    )

    for one, other in ((got_y, y.array), (got_gx, variables[0].grad), (got_gw, variables[1].grad)):
        assert_close(one, last(other), 3)


@pytest.mark.parametrize("mode", [1, 2])
@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_batch_normalization_channels_last(cupy, dtype, mode):
    x, parameter = uniform(4, 8, 6, 6, dtype=dtype), uniform(8, dtype="float32")
    running = cupy.zeros(8, "f")

    def forward(x, mode, layout):
        return cupy.cudnn.batch_normalization_forward_training_ex(
            *(x, parameter, parameter, running.copy(), running.copy(), None, None),
            *(2e-5, 0.9, True, mode, False, layout),
        )

    def backward(x, gy, forward_values, mode, layout):
        reserve, _, mean, inv_std = forward_values
        return cupy.cudnn.batch_normalization_backward(
            *(x, parameter, gy, mean, inv_std, 2e-5, True, mode, False, layout),
            reserve_space=reserve,
        )

    first, last_values = forward(x, 1, 0), forward(last(x), mode, 1)
    gradients = backward(x, x, first, 1, 0)
    last_gradients = backward(last(x), last(x), last_values, mode, 1)

    assert_close(last_values[1], last(first[1]), 5)
    assert_close(last_gradients[0], last(gradients[0]), 5)
    assert_close(last_gradients[1], gradients[1], 5)


def test_small_filters_with_views_at_odd_addresses(cupy):
    x = uniform(5 * 3 * 7 * 7 + 1, dtype="f")[1:].reshape(5, 3, 7, 7)
    w = uniform(4, 3, 3, 3, dtype="f")

    assert_same_as_without(lambda x, w: functions.convolution_2d(x, w, pad=1), [x, w])


def test_double_backprop(cupy):
    def second(x, w):
        y = functions.convolution_2d(x, w, pad=1)
        (gx,) = grad([y * y], [x], enable_double_backprop=True)
        return gx * gx

    arrays = [uniform(2, 3, 6, 6, dtype="d"), uniform(4, 3, 3, 3, dtype="d")]

    assert_same_as_without(second, arrays)


@pytest.mark.parametrize("tune", [False, True])
@pytest.mark.parametrize("is_asked", [False, True])
def test_the_same_bits_each_time(cupy, tune, is_asked):
    arrays = [
        uniform(32, 64, 28, 28, dtype="f"),
        uniform(64, 64, 3, 3, dtype="f"),
        uniform(64, dtype="f"),
    ]

    with using_config("autotune", tune), using_config("cudnn_deterministic", is_asked):
        first, second, third = (
            outputs_and_gradients(lambda x, w, b: functions.convolution_2d(x, w, b, pad=1), arrays)
            for _ in range(3)
        )

    assert same_bits(first, second)
    assert same_bits(first, third)


def test_without_autotune_the_same_plans_are_chosen_anew(cupy):
    arrays = [uniform(8, 16, 14, 14, dtype="f"), uniform(16, 16, 3, 3, dtype="f")]

    def tags():
        cudnn.forget()
        outputs_and_gradients(lambda x, w: functions.convolution_2d(x, w, pad=1), arrays)
        return [line.tag for line in cudnn.report()]

    assert tags() == tags()


@pytest.mark.parametrize("tune", [False, True])
def test_a_steady_loop_prepares_builds_and_measures_nothing(cupy, tune):
    arrays = [uniform(8, 16, 14, 14, dtype="f"), uniform(16, 16, 3, 3, dtype="f")]

    def step():
        outputs_and_gradients(lambda x, w: functions.convolution_2d(x, w, pad=1), arrays)

    with using_config("autotune", tune):
        step()
        before = cudnn.counters.prepared, cudnn.counters.builds, cudnn.counters.measured
        for _ in range(5):
            step()

    assert (cudnn.counters.prepared, cudnn.counters.builds, cudnn.counters.measured) == before


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("policy", ["none", "fastest", "free", "chainer"])
def test_workspace_policies(cupy, source, policy):
    limit = {"none": 64 << 10, "free": 20 << 20, "chainer": 4 << 20}.get(policy)
    cuda.set_max_workspace_size(4 << 20)
    arrays = [uniform(16, 64, 28, 28, dtype="f"), uniform(64, 64, 3, 3, dtype="f")]

    with (
        cudnn.using_settings(
            source=source, workspace=policy, available_bytes=lambda: 20 << 20, tf32=True
        ),
        using_config("autotune", True),
    ):
        outputs_and_gradients(lambda x, w: functions.convolution_2d(x, w, pad=1), arrays)
        report = cudnn.report()

    assert len(report) == 3
    for line in report:
        # Every algorithm of the older interface may want some: then it is the leanest.
        assert limit is None or line.workspace_bytes <= max(limit, line.least_workspace_bytes)
        assert limit is not None or line.elapsed_s is not None
    if source == "graph":
        assert all(line.least_workspace_bytes < 64 << 10 for line in report)


def test_plans_of_a_moment_give_the_same_bits_in_less_room(cupy):
    x, w = uniform(16, 64, 28, 28, dtype="f"), uniform(64, 64, 3, 3, dtype="f")

    def apply():
        return functions.convolution_2d(x, w, pad=1).array

    with cudnn.using_settings(tf32=True, workspace="fastest"):
        first, when = apply(), cudnn.moment()
    with cudnn.using_settings(tf32=True, workspace="none"):
        apply()
        with cudnn.as_of(when):
            again = apply()

    assert (first == again).all()


def test_tf32_only_where_it_is_allowed(cupy):
    x, w = uniform(8, 64, 14, 14, dtype="f"), uniform(64, 64, 3, 3, dtype="f")
    exact = functions.convolution_2d(x.astype("d"), w.astype("d"), pad=1).array

    def error(**settings):
        with cudnn.using_settings(**settings):
            y = functions.convolution_2d(x, w, pad=1).array
        return float(abs(y - exact).max())

    assert error(tf32=False) < 5e-4
    assert error(tf32=False, source="legacy") < 5e-4
    assert 5e-4 < error(tf32=True, workspace="fastest") < 5e-2


@pytest.mark.parametrize("is_fast", [False, True])
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("shape", [(8, 6, 5, 7), (8, 6)])
def test_batch_normalization(cupy, dtype, shape, is_fast):
    parameter = "float32" if dtype == "float16" else dtype
    arrays = [
        uniform(*shape, dtype=dtype),
        uniform(6, dtype=parameter),
        uniform(6, dtype=parameter),
    ]

    def run():
        running = cupy.zeros(6, parameter), cupy.ones(6, parameter)
        results = outputs_and_gradients(
            lambda *a: functions.batch_normalization(
                *a, running_mean=running[0], running_var=running[1]
            ),
            arrays,
        )
        return [*results, *running]

    with using_config("cudnn_fast_batch_normalization", is_fast):
        got = run()
    with using_config("use_cudnn", "never"):
        expected = run()

    for one, other in zip(got, expected, strict=True):
        assert_close(one, other, 5)


@pytest.mark.parametrize(
    "shape",
    [
        (64, 64, 56, 56),  # several blocks to a channel, several channels to a block
        (16, 512, 28, 28),
        (32, 2048, 7, 7),  # a block to a channel, elements one by one
        (2, 3, 300, 301),  # few channels
        (128, 1, 512, 512),  # more than fits: cuDNN's
        (20, 30, 40, 5, 3),
    ],
)
def test_batch_normalization_of_large_arrays(cupy, shape):
    """Against double precision; the mean is far from zero."""
    arrays = [uniform(*shape, dtype="f") + 5, *(uniform(shape[1], dtype="f") for _ in range(2))]

    def run(dtype):
        running = cupy.zeros(shape[1], dtype), cupy.ones(shape[1], dtype)
        results = outputs_and_gradients(
            lambda *a: functions.batch_normalization(
                *a, running_mean=running[0], running_var=running[1]
            ),
            [array.astype(dtype) for array in arrays],
        )
        return [*results, *running]

    got, again = run("f"), run("f")
    with using_config("use_cudnn", "never"):
        expected = run("d")

    assert same_bits(got, again)
    for one, other in zip(got, expected, strict=True):
        error = cupy.linalg.norm((one - other).ravel()) / cupy.linalg.norm(other.ravel())
        assert float(error) < 1e-5


@pytest.mark.parametrize("dtype", FLOATS)
def test_fixed_batch_normalization(cupy, dtype):
    parameter = "float32" if dtype == "float16" else dtype
    statistics = [uniform(6, dtype=parameter, seed=i) for i in range(3)]
    arrays = [uniform(4, 6, 5, 5, dtype=dtype), *statistics, abs(uniform(6, dtype=parameter)) + 1]

    with using_config("train", False):
        got = functions.fixed_batch_normalization(*arrays).array
        with using_config("use_cudnn", "never"):
            expected = functions.fixed_batch_normalization(*arrays).array

    assert_close(got, expected)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_group_normalization(cupy, dtype):
    arrays = [uniform(3, 6, 5, 5, dtype=dtype), uniform(6, dtype=dtype), uniform(6, dtype=dtype)]

    assert_same_as_without(
        lambda *a: functions.group_normalization(a[0], 3, a[1], a[2]), arrays, scale=5, uses=False
    )


POOLINGS = [
    lambda x: functions.max_pooling_2d(x, 3, 2),
    lambda x: functions.max_pooling_2d(x, 3, 2, pad=1, cover_all=False),
    lambda x: functions.average_pooling_2d(x, 3, 2, pad=1),
    lambda x: functions.average_pooling_nd(x, 3, 2, pad=1, pad_value=None),
    lambda x: functions.average_pooling_2d(x, x.shape[2:], stride=1),
]


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("pooling", POOLINGS)
def test_pooling_2d(cupy, dtype, pooling):
    assert_same_as_without(pooling, [uniform(3, 4, 10, 11, dtype=dtype)], uses=False)


@pytest.mark.parametrize("shape", [(3, 4, 40, 41), (5, 70, 7, 6), (2, 3, 130, 200)])
@pytest.mark.parametrize(
    # Without windows that lie outside: there cuDNN gives the least number, Chainer -infinity.
    "options",
    [(3, 2, 0), (3, 2, 1), (3, 1, 1), (2, 2, 0), ((2, 5), (3, 1), 0), (2, 3, 0, False)],
)
def test_max_pooling_gives_the_gradient_to_the_first_maximum(cupy, shape, options):
    x = cupy.maximum(uniform(*shape, dtype="f"), 0.5)  # full of ties

    assert_same_as_without(lambda x: functions.max_pooling_2d(x, *options), [x], uses=False)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("axis", [(0, 2, 3), (-1, 0, -2), (0, 1, 2), (0, 1, 2, 3), None])
def test_sums_over_all_but_the_channels(cupy, dtype, axis):
    x = uniform(16, 33, 30, 31, dtype=dtype)

    y = functions.sum(x, axis=axis).array

    assert y.dtype == dtype
    assert_close(y.astype("d"), x.astype("d").sum(axis=axis), 100)


@pytest.mark.parametrize("is_deterministic", [False, True])
def test_max_pooling_3d(cupy, is_deterministic):
    with using_config("cudnn_deterministic", is_deterministic):
        assert_same_as_without(
            lambda x: functions.max_pooling_nd(x, 2),
            [uniform(2, 3, 6, 5, 4, dtype="f")],
            uses=False,
        )


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("axis", [0, 1, -1])
@pytest.mark.parametrize("function", [functions.softmax, functions.log_softmax])
def test_softmax(cupy, dtype, axis, function):
    x = uniform(4, 5, 6, dtype=dtype)

    assert_same_as_without(lambda x: function(x, axis=axis), [x], uses=False)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize(
    "function",
    [functions.relu, functions.sigmoid, functions.tanh, lambda x: functions.clipped_relu(x, 0.5)],
)
@pytest.mark.parametrize("shape", [(4, 5), (3, 4, 5, 6), (7,), (0, 3)])
def test_activations(cupy, dtype, function, shape):
    assert_same_as_without(function, [uniform(*shape, dtype=dtype)], uses=False)


def test_dropout_draws_what_chainer_draws_without_cudnn(cupy):
    x = uniform(100, 30, dtype="f")

    def run():
        cupy.random.seed(3)
        results = outputs_and_gradients(lambda x: functions.dropout(x, 0.3), [x])
        return [*results, cupy.random.rand(4)]

    with_cudnn = run()
    with using_config("use_cudnn", "never"):
        without = run()

    assert same_bits(with_cudnn, without)


def test_spatial_transformer(cupy):
    theta, x = uniform(2, 2, 3, dtype="f"), uniform(2, 3, 8, 8, dtype="f")

    assert_same_as_without(
        lambda theta, x: functions.spatial_transformer_sampler(
            x, functions.spatial_transformer_grid(theta, (5, 6))
        ),
        [theta, x],
        uses=False,
        scale=10,
    )


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize(
    "name", ["NStepLSTM", "NStepBiLSTM", "NStepGRU", "NStepBiGRU", "NStepRNNTanh", "NStepRNNReLU"]
)
def test_recurrent_layers(cupy, dtype, name):
    with using_config("dtype", np.dtype(dtype)):
        link = getattr(links, name)(2, 5, 4, 0.0)
    # Biases of zero make a layer's input exactly zero where no unit below is active, and there
    # cuDNN and Chainer take different slopes of ReLU.
    for seed, param in enumerate(link.params()):
        param.array[...] = np.random.default_rng(seed).uniform(-1, 1, param.shape)
    link.to_device("@cupy:0")
    sequences = [uniform(length, 5, dtype=dtype, seed=length) for length in (6, 4, 3)]

    def run(*xs):
        link.cleargrads()
        return functions.concat(link(*([None] * (2 if "LSTM" in name else 1)), list(xs))[-1], 0)

    def results():
        got = outputs_and_gradients(run, sequences)
        return got + [param.grad.copy() for _, param in sorted(link.namedparams())]

    got = results()
    with using_config("use_cudnn", "never"):
        expected = results()

    for one, other in zip(got, expected, strict=True):
        assert_close(one, other, 10)


def test_recurrent_layers_with_dropout_run_and_drop(cupy):
    link = links.NStepLSTM(2, 5, 4, 0.5)
    link.to_device("@cupy:0")
    sequences = [uniform(length, 5, dtype="f") for length in (6, 4)]

    one, other = (link(None, None, sequences)[2][0].array for _ in range(2))

    assert not (one == other).all()


def test_on_another_stream(cupy):
    x, w = uniform(8, 16, 14, 14, dtype="f"), uniform(16, 16, 3, 3, dtype="f")
    expected = functions.convolution_2d(x, w, pad=1).array
    stream = cupy.cuda.Stream(non_blocking=True)
    stream.wait_event(cupy.cuda.get_current_stream().record())

    with stream:
        y = functions.relu(functions.convolution_2d(x, w, pad=1)).array
    stream.synchronize()

    assert (y == cupy.maximum(expected, 0)).all()


def test_training_in_two_runs_gives_the_same_bits(cupy):
    def train():
        np.random.seed(0)
        model = links.Convolution2D(3, 8, 3, pad=1)
        norm = links.BatchNormalization(8)
        model.to_device("@cupy:0")
        norm.to_device("@cupy:0")
        x = uniform(16, 3, 20, 20, dtype="f")
        for _ in range(3):
            model.cleargrads()
            loss = functions.sum(
                functions.max_pooling_2d(functions.relu(norm(model(x))), 3, 2) ** 2
            )
            loss.backward()
            model.W.array -= 1e-4 * model.W.grad
        return [loss.array, model.W.array, model.W.grad, norm.avg_var]

    assert same_bits(train(), train())
