"""Descriptors of cuDNN's graph interface: typed attributes, set once and finalised.

Covers reading and writing of attributes. What the attributes are is the matter of `graph_plans`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from enum import IntEnum
from typing import Any

from dynamemo.cudnn.errors import CudnnError
from dynamemo.cudnn.library import Descriptor, Library, ffi

__all__ = ["BackendDescriptor", "Kind", "Type"]


class Kind(IntEnum):
    """``cudnnBackendDescriptorType_t``, those that are used."""

    CONVOLUTION = 1
    ENGINE = 2
    ENGINE_CONFIGURATION = 3
    HEURISTICS = 4
    PLAN = 5
    KNOB_CHOICE = 7
    CONVOLUTION_FORWARD = 10
    CONVOLUTION_FILTER = 11
    CONVOLUTION_DATA = 12
    GRAPH = 15
    VARIANT_PACK = 16
    TENSOR = 17


class Type(IntEnum):
    """``cudnnBackendAttributeType_t``, those that are used."""

    HANDLE = 0
    DATA_TYPE = 1
    INT64 = 3
    FLOAT = 4
    DOUBLE = 5
    POINTER = 6
    CONVOLUTION_MODE = 7
    HEURISTICS_MODE = 8
    KNOB_TYPE = 9
    NUMERICAL_NOTE = 11
    DESCRIPTOR = 15
    BEHAVIOR_NOTE = 19


_C_TYPES = {
    Type.HANDLE: "uintptr_t",
    Type.DATA_TYPE: "int",
    Type.INT64: "int64_t",
    Type.FLOAT: "float",
    Type.DOUBLE: "double",
    Type.POINTER: "uintptr_t",
    Type.CONVOLUTION_MODE: "int",
    Type.HEURISTICS_MODE: "int",
    Type.KNOB_TYPE: "int",
    Type.NUMERICAL_NOTE: "int",
    Type.DESCRIPTOR: "uintptr_t",
    Type.BEHAVIOR_NOTE: "int",
}


class BackendDescriptor:
    """Owns one descriptor of the graph interface, and keeps alive what it was made of."""

    __slots__ = ("_kept", "_library", "_owner", "pointer")

    def __init__(self, library: Library, kind: Kind) -> None:
        self._library = library
        box = ffi.new("uintptr_t *")
        library.BackendCreateDescriptor(int(kind), box)
        #: What cuDNN knows it by.
        self.pointer = int(box[0])
        self._owner = Descriptor(self.pointer, library.BackendDestroyDescriptor)
        self._kept: list[BackendDescriptor] = []

    def put(self, name: int, kind: Type, *values: Any) -> BackendDescriptor:
        """Set an attribute, and return the descriptor itself."""
        if kind is Type.DESCRIPTOR:
            self._kept.extend(values)
            values = tuple(value.pointer for value in values)
        array = ffi.new(f"{_C_TYPES[kind]}[]", list(values))
        self._library.BackendSetAttribute(self.pointer, name, int(kind), len(values), array)
        return self

    def finalized(self) -> BackendDescriptor:
        """Close it to changes, and return it."""
        self._library.BackendFinalize(self.pointer)
        return self

    def get(self, name: int, kind: Type, at_most: int = 1) -> list[Any]:
        """Return the values of an attribute."""
        array = ffi.new(f"{_C_TYPES[kind]}[]", at_most)
        count = ffi.new("int64_t *")
        self._library.BackendGetAttribute(self.pointer, name, int(kind), at_most, count, array)
        return list(array[0 : min(count[0], at_most)])

    def find(self, name: int, kind: Type) -> int | None:
        """Return the value of an attribute that may not be there."""
        with contextlib.suppress(CudnnError, IndexError):
            return int(self.get(name, kind)[0])
        return None

    def count(self, name: int, kind: Type) -> int:
        """Return how many values an attribute has."""
        count = ffi.new("int64_t *")
        self._library.BackendGetAttribute(self.pointer, name, int(kind), 0, count, ffi.NULL)
        return int(count[0])

    def get_descriptors(self, name: int, kind: Kind, at_most: int) -> Sequence[BackendDescriptor]:
        """Return the descriptors in an attribute; they stay valid with this one."""
        made = [BackendDescriptor(self._library, kind) for _ in range(at_most)]
        if not made:
            return ()
        array = ffi.new("uintptr_t[]", [descriptor.pointer for descriptor in made])
        count = ffi.new("int64_t *")
        self._library.BackendGetAttribute(
            self.pointer, name, int(Type.DESCRIPTOR), at_most, count, array
        )
        found = made[: min(count[0], at_most)]
        for descriptor in found:
            descriptor._kept.append(self)
        return found
