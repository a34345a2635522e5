"""A GPU on which copies and kernels are late at random, and new memory holds NaN.

What forgets to wait for a copy, or gives memory away too early, then meets other bytes than by
luck.
"""

from __future__ import annotations

import contextlib
import random
import threading
from collections.abc import Iterator
from typing import Any

import cupy
from cupy.cuda import runtime

from dynamemo.allocator.copier import DONE, Mark
from dynamemo.allocator.cupy_copier import CudaCopier
from dynamemo.cuda_device import CudaDevice
from tests.runtime.quiet_hook import QuietHook

#: Clock ticks that a delay takes at most: about 200 microseconds.
MOST_TICKS = 300_000

_spin = cupy.RawKernel(
    """
    extern "C" __global__ void spin(long long ticks) {
        long long begin = clock64();
        while (clock64() - begin < ticks) { }
    }
    """,
    "spin",
)


def spin(draw: random.Random) -> None:
    """Keep the current stream busy for a while, or not at all."""
    if draw.random() < 0.5:
        _spin((1,), (1,), (draw.randrange(MOST_TICKS),))


class DelayedCopier(CudaCopier):
    """Copies that begin late: some time after the compute stream is where they may begin.

    A delay that ran beside the work before that would be over when the copy begins.
    """

    def __init__(self, draw: random.Random, *, delays_out: bool, delays_in: bool) -> None:
        super().__init__()
        self._draw = draw
        self._is_delayed = {True: delays_out, False: delays_in}
        self._delay_border = cupy.cuda.Event(disable_timing=True)
        with self._out_stream:
            _spin((1,), (1,), (1,))  # what it takes to load the kernel, it takes now

    def _copy(
        self, target: int, source: int, nbytes: int, after: Mark = DONE, *, is_to_host: bool
    ) -> Mark:
        if nbytes and self._is_delayed[is_to_host]:
            stream = self._out_stream if is_to_host else self._in_stream
            with cupy.cuda.Device(self._device_id), self._lock:
                for compute in self.compute_streams():
                    runtime.eventRecord(self._delay_border.ptr, compute)
                    runtime.streamWaitEvent(stream.ptr, self._delay_border.ptr)
                with stream:
                    spin(self._draw)
        return super()._copy(target, source, nbytes, after, is_to_host=is_to_host)


class DelayedDevice(CudaDevice):
    """The GPU with such a copier."""

    def __init__(self, seed: int, *, delays_out: bool = True, delays_in: bool = True) -> None:
        super().__init__()
        self._copier = self.copier = DelayedCopier(
            random.Random(seed), delays_out=delays_out, delays_in=delays_in
        )


class DelayedFunctions(QuietHook):
    """Functions that begin late."""

    name = "delayed functions"

    def __init__(self, seed: int) -> None:
        self._draw = random.Random(seed)

    def forward_preprocess(self, function: Any, in_data: Any) -> None:
        spin(self._draw)

    def begin_backward(self, function: Any, out_grad: Any) -> None:
        spin(self._draw)


@contextlib.contextmanager
def poisoned_memory() -> Iterator[None]:
    """Fill new memory with NaN, in the order of the stream that asked for it.

    Enter it inside the runtime.
    """
    allocate = cupy.cuda.get_allocator()

    def allocate_poisoned(nbytes: int) -> Any:
        memory = allocate(nbytes)
        if nbytes:
            memory.memset_async(0xFF, nbytes, cupy.cuda.get_current_stream())
        return memory

    cupy.cuda.set_allocator(allocate_poisoned)
    try:
        yield
    finally:
        cupy.cuda.set_allocator(allocate)


class DeviceSampler:
    """The most that was taken from the device since this was made, seen from another thread."""

    def __init__(self) -> None:
        cupy.get_default_memory_pool().free_all_blocks()
        self._before_bytes = _taken_bytes()
        #: Bytes more than there were before.
        self.most_bytes = 0
        self.samples = 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def _run(self) -> None:
        while not self._stop.wait(0.001):
            self.most_bytes = max(self.most_bytes, _taken_bytes() - self._before_bytes)
            self.samples += 1

    def __enter__(self) -> DeviceSampler:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()


def _taken_bytes() -> int:
    free_bytes, total_bytes = runtime.memGetInfo()
    return int(total_bytes - free_bytes)
