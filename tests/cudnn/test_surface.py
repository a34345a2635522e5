"""Every name that Chainer's sources and tests read is there, with arguments that fit."""

import ast
import inspect
from pathlib import Path

import pytest

from dynamemo.cudnn.library import Library
from dynamemo.cudnn.modules import array_module, enumeration_module
from tests.cudnn.fakes import FakeFunctions

#: What Chainer's own tests patch or read, besides what its sources do.
READ_BY_TESTS = {
    "cudnn": (
        *("activation_backward", "activation_forward", "batch_normalization_backward"),
        *("batch_normalization_forward_training_ex", "convolution_backward_data"),
        *("convolution_backward_filter", "convolution_forward", "pooling_backward"),
        *("pooling_forward", "softmax_backward", "softmax_forward"),
    ),
    "libcudnn": ("getVersion", "get_build_version"),
}


def chainer_folder() -> Path:
    import chainer

    return Path(chainer.__file__).parent


def names_read(tree: ast.AST) -> set[tuple[str, str]]:
    """Return ("cudnn" or "libcudnn", name) for every attribute of a module of that name."""
    found = set()
    for node in ast.walk(tree):
        if not isinstance(node, ast.Attribute):
            continue
        owner = ast.unparse(node.value)
        if owner in ("cudnn", "cuda.cudnn", "cuda.cupy.cudnn", "cupy.cudnn"):
            # In the backend module `cuda` is cupy.cuda, elsewhere Chainer's backend.
            found.add(("cudnn", node.attr))
        elif owner in ("libcudnn", "cuda.libcudnn", "cuda.cuda.cudnn", "cupy.cuda.cudnn"):
            found.add(("libcudnn", node.attr))
    return found


@pytest.fixture(scope="module")
def modules():
    return {"cudnn": array_module(), "libcudnn": enumeration_module(Library(FakeFunctions()))}


def sources():
    for path in sorted(chainer_folder().rglob("*.py")):
        text = path.read_text()
        if "cudnn" in text:
            yield path, ast.parse(text)


def test_every_name_that_chainer_reads_exists(modules):
    missing = set()
    for path, tree in sources():
        is_backend = path.name == "cuda.py"
        for kind, name in names_read(tree):
            kinds = ("cudnn", "libcudnn") if is_backend else (kind,)
            if not any(hasattr(modules[which], name) for which in kinds):
                missing.add((path.name, kind, name))

    assert not missing


@pytest.mark.parametrize("kind", ["cudnn", "libcudnn"])
def test_every_name_that_chainers_tests_read_exists(modules, kind):
    assert [name for name in READ_BY_TESTS[kind] if not hasattr(modules[kind], name)] == []


def test_every_call_in_chainer_fits_the_signature(modules):
    checked = 0
    for path, tree in sources():
        for node in ast.walk(tree):
            if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
                continue
            owner, name = ast.unparse(node.func.value), node.func.attr
            function = getattr(modules["cudnn"], name, None)
            if not owner.endswith("cudnn") or function is None or inspect.isclass(function):
                continue
            arguments = [object() for _ in node.args]
            keywords = {keyword.arg: object() for keyword in node.keywords}
            try:
                inspect.signature(function).bind(*arguments, **keywords)
            except TypeError as error:
                pytest.fail(f"{path.name}:{node.lineno}: {name}: {error}")
            checked += 1

    assert checked > 40


def test_version_is_high_enough_for_every_branch_of_chainer(modules):
    assert modules["libcudnn"].getVersion() >= 7000
