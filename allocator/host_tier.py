"""Keep values in host memory, in slabs of it.

Covers the slabs, their limit, and taking them ahead of need. What a slab is made of is the
factory's affair: plain memory here, pinned memory in `cupy_copier`.

1. Memory is taken slab by slab, never value by value: pinning is slow.
2. The slabs together never exceed the limit; nothing is rounded up to a power of two.
3. A slab that a thread takes ahead of need belongs to the tier from the moment it is asked for.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from dataclasses import dataclass

from dynamemo.allocator.arena import Arena, HostArena
from dynamemo.allocator.copier import Copier, CopyTime, Mark
from dynamemo.allocator.heap import BlockHeap
from dynamemo.allocator.tier import Tier

__all__ = ["HostTier"]

_GRANULARITY_BYTES = 4096


@dataclass(frozen=True, slots=True, eq=False)
class _Slab:
    memory: Arena
    heap: BlockHeap


class _Order:
    """A slab that a thread is taking."""

    def __init__(self, make: Callable[[int], Arena], capacity_bytes: int) -> None:
        self.capacity_bytes = capacity_bytes
        self.process = os.getpid()
        self.memory: Arena | None = None
        self._make = make
        self._thread = threading.Thread(target=self._run, name="dynamemo-slab")
        self._thread.start()

    def _run(self) -> None:
        try:
            self.memory = self._make(self.capacity_bytes)
        except (MemoryError, OSError):
            self.memory = None

    @property
    def is_done(self) -> bool:
        return not self._thread.is_alive()

    def wait(self) -> None:
        if os.getpid() == self.process:  # a forked child has no such thread
            self._thread.join()


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
    ahead_bytes : int, optional
        When less than this is free in the slabs after a store, a thread takes the next one.
    """

    def __init__(
        self,
        copier: Copier,
        limit_bytes: int,
        *,
        slabs: Callable[[int], Arena] = HostArena,
        slab_bytes: int = 64 << 20,
        ahead_bytes: int = 0,
    ) -> None:
        super().__init__(limit_bytes)
        self._copier = copier
        self._limit_bytes = limit_bytes
        self._new_slab = slabs
        self._slab_bytes = slab_bytes
        self._ahead_bytes = ahead_bytes
        self._slabs: list[_Slab] = []
        self._order: _Order | None = None

    @property
    def used_bytes(self) -> int:
        """Bytes taken by the values kept now, rounding included."""
        return sum(slab.heap.used_bytes for slab in self._slabs)

    @property
    def held_bytes(self) -> int:
        """Bytes of all slabs."""
        ordered_bytes = 0 if self._order is None else self._order.capacity_bytes
        return ordered_bytes + sum(slab.memory.capacity_bytes for slab in self._slabs)

    def times(self) -> list[CopyTime]:
        """Return what copies took that ended since the last call. Never waits."""
        return self._copier.times()

    def trim(self) -> None:
        """Return the slabs that hold no value to the machine."""
        with self._lock:
            self._take_delivery(wait=True)
            for slab in [slab for slab in self._slabs if not slab.heap.used_bytes]:
                self._slabs.remove(slab)
                slab.memory.close()

    def close(self) -> None:
        """Wait for copies under way and return all slabs to the machine; the values are lost."""
        with self._lock:
            self._copier.finish()
            self.finish()
            self._take_delivery(wait=True)
            while self._slabs:
                self._slabs.pop().memory.close()

    def _put(self, device_address: int, nbytes: int) -> tuple[tuple[_Slab, int], Mark] | None:
        place = self._place(nbytes)
        if place is None:
            return None
        slab, offset = place
        try:
            written = self._copier.to_host(slab.memory.address + offset, device_address, nbytes)
        except BaseException:
            slab.heap.free(offset)
            raise
        self._order_ahead()
        return place, written

    def _get(self, place: object, device_address: int, nbytes: int, *, after: Mark) -> Mark:
        slab, offset = _as_place(place)
        address = slab.memory.address + offset
        return self._copier.to_device(device_address, address, nbytes, after=after)

    def _drop(self, place: object) -> None:
        slab, offset = _as_place(place)
        if slab in self._slabs:  # not after close
            slab.heap.free(offset)

    def _place(self, nbytes: int) -> tuple[_Slab, int] | None:
        place = self._place_in_slabs(nbytes)
        if place is None and self._order is not None:
            self.waits += not self._order.is_done
            self._take_delivery(wait=True)
            place = self._place_in_slabs(nbytes)
        if place is not None:
            return place
        new = self._grow(nbytes)
        if new is None:
            return None
        offset = new.heap.allocate(nbytes)
        assert offset is not None
        return new, offset

    def _place_in_slabs(self, nbytes: int) -> tuple[_Slab, int] | None:
        self._take_delivery()
        for slab in self._slabs:
            offset = slab.heap.allocate(nbytes)
            if offset is not None:
                return slab, offset
        return None

    def _grow(self, nbytes: int) -> _Slab | None:
        needed_bytes = max(1, -(-nbytes // _GRANULARITY_BYTES)) * _GRANULARITY_BYTES
        if needed_bytes > self._limit_bytes - self.held_bytes:
            self.trim()
        if needed_bytes > self._limit_bytes - self.held_bytes:
            return None
        self.waits += 1
        try:
            memory = self._new_slab(max(needed_bytes, self._usual_bytes()))
        except (MemoryError, OSError):
            return None
        return self._add(memory)

    def _usual_bytes(self) -> int:
        left_bytes = self._limit_bytes - self.held_bytes
        return min(self._slab_bytes, left_bytes - left_bytes % _GRANULARITY_BYTES)

    def _add(self, memory: Arena) -> _Slab:
        heap = BlockHeap(memory.capacity_bytes, granularity_bytes=_GRANULARITY_BYTES)
        slab = _Slab(memory, heap)
        self._slabs.append(slab)
        return slab

    def _order_ahead(self) -> None:
        """Have a thread take the next slab, where little is left in those that there are."""
        if not self._ahead_bytes or self._order is not None:
            return
        free_bytes = self.held_bytes - self.used_bytes
        usual_bytes = self._usual_bytes()
        if free_bytes < self._ahead_bytes and usual_bytes >= _GRANULARITY_BYTES:
            self._order = _Order(self._new_slab, usual_bytes)

    def _take_delivery(self, *, wait: bool = False) -> None:
        """Make a slab that was taken ahead one of ours; wait for it where asked to."""
        order = self._order
        if order is None or not (wait or order.is_done):
            return
        order.wait()
        self._order = None
        if order.memory is None:
            self._ahead_bytes = 0  # the machine has no more: do not ask again and again
        else:
            self._add(order.memory)


def _as_place(place: object) -> tuple[_Slab, int]:
    assert isinstance(place, tuple)
    slab, offset = place
    assert isinstance(slab, _Slab)
    assert isinstance(offset, int)
    return slab, offset
