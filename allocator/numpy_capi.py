"""Reach the parts of C that NumPy's data-memory protocol needs, without a compiler.

Covers NumPy's handler structure and functions, CPython's raw allocator and reference counts, and
one C function that sets a flag. Does not know any pool.
"""

from __future__ import annotations

import contextvars
import ctypes
import sys
from collections.abc import Callable
from typing import Any

from numpy._core import _multiarray_umath  # type: ignore[attr-defined]

from dynamemo.allocator.errors import AllocatorError

__all__ = [
    "HandlerStruct",
    "decref",
    "default_handler",
    "in_force",
    "incref",
    "native_decref",
    "native_time",
    "new_capsule",
    "raw_free",
    "raw_malloc",
    "set_handler",
]

_SET_HANDLER, _GET_HANDLER, _DEFAULT_HANDLER = 304, 305, 306  # entries of NumPy's C API table
_CAPSULE_NAME = b"mem_handler"

_Address, _Length = ctypes.c_void_p, ctypes.c_size_t


class HandlerStruct(ctypes.Structure):
    """NumPy's ``PyDataMem_Handler``, version 1, with the allocator's fields in line."""

    _fields_ = (
        ("name", ctypes.c_char * 127),
        ("version", ctypes.c_uint8),
        ("ctx", _Address),
        ("malloc", _Address),
        ("calloc", _Address),
        ("realloc", _Address),
        ("free", _Address),
    )


def _python_function(name: str, result: Any, *arguments: Any) -> Any:
    # PYFUNCTYPE keeps the GIL: these calls are short and must not let other threads in.
    return ctypes.PYFUNCTYPE(result, *arguments)((name, ctypes.pythonapi))


# CPython's raw allocator is the C library's, the same on every system.
raw_malloc = _python_function("PyMem_RawMalloc", _Address, _Length)
raw_free = _python_function("PyMem_RawFree", None, _Address)
incref = _python_function("Py_IncRef", None, _Address)
decref = _python_function("Py_DecRef", None, _Address)
_make_capsule = _python_function(
    "PyCapsule_New", ctypes.py_object, _Address, ctypes.c_char_p, _Address
)
_capsule_pointer = _python_function(
    "PyCapsule_GetPointer", _Address, ctypes.py_object, ctypes.c_char_p
)
native_decref = ctypes.cast(ctypes.pythonapi.Py_DecRef, _Address).value or 0
_c_library = ctypes.CDLL("ucrtbase" if sys.platform == "win32" else None)
native_time = (
    ctypes.cast(
        getattr(_c_library, "_time64" if sys.platform == "win32" else "time"), _Address
    ).value
    or 0
)


def _table_entry(index: int) -> int:
    table = _capsule_pointer(_multiarray_umath._ARRAY_API, None)
    return _Address.from_address(table + index * ctypes.sizeof(_Address)).value or 0


set_handler: Callable[[object], object] = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.py_object)(
    _table_entry(_SET_HANDLER)
)
#: NumPy's own handler capsule.
default_handler: object = ctypes.py_object.from_address(_table_entry(_DEFAULT_HANDLER)).value


def _find_variable() -> contextvars.ContextVar[object]:
    """Return NumPy's own context variable: setting it directly is several times faster."""
    set_handler(default_handler)
    for variable, value in contextvars.copy_context().items():
        if value is default_handler:
            return variable
    raise AllocatorError("this NumPy keeps its memory handler elsewhere: use NumPy 2.0 or later")


in_force = contextvars.Context().run(_find_variable)


def new_capsule(struct: HandlerStruct) -> object:
    """Return a handler capsule for a structure, which must outlive it."""
    return _make_capsule(ctypes.addressof(struct), _CAPSULE_NAME, None)
