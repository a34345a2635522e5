"""What the runtime needs of the device that holds the arrays, and the CPU as one.

A device tells where an array lies, whether anybody else refers to it, makes arrays over memory,
and times work. `CudaDevice` (in `cuda_device.py`) is the other one.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import sys
import time
from typing import Any, Protocol

import numpy

from dynamemo.allocator import (
    Block,
    Copier,
    FileTier,
    HostArena,
    HostCopier,
    HostTier,
    Pool,
    Tier,
    root_array,
    using_numpy_pool,
)
from dynamemo.storage import Array, View


class Timer(Protocol):
    """Seconds that the device took for something, known now or later."""

    def elapsed_s(self) -> float | None:
        """Return the seconds, or None while they are not known yet. Never waits."""
        ...


class Device(Protocol):
    """Where arrays live."""

    #: "cpu" or "cuda:0".
    name: str
    copier: Copier
    #: Whether evicted values go to host memory first: not where arrays are in it already.
    has_host_tier: bool

    def free_bytes(self) -> int:
        """Return the bytes that can still be taken from the device."""
        ...

    def make_pool(self, budget_bytes: int) -> Pool:
        """Take the arena and return the pool over it."""
        ...

    def make_host_tier(self, limit_bytes: int) -> Tier:
        """Return the tier of host memory, of at most that many bytes."""
        ...

    def make_file_tier(self, folder: str | None, limit_bytes: int | None) -> Tier:
        """Return the tier of a private file in the folder."""
        ...

    def using_pool(
        self, pool: Pool, *, small_bytes: int | None
    ) -> contextlib.AbstractContextManager[Any]:
        """Serve array memory from the pool for the time of the context."""
        ...

    def owns(self, array: Array) -> bool:
        """Tell whether it is an array of this device."""
        ...

    def block_of(self, array: Array) -> Block | None:
        """Return the pool block under an array, None where the memory is not from a pool."""
        ...

    def is_ordered(self, block: Block) -> bool:
        """Tell whether the copier's copies are ordered with the work that uses the block."""
        ...

    def view_of(self, array: Array, block: Block) -> View:
        """Return how the array lies in its block."""
        ...

    def layout_of(self, array: Array) -> tuple[View, int]:
        """Return how the array lies in the memory it keeps alive, and the bytes of that."""
        ...

    def is_exclusive(self, arrays: list[Array], references: list[int]) -> bool:
        """Tell whether nothing refers to the arrays but the counted references.

        The list itself counts as no reference; each of its items may have one more, from nobody.
        """
        ...

    def allocate(self, nbytes: int) -> Any:
        """Return memory of that many bytes from the current allocator."""
        ...

    def address_of(self, memory: Any) -> int:
        """Return the address of what `allocate` gave."""
        ...

    def array_in(self, memory: Any, view: View) -> Array:
        """Return an array over memory that keeps the memory alive."""
        ...

    def memory_of(self, array: Array) -> Any:
        """Return the memory under an array, to make other views of it."""
        ...

    def digest(self, array: Array) -> bytes:
        """Return a hash of the array's elements in their order in memory. Synchronises."""
        ...

    def start_timer(self) -> Any:
        """Note the present moment of the device."""
        ...

    def stop_timer(self, start: Any) -> Timer:
        """Return the timer of what ran since `start`."""
        ...


class _Elapsed:
    __slots__ = ("_seconds",)

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds

    def elapsed_s(self) -> float:
        return self._seconds


def _available_host_bytes() -> int:
    with contextlib.suppress(OSError, ValueError), open("/proc/meminfo") as lines:
        for line in lines:
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return int(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))


class HostDevice:
    """The CPU: NumPy arrays in the process's memory."""

    name = "cpu"
    has_host_tier = False

    def __init__(self) -> None:
        self.copier: Copier = HostCopier()

    def free_bytes(self) -> int:
        """Return the bytes that the system can give without swapping."""
        return _available_host_bytes()

    def make_pool(self, budget_bytes: int) -> Pool:
        """Map the arena; pages become resident when they are first written."""
        return Pool(HostArena(budget_bytes))

    def make_host_tier(self, limit_bytes: int) -> Tier:
        """Return a tier in the same memory; the runtime gives the CPU a file instead."""
        return HostTier(self.copier, limit_bytes)

    def make_file_tier(self, folder: str | None, limit_bytes: int | None) -> Tier:
        """Return a tier that threads write from, and read into, the arrays' own memory."""
        return FileTier(self.copier, folder, limit_bytes)

    def using_pool(
        self, pool: Pool, *, small_bytes: int | None
    ) -> contextlib.AbstractContextManager[Any]:
        """Serve NumPy's array memory from the pool in this thread."""
        if small_bytes is None:
            return using_numpy_pool(pool)
        return using_numpy_pool(pool, small_bytes=small_bytes)

    def owns(self, array: Array) -> bool:
        """Tell whether it is a NumPy array."""
        return type(array) is numpy.ndarray and not array.dtype.hasobject

    def block_of(self, array: Array) -> Block | None:
        """Return the pool block under an array, None where the memory is not from a pool."""
        return root_array(array)[1]

    def is_ordered(self, block: Block) -> bool:
        """Return True: the host does one thing after the other."""
        return True

    def view_of(self, array: Array, block: Block) -> View:
        """Return how the array lies in its block."""
        offset = array.__array_interface__["data"][0] - block.address
        return View(offset, array.shape, array.dtype, array.strides)

    def layout_of(self, array: Array) -> tuple[View, int]:
        """Return how the array lies in its root array, and the root's bytes."""
        root = root_array(array)[0]
        offset = array.__array_interface__["data"][0] - root.__array_interface__["data"][0]
        return View(offset, array.shape, array.dtype, array.strides), root.nbytes

    def is_exclusive(self, arrays: list[Array], references: list[int]) -> bool:
        """Compare CPython's reference counts of the arrays and their bases with what is known."""
        return members_if_counted(arrays, references, numpy.ndarray) is not None

    def allocate(self, nbytes: int) -> Any:
        """Return a flat array of bytes."""
        return numpy.empty(nbytes, numpy.uint8)

    def address_of(self, memory: Any) -> int:
        """Return the address of the array's first byte."""
        return int(memory.__array_interface__["data"][0])

    def array_in(self, memory: Any, view: View) -> Array:
        """Return an array whose base is the memory."""
        return numpy.ndarray(view.shape, view.dtype, memory, view.offset, view.strides)

    def memory_of(self, array: Array) -> Any:
        """Return the root array as flat bytes; a view of it, in the order of memory."""
        root = root_array(array)[0]
        return root.ravel(order="K").view(numpy.uint8)

    def digest(self, array: Array) -> bytes:
        """Return a hash of the array's elements in their order in memory."""
        return hashlib.blake2b(numpy.ascontiguousarray(array).view(numpy.uint8).data).digest()

    def start_timer(self) -> float:
        """Return the clock's seconds."""
        return time.perf_counter()

    def stop_timer(self, start: float) -> Timer:
        """Return the seconds since `start`."""
        return _Elapsed(time.perf_counter() - start)


def members_if_counted(
    arrays: list[Array], references: list[int], kind: type
) -> list[Array] | None:
    """Return the arrays and all their bases, if nothing unknown refers to any of them.

    Parameters
    ----------
    arrays : list of array
        Distinct; the caller's list is one known reference to each.
    references : list of int
        How many more references to each are known.
    kind : type
        What a base has to be; with another one the memory is not ours alone.
    """
    members = list(arrays)
    expected = [count + 1 for count in references]
    index = {id(member): number for number, member in enumerate(members)}
    position = 0
    while position < len(members):
        base = members[position].base
        position += 1
        if base is None:
            continue
        if type(base) is not kind:
            return None
        if id(base) not in index:
            index[id(base)] = len(members)
            members.append(base)
            expected.append(0)
        expected[index[id(base)]] += 1
        del base
    # Two more: one from `members`, one from getrefcount's argument.
    is_counted = all(
        sys.getrefcount(members[number]) <= expected[number] + 2 for number in range(len(members))
    )
    return members if is_counted else None
