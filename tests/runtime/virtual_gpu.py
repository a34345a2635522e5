"""A device with a clock of its own: what a GPU would take, worked out and not waited for.

Arrays are NumPy's and results are real; seconds are virtual. Functions take what the test says, and
copies what `benchmarks.rehearsing.virtual_time` says.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from benchmarks.rehearsing.virtual_time import Elapsed, VirtualCopier
from dynamemo.allocator import Block, HostTier, Tier
from dynamemo.device import HostDevice
from tests.runtime.quiet_hook import QuietHook


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
        return Elapsed(self.clock.now_s - start)


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
