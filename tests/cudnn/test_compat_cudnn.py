"""When cuDNN is put in place for Chainer, what is said where it is not, and the way without it."""

import gc
import sys
import warnings
import weakref
from types import SimpleNamespace

import chainer
import numpy
import pytest

from dynamemo import compat_cudnn
from dynamemo.cudnn import NoPlanError, modules, settings
from dynamemo.cudnn.library import Library
from tests.cudnn.fakes import FakeCupy, FakeFunctions


@pytest.fixture
def cupy(monkeypatch):
    """Give a CuPy 14 to import; the switches are as they are by default."""
    module = FakeCupy()
    monkeypatch.setitem(sys.modules, "cupy", module)
    for name in ("cupy.cudnn", "cupy.cuda.cudnn"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.delenv("CHAINER_CUDNN", raising=False)
    monkeypatch.delenv("DYNAMEMO_CUDNN", raising=False)
    monkeypatch.setattr(compat_cudnn, "_reason", None)
    monkeypatch.setattr(modules, "load", lambda: Library(FakeFunctions()))
    yield module
    for name in ("cupy.cudnn", "cupy.cuda.cudnn"):
        sys.modules.pop(name, None)


def test_both_modules_are_put_in_place(cupy, fakes):
    compat_cudnn.prepare()

    assert sys.modules["cupy.cudnn"] is cupy.cudnn
    assert sys.modules["cupy.cuda.cudnn"] is cupy.cuda.cudnn
    assert cupy.cuda.cudnn.getVersion() == 91900
    assert compat_cudnn._reason is None


@pytest.mark.parametrize("switch", ["CHAINER_CUDNN", "DYNAMEMO_CUDNN"])
def test_a_switch_leaves_it_out_and_says_nothing(cupy, monkeypatch, switch):
    monkeypatch.setenv(switch, "0")

    compat_cudnn.prepare()

    assert not hasattr(cupy, "cudnn")
    assert compat_cudnn._reason is None


def test_an_older_cupy_is_left_as_it_is(cupy):
    cupy.__version__ = "13.6.0"

    compat_cudnn.prepare()

    assert not hasattr(cupy, "cudnn")


def test_without_cupy_nothing_is_done(cupy, monkeypatch):
    monkeypatch.setitem(sys.modules, "cupy", None)

    compat_cudnn.prepare()

    assert compat_cudnn._reason is None


def test_a_cudnn_for_another_cuda_is_not_used(cupy):
    cupy.cuda.runtime.runtimeGetVersion = lambda: 12090

    compat_cudnn.prepare()

    assert not hasattr(cupy, "cudnn")
    assert "extra cuda12" in compat_cudnn._reason


def test_missing_cudnn_is_told_once_and_tells_what_to_install(cupy, monkeypatch):
    monkeypatch.undo()
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    monkeypatch.setenv("DYNAMEMO_CUDNN_LIBRARY", "/nowhere/libcudnn.so.9")
    monkeypatch.setattr(compat_cudnn, "_reason", None)
    cuda = SimpleNamespace(check_cuda_available=lambda: None, cudnn_enabled=False)

    compat_cudnn.prepare()
    compat_cudnn._mend_backend(cuda)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        cuda.check_cuda_available()
        cuda.check_cuda_available()

    assert not hasattr(cupy, "cudnn")
    (warning,) = caught
    assert "without cuDNN" in str(warning.message)
    assert "extra cuda12 or cuda13" in str(warning.message)


def test_the_choice_of_plans_sees_chainers_switch(fakes):
    compat_cudnn._mend_backend(SimpleNamespace(cudnn_enabled=True, config=chainer.config))

    assert not settings.must_repeat()
    with chainer.using_config("cudnn_deterministic", True):
        assert settings.must_repeat()


def test_where_cudnn_has_no_plan_chainers_own_path_is_taken():
    seen = []

    class Function:
        used_cudnn = False

        def forward_gpu(self, inputs):
            self.used_cudnn |= chainer.config.use_cudnn != "never"
            seen.append(chainer.config.use_cudnn)
            if chainer.config.use_cudnn != "never":
                raise NoPlanError("none")
            return inputs

    module = SimpleNamespace(
        cuda=SimpleNamespace(cudnn_enabled=True), chainer=chainer, Function=Function
    )
    compat_cudnn._mend_functions(("Function",), "forward_gpu", used_cudnn=False)(module)
    function = Function()

    assert function.forward_gpu((1,)) == (1,)
    assert not function.used_cudnn
    assert seen == ["auto", "never"]
    assert chainer.config.use_cudnn == "auto"


def test_without_cudnn_chainers_functions_are_left_alone():
    class Function:
        def forward_gpu(self, inputs):
            return inputs

    original = Function.forward_gpu
    module = SimpleNamespace(cuda=SimpleNamespace(cudnn_enabled=False), Function=Function)
    compat_cudnn._mend_functions(("Function",), "forward_gpu")(module)

    assert Function.forward_gpu is original


def mended_sum(ndarray):
    """Return a `Sum` like Chainer's after its mend, for which `ndarray` is CuPy's."""

    class Sum:
        def __init__(self, axis, keepdims=False):
            self.axis, self.keepdims = axis, keepdims

        def forward(self, inputs):
            return ("in one step",)

    cuda = SimpleNamespace(cudnn_enabled=True, ndarray=ndarray)
    backends = SimpleNamespace(backends=SimpleNamespace(cuda=cuda))
    compat_cudnn._mend_sum(SimpleNamespace(Sum=Sum, chainer=backends))
    return Sum


@pytest.mark.parametrize("axis", [(0, 2, 3), (-1, 0, 2)])
@pytest.mark.parametrize("dtype", ["f", "d"])
def test_a_sum_over_all_but_the_channels_is_done_in_two_steps(axis, dtype):
    x = numpy.random.default_rng(0).uniform(size=(8, 5, 100, 100)).astype(dtype)

    (y,) = mended_sum(numpy.ndarray)(axis).forward((x,))

    assert y.dtype == dtype
    numpy.testing.assert_allclose(y, x.sum(axis=(0, 2, 3)), rtol=1e-5)


@pytest.mark.parametrize(
    ("x", "options"),
    [
        (numpy.ones((8, 5, 10, 10), "f"), {"axis": (0, 2, 3)}),
        (numpy.ones((8, 5, 100, 100), "e"), {"axis": (0, 2, 3)}),
        (numpy.ones((8, 5, 100, 100), "f"), {"axis": (0, 1, 3)}),
        (numpy.ones((8, 5, 100, 100), "f"), {"axis": None}),
        (numpy.ones((8, 5, 100, 100), "f"), {"axis": (0, 2, 3), "keepdims": True}),
        (numpy.ones((100, 100, 5, 8), "f").transpose(3, 2, 0, 1), {"axis": (0, 2, 3)}),
    ],
    ids=["small", "half", "other axes", "all axes", "keepdims", "not contiguous"],
)
def test_other_sums_are_chainers(x, options):
    assert mended_sum(numpy.ndarray)(**options).forward((x,)) == ("in one step",)


def test_sums_of_other_arrays_are_chainers():
    x = numpy.ones((8, 5, 100, 100), "f")

    assert mended_sum(FakeCupy)((0, 2, 3)).forward((x,)) == ("in one step",)


def test_cudnns_pooling_leaves_its_function_to_the_reference_count():
    """Chainer's own objects refer to each other: a pooling layer kept all before it alive."""
    from chainer.functions.pooling import max_pooling_nd, pooling_nd

    function = max_pooling_nd.MaxPoolingND(2, 2)
    function._cudnn_pool = pooling_nd._CudnnPoolingNDImpl(function)
    assert function._cudnn_pool.func is function
    gone = weakref.ref(function)
    gc.disable()
    try:
        del function
        assert gone() is None
    finally:
        gc.enable()
