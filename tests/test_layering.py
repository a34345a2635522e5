"""The three parts depend in one direction (DESIGN 1), also where import-linter cannot look.

import-linter checks named modules; here every file of a part is read, whatever modules are added.
"""

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent

#: For each part: the folder, the modules of dynamemo it may import, and the other packages.
PARTS = {
    "graph": ("graph", ("dynamemo.graph",), {"numpy"}),
    "allocator": (
        "allocator",
        ("dynamemo.allocator",),
        {"cffi", "cupy", "cupy_backends", "cupyx", "numpy", "sortedcontainers"},
    ),
}

#: The packages that enter dynamemo through few modules, and the beginnings of those files' paths.
#: The demo is a user's program: it may import what users import.
DOORS = {
    "chainer": ("dynamemo/chainer_binding", "dynamemo/demo"),
    "cupy": ("allocator/cupy_", "dynamemo/compat_cudnn", "dynamemo/cuda_", "dynamemo/demo"),
}


def sources(folder: str) -> Iterator[Path]:
    yield from sorted((ROOT / folder).glob("**/*.py"))


def imports(source: Path) -> Iterator[str]:
    """Yield what a file imports, as absolute dotted names, wherever in the file it stands."""
    for node in ast.walk(ast.parse(source.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{source}:{node.lineno}: imports are absolute"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def is_within(name: str, packages: tuple[str, ...]) -> bool:
    return any(name == package or name.startswith(f"{package}.") for package in packages)


@pytest.mark.parametrize("part", PARTS)
def test_part_imports_only_what_lies_below_it(part):
    folder, own, others = PARTS[part]
    for source in sources(folder):
        for name in imports(source):
            top = name.partition(".")[0]
            allowed = is_within(name, own) or top in sys.stdlib_module_names | others
            assert allowed, f"{source.relative_to(ROOT)} imports {name}"


@pytest.mark.parametrize("package", DOORS)
def test_package_enters_through_its_doors(package):
    for folder in ("dynamemo", "allocator", "graph"):
        for source in sources(folder):
            path = source.relative_to(ROOT).as_posix()
            if not path.startswith(DOORS[package]):
                for name in imports(source):
                    assert not is_within(name, (package,)), f"{path} imports {name}"


def test_parts_are_links_to_the_folders_at_the_root():
    for part in PARTS:
        link = ROOT / "dynamemo" / part
        assert link.is_symlink()
        assert link.readlink() == Path("..") / part
