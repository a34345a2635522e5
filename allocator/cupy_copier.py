"""Copy between a GPU and pinned host memory on two streams of its own.

Covers the copier, its events, the pinned slabs, and measuring the link. With `cupy_memory` the only
modules of the allocator that import CuPy.

1. A copy out and a copy in can run at once, each behind what the compute stream was given before.
2. Nothing is allocated on the device, and no memory is pinned or freed, by a copy.
3. The host waits only where it is told to (`Mark.wait`, `CudaCopier.finish`); those waits are
   counted.

The compute streams are those of `CudaCopier.compute_streams`.
"""

from __future__ import annotations

import threading
from collections import deque
from typing import Any

import cupy
from cupy.cuda import runtime

from dynamemo.allocator.copier import DONE, CopyTime, Mark

__all__ = ["CudaCopier", "PinnedSlab", "PinnedSlabs"]

#: Events are made so many at once: how many copies are under way at most varies by a few from one
#: iteration to the next.
_EVENTS_AT_ONCE = 64

_DEVICE_TO_HOST, _HOST_TO_DEVICE = 2, 1  # cudaMemcpyKind


class PinnedSlab:
    """Page-locked host memory for `HostTier`, released with the object.

    Parameters
    ----------
    capacity_bytes : int
        Length in bytes; pinning takes about a second per GiB.
    device_id : int, optional
        GPU whose context pins it; the current one by default.

    Raises
    ------
    MemoryError
        If the machine cannot pin so much.
    """

    def __init__(self, capacity_bytes: int, device_id: int | None = None) -> None:
        #: Length in bytes.
        self.capacity_bytes = capacity_bytes
        try:
            with cupy.cuda.Device(device_id):
                self._memory = cupy.cuda.PinnedMemory(capacity_bytes)
        except runtime.CUDARuntimeError as error:
            raise MemoryError(f"cannot pin {capacity_bytes:,} bytes of host memory") from error
        #: Address of the first byte.
        self.address = int(self._memory.ptr)

    def close(self) -> None:
        """Unpin the memory and return it to the machine. Nothing in it may be in use."""
        self._memory = None


class PinnedSlabs:
    """Makes pinned slabs, in whatever thread, for one GPU; by default the current one."""

    def __init__(self, device_id: int | None = None) -> None:
        self._device_id = int(runtime.getDevice()) if device_id is None else device_id

    def __call__(self, capacity_bytes: int) -> PinnedSlab:
        """Return a slab; errors as `PinnedSlab`."""
        return PinnedSlab(capacity_bytes, self._device_id)


class _CudaMark:
    """The end of a copy on one of the copier's streams."""

    __slots__ = ("_copier", "_is_done", "_start", "_stop", "is_to_host", "nbytes")

    def __init__(
        self, copier: CudaCopier, start: Any, stop: Any, nbytes: int, *, is_to_host: bool
    ) -> None:
        self._copier = copier
        self._start = start
        self._stop = stop
        self._is_done = False
        self.nbytes = nbytes
        self.is_to_host = is_to_host

    @property
    def is_done(self) -> bool:
        if not self._is_done:
            self._is_done = self._stop.done
        return self._is_done

    def hold_compute(self) -> None:
        """Let the compute streams wait."""
        if not self.is_done:
            self._copier.hold(self._stop)

    def wait(self) -> None:
        """Let the host wait; counted."""
        if not self.is_done:
            self._copier.waits += 1
            self._stop.synchronize()
            self._is_done = True

    def hold_stream(self, handle: int) -> None:
        if not self.is_done:
            runtime.streamWaitEvent(handle, self._stop.ptr)

    def elapsed_s(self) -> float:
        return float(cupy.cuda.get_elapsed_time(self._start, self._stop)) / 1e3

    def __del__(self) -> None:
        # The copier's events are used again: none is made after warm-up.
        self._copier.spare_events += (self._start, self._stop)


class CudaCopier:
    """Copies between the current GPU and pinned host memory, on a stream for each direction."""

    def __init__(self) -> None:
        #: How often the host has waited for the device.
        self.waits = 0
        #: Events made so far; flat in the steady state.
        self.events = 0
        #: Events that nobody waits for.
        self.spare_events: list[Any] = []
        self._device_id = int(runtime.getDevice())
        self._home = int(cupy.cuda.get_current_stream().ptr)
        self._out_stream = cupy.cuda.Stream(non_blocking=True)
        self._in_stream = cupy.cuda.Stream(non_blocking=True)
        self._border = cupy.cuda.Event(disable_timing=True)
        self._under_way: deque[_CudaMark] = deque()
        self._lock = threading.Lock()  # the border event is used by one thread at a time

    @property
    def is_host(self) -> bool:
        """Always false."""
        return False

    def to_host(
        self, host_address: int, device_address: int, nbytes: int, *, after: Mark = DONE
    ) -> Mark:
        """Begin to copy `nbytes` from the GPU to pinned host memory."""
        return self._copy(host_address, device_address, nbytes, after, is_to_host=True)

    def to_device(
        self, device_address: int, host_address: int, nbytes: int, *, after: Mark = DONE
    ) -> Mark:
        """Begin to copy `nbytes` from pinned host memory to the GPU."""
        return self._copy(device_address, host_address, nbytes, after, is_to_host=False)

    def times(self) -> list[CopyTime]:
        """Return what copies took that ended since the last call. Never waits."""
        times = []
        while self._under_way and self._under_way[0].is_done:
            mark = self._under_way.popleft()
            times.append(CopyTime(mark.is_to_host, mark.nbytes, mark.elapsed_s()))
        return times

    def compute_streams(self) -> set[int]:
        """Return the handles of the streams that copies are ordered with.

        The current one, the one that was current when the copier was made, and the default one:
        what is brought back for one of them may be read on another next.
        """
        return {int(cupy.cuda.get_current_stream().ptr), self._home, 0}

    def hold(self, event: Any) -> None:
        """Let the compute streams wait for an event."""
        for handle in self.compute_streams():
            runtime.streamWaitEvent(handle, event.ptr)

    def finish(self) -> None:
        """Let the host wait for all copies under way; counted."""
        if self._under_way:
            self.waits += 1
            self._out_stream.synchronize()
            self._in_stream.synchronize()
            self._under_way.clear()

    def _copy(
        self, target: int, source: int, nbytes: int, after: Mark, *, is_to_host: bool
    ) -> Mark:
        if not nbytes:
            return after
        stream = self._out_stream if is_to_host else self._in_stream
        kind = _DEVICE_TO_HOST if is_to_host else _HOST_TO_DEVICE
        handle = stream.ptr
        with cupy.cuda.Device(self._device_id), self._lock:
            for compute in self.compute_streams():
                runtime.eventRecord(self._border.ptr, compute)
                runtime.streamWaitEvent(handle, self._border.ptr)
            if isinstance(after, _CudaMark):
                after.hold_stream(handle)
            else:
                after.wait()
            start, stop = self._event(), self._event()
            runtime.eventRecord(start.ptr, handle)
            runtime.memcpyAsync(target, source, nbytes, kind, handle)
            runtime.eventRecord(stop.ptr, handle)
        mark = _CudaMark(self, start, stop, nbytes, is_to_host=is_to_host)
        self._under_way.append(mark)
        return mark

    def _event(self) -> Any:
        if not self.spare_events:
            self.events += _EVENTS_AT_ONCE
            self.spare_events += [cupy.cuda.Event() for _ in range(_EVENTS_AT_ONCE)]
        return self.spare_events.pop()
