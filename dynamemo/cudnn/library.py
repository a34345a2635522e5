"""cuDNN's shared library: where it is found, how its functions are called, what a failure raises.

Reads no CuPy and no Chainer. `Library` gives each C function without its prefix, as a callable that
raises `CudnnError` where the status is not zero.
"""

from __future__ import annotations

import atexit
import contextlib
import importlib.util
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import cffi

from dynamemo.cudnn.declarations import DECLARATIONS
from dynamemo.cudnn.errors import CudnnError

__all__ = ["FIRST_VERSION", "LIBRARY_NAME", "Descriptor", "Library", "ffi", "load"]

#: The oldest cuDNN that is used.
FIRST_VERSION = 90000
LIBRARY_NAME = "libcudnn.so.9"

ffi = cffi.FFI()
ffi.cdef(DECLARATIONS)

#: Set while the interpreter ends: CUDA may be gone, and who destroys a descriptor would ask it.
_is_closing = False


def _close() -> None:
    global _is_closing
    _is_closing = True


atexit.register(_close)


class Library:
    """The loaded library, or anything else that has its C functions under their C names."""

    def __init__(self, functions: Any) -> None:
        self._functions = functions
        #: Whatever has to stay loaded with it.
        self.kept: object = None

    def version(self) -> int:
        """Return the version: 91900 is 9.19.0."""
        return int(self._functions.cudnnGetVersion())

    def runtime_version(self) -> int:
        """Return the version of the CUDA runtime that it is built with: 13010 is 13.1."""
        return int(self._functions.cudnnGetCudartVersion())

    def __getattr__(self, name: str) -> Callable[..., None]:
        """Give the function ``cudnn<name>``, checked; each is made once."""
        if name.startswith("_"):
            raise AttributeError(name)
        function = getattr(self._functions, "cudnn" + name)

        def call(*arguments: Any) -> None:
            status = function(*arguments)
            if status:
                raise self.error("cudnn" + name, status)

        self.__dict__[name] = call
        return call

    def error(self, function: str, status: int) -> CudnnError:
        """Return the error for a status that is not zero."""
        name = ffi.string(self._functions.cudnnGetErrorString(status)).decode()
        detail = ffi.new("char[]", 1024)
        self._functions.cudnnGetLastErrorString(detail, len(detail))
        lines = ffi.string(detail).decode(errors="replace").strip().splitlines()
        message = f"{function} failed: {name} ({status})"
        if lines:
            message += f"; {lines[-1].strip()}"
        return CudnnError(message, function=function, status=status)

    def create(self, kind: str) -> Descriptor:
        """Return a new descriptor of a kind: "Tensor", "Filter", "Pooling"..."""
        box = ffi.new("uintptr_t *")
        getattr(self, f"Create{kind}Descriptor")(box)
        return Descriptor(box[0], getattr(self, f"Destroy{kind}Descriptor"))


class Descriptor:
    """Owns one descriptor of cuDNN; it is destroyed with the object.

    Attributes
    ----------
    value : int
        What cuDNN knows it by; 0 for none.
    """

    __slots__ = ("__weakref__", "_destroy", "value")

    def __init__(self, value: int, destroy: Callable[[int], None] | None) -> None:
        self.value = value
        self._destroy = destroy

    def __del__(self) -> None:
        if self.value and self._destroy is not None and not _is_closing:
            with contextlib.suppress(CudnnError):
                self._destroy(self.value)


def load() -> Library:
    """Load cuDNN 9.

    Returns
    -------
    Library
        From the wheel ``nvidia-cudnn-cu12`` or ``-cu13`` where one is installed, or the system's.

    Raises
    ------
    CudnnError
        If none can be loaded, or one that is too old.
    """
    reasons = []
    for path in _paths():
        try:
            library = Library(ffi.dlopen(path))
            library.kept = _load_cublas(path, library.runtime_version() // 1000)
        except OSError as error:
            reasons.append(str(error).partition("  Additionally")[0])
            continue
        if library.version() < FIRST_VERSION:
            raise CudnnError(
                f"{path} is cuDNN {library.version()}, older than {FIRST_VERSION}: "
                "install dynamemo with the extra cuda12 or cuda13"
            )
        return library
    raise CudnnError(
        "cuDNN 9 cannot be loaded: install dynamemo with the extra cuda12 or cuda13, which brings "
        f"nvidia-cudnn-cu12 or nvidia-cudnn-cu13 ({'; '.join(reasons)})"
    )


def _paths() -> Iterator[str]:
    """Yield where the library may be: a path that the user names, the wheel's, the system's."""
    if (named := os.environ.get("DYNAMEMO_CUDNN_LIBRARY")) is not None:
        yield named
        return
    with contextlib.suppress(ModuleNotFoundError, ValueError):
        spec = importlib.util.find_spec("nvidia.cudnn")
        for folder in (spec.submodule_search_locations or ()) if spec is not None else ():
            path = Path(folder) / "lib" / LIBRARY_NAME
            if path.exists():
                yield str(path)
    yield LIBRARY_NAME


def _load_cublas(path: str, major: int) -> object:
    """Load the part of cuBLAS that cuDNN asks for by its name.

    cuDNN ends the process where it finds none. Most often CuPy has loaded it already.
    """
    name = f"libcublasLt.so.{major}"
    packages = Path(path).parent.parent.parent
    beside = [packages / "cublas" / "lib" / name, packages / f"cu{major}" / "lib" / name]
    for candidate in [name, *(str(file) for file in beside if file.exists())]:
        with contextlib.suppress(OSError):
            return ffi.dlopen(candidate)
    raise OSError(f"{name}, which cuDNN needs, cannot be loaded")
