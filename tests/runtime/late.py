"""A device whose copies run beside its work and end as late as they may.

A CPU for arrays, with a copier that keeps each copy until somebody waits for it, as a GPU's copy
stream could: what forgets to wait meets old bytes, not luck. Tests run the runtime on it as it is.
"""

from __future__ import annotations

import random
from typing import Any

from dynamemo.allocator import DONE, Block, CopyTime, HostTier, Mark, Tier
from dynamemo.device import HostDevice
from tests.allocator import late_copier


class LateCopier(late_copier.LateCopier):
    """Copies that end late, or at random moments, and tell what they would have taken."""

    def __init__(self, draw: random.Random | None = None) -> None:
        super().__init__()
        self._draw = draw
        self._times: list[CopyTime] = []

    def _begin(self, queue: Any, copy: tuple[int, int, int], after: Mark = DONE) -> Mark:
        nbytes = copy[2]
        self._times.append(CopyTime(queue is self.out, nbytes, 1e-6 + nbytes / 50e9))
        mark = super()._begin(queue, copy, after)
        self._run_some()
        return mark

    def _run_some(self) -> None:
        if self._draw is not None and self._draw.random() < 0.5:
            self.run_due(self._draw)

    def times(self) -> list[CopyTime]:
        self._run_some()
        times, self._times = self._times, []
        return times


class LateDevice(HostDevice):
    """The CPU, with a host tier behind such a copier."""

    name = "late"
    has_host_tier = True

    def __init__(self, draw: random.Random | None = None) -> None:
        super().__init__()
        self.copier = self.late = LateCopier(draw)

    def make_host_tier(self, limit_bytes: int) -> Tier:
        return HostTier(self.late, limit_bytes, slab_bytes=1 << 20)

    def is_ordered(self, block: Block) -> bool:
        return True
