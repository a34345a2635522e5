"""A device with a clock of its own: what a GPU would take, worked out and not waited for.

Arrays are NumPy's and results are real; seconds are virtual. Functions take what the test says, a
copy takes its bytes at the link's rate, each direction is a queue, and work that is held behind a
copy waits for it. The host runs infinitely far ahead: no copy is ever seen to have ended.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

from dynamemo.allocator import DONE, Block, CopyTime, HostTier, Mark, Tier
from dynamemo.device import HostDevice
from tests.runtime.quiet_hook import QuietHook


class VirtualMark:
    """The end of a copy, at a moment of the virtual clock. The bytes are there at once."""

    is_done = False

    def __init__(self, copier: VirtualCopier, ends_s: float) -> None:
        self._copier = copier
        self.ends_s = ends_s

    def hold_compute(self) -> None:
        copier = self._copier
        copier.held_s += max(0.0, self.ends_s - copier.now_s)
        copier.now_s = max(copier.now_s, self.ends_s)

    def wait(self) -> None:
        self.hold_compute()


class VirtualCopier:
    """Both engines as queues."""

    is_host = False
    waits = 0

    def __init__(self, bytes_per_s: float) -> None:
        self.now_s = 0.0
        #: Seconds that work was held behind copies.
        self.held_s = 0.0
        #: Of the link, each way; may change at any time, as beside somebody else's copies.
        self.bytes_per_s = bytes_per_s
        self._free_s = {True: 0.0, False: 0.0}
        self._times: list[CopyTime] = []

    def to_host(
        self, host_address: int, device_address: int, nbytes: int, *, after: Mark = DONE
    ) -> Mark:
        return self._copy(host_address, device_address, nbytes, after, is_to_host=True)

    def to_device(
        self, device_address: int, host_address: int, nbytes: int, *, after: Mark = DONE
    ) -> Mark:
        return self._copy(device_address, host_address, nbytes, after, is_to_host=False)

    def _copy(self, target: int, source: int, nbytes: int, after: Any, *, is_to_host: bool) -> Mark:
        ctypes.memmove(target, source, nbytes)
        elapsed_s = 3e-6 + nbytes / self.bytes_per_s
        self._times.append(CopyTime(is_to_host, nbytes, elapsed_s))
        begins_s = max(self.now_s, self._free_s[is_to_host], getattr(after, "ends_s", 0.0))
        self._free_s[is_to_host] = begins_s + elapsed_s
        return VirtualMark(self, begins_s + elapsed_s)

    def times(self) -> list[CopyTime]:
        times, self._times = self._times, []
        return times

    def finish(self) -> None:
        self.now_s = max(self.now_s, *self._free_s.values())


class _Elapsed:
    def __init__(self, seconds: float) -> None:
        self._seconds = seconds

    def elapsed_s(self) -> float:
        return self._seconds


class VirtualDevice(HostDevice):
    """The CPU with virtual seconds.

    Parameters
    ----------
    bytes_per_s : float
        Of the link, each way.
    """

    has_host_tier = True

    def __init__(self, bytes_per_s: float) -> None:
        super().__init__()
        self.name = f"virtual:{bytes_per_s}"
        self.copier = self.clock = VirtualCopier(bytes_per_s)

    def make_host_tier(self, limit_bytes: int) -> Tier:
        return HostTier(self.clock, limit_bytes, slab_bytes=16 << 20)

    def is_ordered(self, block: Block) -> bool:
        return True

    def start_timer(self) -> float:
        return self.clock.now_s

    def stop_timer(self, start: float) -> Any:
        return _Elapsed(self.clock.now_s - start)


class Seconds(QuietHook):
    """Let each function take its virtual seconds, forward and twice that backward.

    To be entered inside the runtime.
    """

    name = "virtual seconds"

    def __init__(self, clock: VirtualCopier, cost: Callable[[Any], float]) -> None:
        self._clock = clock
        self._cost = cost

    def forward_postprocess(self, function: Any, in_data: Any) -> None:
        self._clock.now_s += self._cost(function)

    def backward_postprocess(self, function: Any, in_data: Any, out_grad: Any) -> None:
        self._clock.now_s += 2 * self._cost(function)
