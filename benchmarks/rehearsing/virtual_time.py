"""A clock that is worked out, and a link whose copies take their seconds by it.

Each direction is a queue, and work that is held behind a copy waits for it. The host runs
infinitely far ahead: no copy is ever seen to have ended.
"""

from __future__ import annotations

import ctypes
from typing import Any

from dynamemo.allocator import DONE, CopyTime, Mark

#: Seconds from asking for a copy to its first byte.
_LATENCY_S = 3e-6


class VirtualMark:
    """The end of a copy, at a moment of the virtual clock. The bytes are there at once."""

    is_done = False

    def __init__(self, copier: VirtualCopier, ends_s: float) -> None:
        self._copier = copier
        self.ends_s = ends_s

    def hold_compute(self) -> None:
        """Let the clock go on to the end of the copy, if it is not there yet."""
        copier = self._copier
        copier.held_s += max(0.0, self.ends_s - copier.now_s)
        copier.now_s = max(copier.now_s, self.ends_s)

    def wait(self) -> None:
        """Do as `hold_compute`."""
        self.hold_compute()


class VirtualCopier:
    """Both engines as queues; the bytes are copied at once.

    Parameters
    ----------
    bytes_per_s : float
        Of the link, each way; may change at any time, as beside somebody else's copies.
    """

    is_host = False
    waits = 0

    def __init__(self, bytes_per_s: float) -> None:
        self.now_s = 0.0
        #: Seconds that work was held behind copies.
        self.held_s = 0.0
        self.bytes_per_s = bytes_per_s
        self._free_s = {True: 0.0, False: 0.0}
        self._times: list[CopyTime] = []

    def to_host(
        self, host_address: int, device_address: int, nbytes: int, *, after: Mark = DONE
    ) -> Mark:
        """Copy out."""
        self._move(host_address, device_address, nbytes)
        return self._queue(nbytes, after, is_to_host=True)

    def to_device(
        self, device_address: int, host_address: int, nbytes: int, *, after: Mark = DONE
    ) -> Mark:
        """Copy in."""
        self._move(device_address, host_address, nbytes)
        return self._queue(nbytes, after, is_to_host=False)

    def _move(self, target: int, source: int, nbytes: int) -> None:
        ctypes.memmove(target, source, nbytes)

    def _queue(self, nbytes: int, after: Any, *, is_to_host: bool) -> Mark:
        elapsed_s = _LATENCY_S + nbytes / self.bytes_per_s
        self._times.append(CopyTime(is_to_host, nbytes, elapsed_s))
        begins_s = max(self.now_s, self._free_s[is_to_host], getattr(after, "ends_s", 0.0))
        self._free_s[is_to_host] = begins_s + elapsed_s
        return VirtualMark(self, begins_s + elapsed_s)

    def times(self) -> list[CopyTime]:
        """Return what the copies since the last call take."""
        times, self._times = self._times, []
        return times

    def finish(self) -> None:
        """Let the clock go on to the end of all copies."""
        self.now_s = max(self.now_s, *self._free_s.values())


class UntouchedCopier(VirtualCopier):
    """Copies that take their time and move nothing: neither side is ever read or written."""

    def _move(self, target: int, source: int, nbytes: int) -> None:
        pass


class Elapsed:
    """Seconds that are known at once."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds

    def elapsed_s(self) -> float:
        """Return them."""
        return self._seconds
