"""Keep values in host memory, in slabs of it.

Covers the slabs and their limit. What a slab is made of is the factory's affair: plain memory here,
pinned memory in `cupy_memory`.

1. Memory is taken slab by slab, never value by value: pinning is slow.
2. The slabs together never exceed the limit; nothing is rounded up to a power of two.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from dynamemo.allocator.arena import Arena, HostArena
from dynamemo.allocator.copier import Copier
from dynamemo.allocator.heap import BlockHeap
from dynamemo.allocator.tier import Tier

__all__ = ["HostTier"]

_GRANULARITY_BYTES = 4096


@dataclass(frozen=True, slots=True, eq=False)
class _Slab:
    memory: Arena
    heap: BlockHeap


class HostTier(Tier):
    """Values in slabs of host memory.

    Parameters
    ----------
    copier : Copier
        Copies between the device and the slabs.
    limit_bytes : int
        Most that all slabs together may take.
    slabs : callable, optional
        Makes a slab of so many bytes; raises `MemoryError` or `OSError` where the machine has none.
        Plain host memory by default.
    slab_bytes : int, optional
        Usual length of a slab. A longer value gets a slab of its own length, rounded up to 4096
        bytes.
    """

    def __init__(
        self,
        copier: Copier,
        limit_bytes: int,
        *,
        slabs: Callable[[int], Arena] = HostArena,
        slab_bytes: int = 64 << 20,
    ) -> None:
        super().__init__(limit_bytes)
        self._copier = copier
        self._limit_bytes = limit_bytes
        self._new_slab = slabs
        self._slab_bytes = slab_bytes
        self._slabs: list[_Slab] = []

    @property
    def used_bytes(self) -> int:
        """Bytes taken by the values kept now, rounding included."""
        return sum(slab.heap.used_bytes for slab in self._slabs)

    @property
    def held_bytes(self) -> int:
        """Bytes of all slabs."""
        return sum(slab.memory.capacity_bytes for slab in self._slabs)

    def trim(self) -> None:
        """Return the slabs that hold no value to the machine."""
        with self._lock:
            for slab in [slab for slab in self._slabs if not slab.heap.used_bytes]:
                self._slabs.remove(slab)
                slab.memory.close()

    def close(self) -> None:
        """Return all slabs to the machine; the values are lost."""
        with self._lock:
            while self._slabs:
                self._slabs.pop().memory.close()

    def _put(self, device_address: int, nbytes: int) -> tuple[_Slab, int] | None:
        place = self._place(nbytes)
        if place is None:
            return None
        slab, offset = place
        try:
            self._copier.to_host(slab.memory.address + offset, device_address, nbytes)
        except BaseException:
            slab.heap.free(offset)
            raise
        return place

    def _get(self, place: object, device_address: int, nbytes: int) -> None:
        slab, offset = _as_place(place)
        self._copier.to_device(device_address, slab.memory.address + offset, nbytes)

    def _drop(self, place: object) -> None:
        slab, offset = _as_place(place)
        if slab in self._slabs:  # not after close
            slab.heap.free(offset)

    def _place(self, nbytes: int) -> tuple[_Slab, int] | None:
        for slab in self._slabs:
            # Merging at once keeps values of changing lengths from spreading over more slabs.
            slab.heap.coalesce()
            offset = slab.heap.allocate(nbytes)
            if offset is not None:
                return slab, offset
        new = self._grow(nbytes)
        if new is None:
            return None
        offset = new.heap.allocate(nbytes)
        assert offset is not None
        return new, offset

    def _grow(self, nbytes: int) -> _Slab | None:
        needed_bytes = max(1, -(-nbytes // _GRANULARITY_BYTES)) * _GRANULARITY_BYTES
        if needed_bytes > self._limit_bytes - self.held_bytes:
            self.trim()
        left_bytes = self._limit_bytes - self.held_bytes
        if needed_bytes > left_bytes:
            return None
        usual_bytes = min(self._slab_bytes, left_bytes - left_bytes % _GRANULARITY_BYTES)
        capacity_bytes = max(needed_bytes, usual_bytes)
        try:
            memory = self._new_slab(capacity_bytes)
        except (MemoryError, OSError):
            return None
        slab = _Slab(memory, BlockHeap(capacity_bytes, granularity_bytes=_GRANULARITY_BYTES))
        self._slabs.append(slab)
        return slab


def _as_place(place: object) -> tuple[_Slab, int]:
    assert isinstance(place, tuple)
    slab, offset = place
    assert isinstance(slab, _Slab)
    assert isinstance(offset, int)
    return slab, offset
