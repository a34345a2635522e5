"""Make Chainer 7.8.1 import and run on NumPy 2, Python 3.12 and later, and any setuptools.

Covers the names that Chainer misses: ``numpy.sctypes``, ``numpy.float``,
``numpy.distutils.system_info`` and ``pkg_resources``; and Python integers that NumPy 2 no longer
wraps. What CuPy 14 breaks is mended in `dynamemo.compat_cupy`, and what it no longer has is brought
in `dynamemo.compat_cudnn`, through the same seam.
Does not import Chainer, and changes no file of it.

1. Only Chainer's own modules see a stand-in. ``numpy``, ``sys.modules`` and the built-ins gain
   nothing, so no other code can come to rely on one. (CuPy gains the two modules of cuDNN that it
   had until version 13: `dynamemo.cudnn.modules` says why.)
2. Nothing is done before Chainer is imported, except that one finder stands in
   ``sys.meta_path``; it answers only for the modules named below.
3. Either order works where it can. Chainer imported before dynamemo, on a NumPy that lets it,
   is mended where it stands. On NumPy 2 such an import has failed already; what it left behind
   is dropped, so that the next ``import chainer`` starts clean.
"""

from __future__ import annotations

import builtins
import functools
import importlib.abc
import importlib.machinery
import importlib.metadata
import sys
from collections.abc import Callable, Mapping, Sequence
from types import FunctionType, ModuleType, SimpleNamespace
from typing import Any

import numpy as np

from dynamemo import compat_cudnn, compat_cupy

#: Changes a Chainer module that has just been loaded, in place.
Mend = Callable[[ModuleType], None]


def install() -> None:
    """Make ``import chainer`` work from here on; do nothing the second time.

    Modules of Chainer that are loaded already are mended at once.
    """
    if _FINDER in sys.meta_path:
        return
    sys.meta_path.insert(0, _FINDER)
    for package in ("chainer", "chainermn"):
        _drop_failed_import(package)
    for name, mend in _MENDS.items():
        if (module := sys.modules.get(name)) is not None:
            mend(module)


class NumpyFacade:
    """NumPy with more names: stands for ``numpy`` in one module or one function."""

    def __init__(self, **names: object) -> None:
        self.__dict__.update(names)

    def __getattr__(self, name: str) -> Any:
        """Give NumPy's own for every name that was not added."""
        return getattr(np, name)


class ResolutionError(Exception):
    """A requirement is not met."""


class DistributionNotFound(ResolutionError):  # noqa: N818  pkg_resources named it
    """A required distribution is not installed."""


class VersionConflict(ResolutionError):  # noqa: N818
    """A required distribution is installed in another version."""


def require(*requirements: str) -> None:
    """Check that requirements are installed.

    Parameters
    ----------
    *requirements
        As in package metadata, ``"scipy>=1.0"``.

    Raises
    ------
    DistributionNotFound
        If one is absent, or if ``packaging`` is, without which versions cannot be compared.
    VersionConflict
        If one is installed in a version outside the requirement.
    """
    try:
        from packaging.requirements import Requirement
    except ImportError:
        raise DistributionNotFound("cannot compare versions: packaging is not installed") from None
    for requirement in map(Requirement, requirements):
        try:
            version = importlib.metadata.version(requirement.name)
        except importlib.metadata.PackageNotFoundError:
            raise DistributionNotFound(f"{requirement} is not installed") from None
        if not requirement.specifier.contains(version, prereleases=True):
            raise VersionConflict(f"{requirement} is not met: {version} is installed")


def rebound(function: Any, **names: object) -> FunctionType:
    """Return a copy of `function` in which some global names mean something else.

    The copy keeps the code, and sees the other globals as they are now: for functions whose
    other globals do not change.
    """
    scope = {**function.__globals__, **names}
    copy = FunctionType(
        function.__code__, scope, function.__name__, function.__defaults__, function.__closure__
    )
    functools.update_wrapper(copy, function)
    del copy.__wrapped__  # type: ignore[attr-defined]
    return copy


def _mend_resize_images(module: ModuleType) -> None:
    """Give ``compute_indices_and_weights`` the ``numpy.float`` it asks for.

    The module compares ``xp is numpy`` elsewhere, so its own ``numpy`` must stay the real one.
    """
    module.compute_indices_and_weights = rebound(  # type: ignore[attr-defined]
        module.compute_indices_and_weights, numpy=NumpyFacade(float=float)
    )


def _mend_pad_sequence(module: ModuleType) -> None:
    """Let ``F.pad_sequence`` write -1 into unsigned types again: it wraps, as in NumPy 1."""
    forward = module.PadSequence.forward

    @functools.wraps(forward)
    def forward_with_padding_of_type(self: Any, xs: Sequence[Any]) -> Any:
        if isinstance(self.padding, (int, float, np.generic)):
            self.padding = np.asarray(self.padding).astype(xs[0].dtype)[()]
        return forward(self, xs)

    module.PadSequence.forward = forward_with_padding_of_type


def _mend_memory_utility(module: ModuleType) -> None:
    """Let ChainerMN unpack parameters that were sent in another type.

    In NumPy 2 and CuPy 14 ``array(..., copy=False)`` refuses to convert; ``asarray`` does not.
    """

    def get_array_module(array: Any) -> SimpleNamespace:
        xp = module.chainer.backend.get_array_module(array)

        def converted(values: Any, *, copy: bool, dtype: Any) -> Any:
            # The values may be of fresh memory, about to be overwritten: any of them may overflow.
            with np.errstate(all="ignore"):
                return xp.asarray(values, dtype=dtype)

        return SimpleNamespace(array=converted)

    facade = SimpleNamespace(backend=SimpleNamespace(get_array_module=get_array_module))
    module.unpack_params = rebound(  # type: ignore[attr-defined]
        module.unpack_params, chainer=facade
    )


def _mend_package(module: ModuleType) -> None:
    """Check at once that arrays go together where they are all NumPy's or all CuPy's.

    Chainer asks about a thousand times in a training step of ResNet-50, for 3 µs each.
    """
    check = module.is_arrays_compatible
    usual = {np.ndarray, module.backends.cuda.ndarray}

    @functools.wraps(check)
    def is_arrays_compatible(arrays: Sequence[Any]) -> bool:
        kinds = {type(array) for array in arrays if array is not None}
        if len(kinds) == 1 and kinds <= usual:
            return True
        return bool(check(arrays))

    module.is_arrays_compatible = is_arrays_compatible  # type: ignore[attr-defined]


def _both(first: Mend, second: Mend) -> Mend:
    """Return the mend that does one after the other."""

    def mend(module: ModuleType) -> None:
        first(module)
        second(module)

    return mend


_PKG_RESOURCES = SimpleNamespace(
    DistributionNotFound=DistributionNotFound,
    ResolutionError=ResolutionError,
    VersionConflict=VersionConflict,
    WorkingSet=lambda: SimpleNamespace(require=require),
    get_distribution=importlib.metadata.distribution,
    require=require,
)
_SCTYPES = {
    "int": [np.int8, np.int16, np.int32, np.int64],
    "uint": [np.uint8, np.uint16, np.uint32, np.uint64],
    "float": [np.float16, np.float32, np.float64, np.longdouble],
    "complex": [np.complex64, np.complex128, np.clongdouble],
}

#: What the code of each module gets for a name that it imports.
_STAND_INS: Mapping[str, Mapping[str, object]] = {
    # `import a.b.c` binds a, so the stand-in for the dotted name is that of NumPy itself. Asked is
    # only whether a NumPy of ten years ago was built against a faulty library of macOS: no.
    "chainer._environment_check": {
        "numpy.distutils.system_info": NumpyFacade(
            distutils=SimpleNamespace(system_info=SimpleNamespace(get_info=lambda _: {}))
        ),
        "pkg_resources": _PKG_RESOURCES,
    },
    "chainer.functions.array.as_strided": {"numpy": NumpyFacade(sctypes=_SCTYPES)},
    "chainer.testing.doctest_helper": {"pkg_resources": _PKG_RESOURCES},
    "chainer.testing.helper": {"pkg_resources": _PKG_RESOURCES},
}

#: What is changed in each module once it is loaded.
_MENDS: Mapping[str, Mend] = {
    "chainer": _mend_package,
    "chainer.functions.array.pad_sequence": _mend_pad_sequence,
    "chainer.functions.array.resize_images": _mend_resize_images,
    "chainermn.communicators._memory_utility": _mend_memory_utility,
    **compat_cupy.MENDS,
    **compat_cudnn.MENDS,
    "chainer.backends.cuda": _both(
        compat_cupy.MENDS["chainer.backends.cuda"], compat_cudnn.MENDS["chainer.backends.cuda"]
    ),
}


class _Finder(importlib.abc.MetaPathFinder):
    """Finds the named modules as everybody else does, and hooks their loading."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname not in _STAND_INS and fullname not in _MENDS:
            return None
        for finder in sys.meta_path:
            if finder is self or not hasattr(finder, "find_spec"):
                continue
            spec = finder.find_spec(fullname, path, target)
            if spec is not None and spec.loader is not None:
                spec.loader = _MendingLoader(spec.loader)
                return spec
        return None


class _MendingLoader(importlib.abc.Loader):
    """Loads a module with its stand-ins in place, mends it, and hands it back to its loader."""

    def __init__(self, loader: importlib.abc.Loader) -> None:
        self._loader = loader

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        name = module.__name__
        if (spec := module.__spec__) is not None:
            spec.loader = module.__loader__ = self._loader
        if (stand_ins := _STAND_INS.get(name)) is not None:
            # The module's code runs with an `import` of its own: nobody else can see it, not even
            # another thread that imports meanwhile.
            scope = {**vars(builtins), "__import__": _importing(stand_ins)}
            module.__dict__["__builtins__"] = scope
        if (prepare := compat_cudnn.PREPARATIONS.get(name)) is not None:
            prepare()
        try:
            self._loader.exec_module(module)
        finally:
            module.__dict__["__builtins__"] = builtins
        if (mend := _MENDS.get(name)) is not None:
            mend(module)


def _importing(stand_ins: Mapping[str, object]) -> Callable[..., object]:
    """Return an ``__import__`` that knows some modules by stand-ins."""

    def import_(
        name: str,
        scope: Mapping[str, object] | None = None,
        local: Mapping[str, object] | None = None,
        fromlist: Sequence[str] | None = (),
        level: int = 0,
    ) -> object:
        if level == 0 and name in stand_ins:
            return stand_ins[name]
        return builtins.__import__(name, scope, local, fromlist or (), level)

    return import_


def _drop_failed_import(package: str) -> None:
    """Forget the submodules that a failed import of `package` left loaded."""
    if package in sys.modules:
        return
    for name in [name for name in sys.modules if name.startswith(package + ".")]:
        del sys.modules[name]


_FINDER = _Finder()
