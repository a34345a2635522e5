"""Chainer imports and runs beside the NumPy, Python and setuptools of today."""

import importlib.metadata
import subprocess
import sys
import textwrap
from pathlib import Path

import numpy as np
import pytest

from dynamemo import compat

ROOT = Path(__file__).parents[2]


def run_python(program: str, *options: str) -> str:
    """Run a program in a fresh interpreter with warnings as errors; return what it printed."""
    result = subprocess.run(
        [sys.executable, "-W", "error", *options, "-c", textwrap.dedent(program)],
        capture_output=True,
        text=True,
        cwd=ROOT,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    return result.stdout.strip()


def test_chainer_imports_after_dynamemo():
    assert run_python("import dynamemo, chainer; print(chainer.__version__)") == "7.8.1"


def test_chainer_imports_after_numpy_and_dynamemo():
    assert run_python("import numpy, dynamemo, chainer; print(chainer.__version__)") == "7.8.1"


def test_chainer_imports_again_after_an_import_that_failed_before_dynamemo():
    printed = run_python(
        """
        try:
            import chainer
        except (AttributeError, ImportError, Warning) as error:
            print("failed")
        import dynamemo, chainer
        chainer.functions.relu(chainer.Variable(chainer.backends.cuda.numpy.ones(3, "f")))
        print(chainer.__version__)
        """
    )
    assert printed.splitlines()[-1] == "7.8.1"


def test_chainer_imported_before_dynamemo_is_mended_where_it_stands():
    printed = run_python(
        """
        import sys, types, numpy as np
        np.sctypes = {"int": [np.int8, np.int16, np.int32, np.int64], "float": [np.float32]}
        sys.modules["pkg_resources"] = types.SimpleNamespace(
            require=lambda name: {}[name], DistributionNotFound=LookupError,
            VersionConflict=ValueError, WorkingSet=None, ResolutionError=None)
        system_info = types.ModuleType("numpy.distutils.system_info")
        np.distutils = types.ModuleType("numpy.distutils")
        np.distutils.system_info = system_info
        sys.modules |= {
            "numpy.distutils": np.distutils, "numpy.distutils.system_info": system_info}
        import chainer
        import dynamemo
        image = np.ones((1, 1, 2, 2), "f")
        print(chainer.functions.resize_images(image, (3, 3)).array.sum())
        """
    )
    assert printed == "9.0"


def test_nothing_but_chainer_sees_a_stand_in():
    printed = run_python(
        """
        import builtins, sys, numpy
        before = dict(vars(builtins))
        import dynamemo, chainer, chainer.testing
        print([name for name in ("sctypes", "float") if hasattr(numpy, name)],
              [name for name in ("pkg_resources", "numpy.distutils") if name in sys.modules],
              dict(vars(builtins)) == before)
        """
    )
    assert printed == "[] [] True"


def test_hooked_module_keeps_its_loader_and_its_builtins():
    printed = run_python(
        """
        import builtins, importlib, inspect, dynamemo, chainer
        import chainer.functions.array.as_strided as module
        for _ in range(2):
            print(type(module.__loader__).__name__, module.__loader__ is module.__spec__.loader,
                  module.__builtins__ is builtins, "np.sctypes" in inspect.getsource(module))
            importlib.reload(module)
        """
    )
    assert printed.splitlines() == ["SourceFileLoader True True True"] * 2


def test_import_starts_no_thread_and_loads_neither_chainer_nor_cupy():
    printed = run_python(
        """
        import sys, threading, dynamemo
        print(threading.active_count(), [m for m in ("chainer", "cupy") if m in sys.modules])
        """
    )
    assert printed == "1 []"


def test_install_twice_leaves_one_finder():
    before = list(sys.meta_path)
    compat.install()
    assert sys.meta_path == before


def test_arrays_go_together_as_chainer_says():
    import chainer

    class Derived(np.ndarray):
        pass

    x = np.zeros(2)
    theirs = chainer.is_arrays_compatible.__wrapped__
    cases = [
        (x, x),
        [x, None],
        (),
        (None,),
        (x, x.view(Derived)),
        (x, 1.0),
        ([1],),
        [x.view(Derived)],
    ]
    for arrays in cases:
        assert chainer.is_arrays_compatible(arrays) is theirs(arrays), arrays


def test_as_strided_gives_gradients():
    from chainer import Variable, functions

    x = Variable(np.arange(4, dtype=np.float32))
    y = functions.as_strided(x, (3, 2), (1, 1))
    y.grad = np.ones_like(y.array)
    y.backward()
    assert x.grad.tolist() == [1, 2, 2, 1]


@pytest.mark.parametrize(
    ("mode", "align_corners"), [("bilinear", False), ("nearest", False), ("bilinear", True)]
)
def test_resize_images_keeps_a_constant_image_and_sums_gradients(mode, align_corners):
    from chainer import Variable, functions

    x = Variable(np.full((2, 3, 4, 5), 7, dtype=np.float32))
    y = functions.resize_images(x, (8, 6), mode=mode, align_corners=align_corners)
    functions.sum(y).backward()
    np.testing.assert_allclose(y.array, np.full((2, 3, 8, 6), 7, dtype=np.float32), rtol=1e-6)
    np.testing.assert_allclose(x.grad.sum(), y.size, rtol=1e-6)


@pytest.mark.parametrize(
    "dtype", ["uint8", "uint16", "uint32", "uint64", "int8", "int64", "float32"]
)
@pytest.mark.parametrize("padding", [-1, np.int64(-1)])
def test_pad_sequence_wraps_an_integer_that_the_type_does_not_hold(dtype, padding):
    from chainer import functions

    xs = [np.ones(1, dtype), np.ones(2, dtype)]
    expected = np.array([[1, np.array(-1).astype(dtype)], [1, 1]], dtype)
    y = functions.pad_sequence(xs, padding=padding).array
    assert y.dtype == expected.dtype
    assert y.tolist() == expected.tolist()


def test_pad_sequence_keeps_a_padding_that_is_no_integer():
    from chainer import functions

    xs = [np.ones(1, np.float32), np.ones(2, np.float32)]
    assert functions.pad_sequence(xs, padding=float("inf")).array[0, 1] == np.inf


def test_chainermn_unpacks_parameters_sent_in_another_type():
    printed = run_python(
        """
        import sys, types
        mpi4py, mpi = types.ModuleType("mpi4py"), types.ModuleType("mpi4py.MPI")
        mpi4py.MPI, mpi4py.__path__ = mpi, []
        mpi.__getattr__ = lambda name: type(name, (), {})
        sys.modules |= {"mpi4py": mpi4py, "mpi4py.MPI": mpi}
        import dynamemo, chainer, numpy as np
        from chainermn.communicators import _memory_utility

        class Buffer:
            def to_device(self, array, nbytes, offset, stream):
                array[...] = 7
                print(array.dtype, nbytes, end=" ")

        for sent in ("float16", "float32"):
            parameter = chainer.Parameter(np.ones(3, "float32"))
            _memory_utility.unpack_params([parameter], "grad", Buffer(), np.dtype(sent), True)
            print(parameter.grad.dtype, parameter.grad.tolist())
        """
    )
    assert printed.splitlines() == [
        "float16 6 float32 [7.0, 7.0, 7.0]",
        "float32 12 float32 [7.0, 7.0, 7.0]",
    ]


def test_require_compares_versions():
    version = importlib.metadata.version("numpy")
    compat.require("numpy", f"numpy=={version}", "chainer>=7")
    with pytest.raises(compat.VersionConflict, match=version):
        compat.require("numpy<1")
    with pytest.raises(compat.DistributionNotFound, match="is not installed"):
        compat.require("no-such-distribution>=1")


def test_chainer_testing_can_ask_for_requirements():
    from chainer.testing import helper

    @helper.with_requires("numpy>=2")
    def runs():
        return True

    @helper.with_requires("numpy<1")
    def is_skipped():
        return True

    assert runs()
    assert is_skipped.__unittest_skip__
