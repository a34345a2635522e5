"""The one rehearsed GPU that is in force: whose memory new arrays get, and whose clock goes on.

Arrays and kernels find it here, as CuPy's find the current device.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from benchmarks.rehearsing.roofline import Roofline
from benchmarks.rehearsing.virtual_time import VirtualCopier
from dynamemo.allocator import OutOfMemoryError, Pool
from dynamemo.allocator.numpy_capi import set_handler
from dynamemo.allocator.numpy_handler import PoolHandler
from dynamemo.allocator.numpy_records import collect_all


class _Handler(PoolHandler):
    """Notices every free at once, as CuPy's pool does, and not only some at each request."""

    def take(self, nbytes: int) -> Any:
        collect_all()
        return super().take(nbytes)


class Gpu:
    """Memory and time.

    Parameters
    ----------
    clock : VirtualCopier
        Goes on by what kernels take.
    roofline : Roofline
    """

    def __init__(self, clock: VirtualCopier, roofline: Roofline) -> None:
        self.clock = clock
        self.roofline = roofline
        #: Called with each array that was made, for whoever keeps a journal.
        self.on_birth: Callable[[Any], None] | None = None
        self._pool: Pool | None = None
        #: NumPy's handler for the next array, while a pool is in force.
        self._handler: object = None

    @contextlib.contextmanager
    def serving(self, pool: Pool) -> Iterator[Pool]:
        """Take the memory of new arrays from a pool."""
        handler = _Handler(pool, small_bytes=1)
        previous = handler.enter()
        self._handler, self._pool = set_handler(previous), pool
        try:
            yield pool
        finally:
            set_handler(self._handler)
            self._handler = self._pool = None
            handler.leave(previous)

    def make(self, build: Callable[[], Any]) -> Any:
        """Build an array with memory from the pool.

        Raises
        ------
        OutOfMemoryError
            As on a GPU, from where it was asked for.
        """
        pool = self._pool
        if pool is None:
            return build()
        previous = set_handler(self._handler)
        try:
            array = build()
        except MemoryError:
            error, pool.last_error = pool.last_error, None
            if isinstance(error, OutOfMemoryError):
                raise error from None
            raise
        finally:
            self._handler = set_handler(previous)
        if self.on_birth is not None:
            self.on_birth(array)
        return array

    def work(self, nbytes: int, flops: float = 0.0, flops_per_s: float = 1.0) -> None:
        """Let the clock go on by a kernel."""
        self.clock.now_s += self.roofline.seconds(nbytes, flops, flops_per_s)


class NoGpuError(RuntimeError):
    """Something was asked of the rehearsed GPU while there is none."""


_present: Gpu | None = None


def present() -> Gpu:
    """Return the GPU in force."""
    if _present is None:
        raise NoGpuError("no rehearsed GPU is in force: enter `standing_in` first")
    return _present


@contextlib.contextmanager
def in_force(gpu: Gpu) -> Iterator[Gpu]:
    """Put a GPU in force."""
    global _present
    former, _present = _present, gpu
    try:
        yield gpu
    finally:
        _present = former
