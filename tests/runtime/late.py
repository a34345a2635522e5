"""A device whose copies run beside its work and end as late as they may.

A CPU for arrays, with a copier that keeps each copy until somebody waits for it, as a GPU's copy
stream could: what forgets to wait meets old bytes, not luck. Tests run the runtime on it as it is.
"""

from __future__ import annotations

import ctypes
import random
from collections import deque
from typing import Any

from dynamemo.allocator import DONE, Block, CopyTime, HostTier, Mark, Tier
from dynamemo.device import HostDevice


class LateMark:
    """The end of a copy that runs when it must."""

    def __init__(self, copier: LateCopier, queue: deque[Any], copy: Any, after: Mark) -> None:
        self._copier = copier
        self._queue = queue
        self._copy = copy
        self._after = after
        self.is_done = False

    def run(self) -> None:
        self._after.wait()
        target, source, nbytes = self._copy
        ctypes.memmove(target, source, nbytes)
        self.is_done = True

    def wait(self) -> None:
        """Run the copies of this direction up to this one."""
        while not self.is_done:
            self._queue.popleft().run()

    def hold_compute(self) -> None:
        """Do as `wait`: work here runs when it is given."""
        self._copier.holds += not self.is_done
        self.wait()


class LateCopier:
    """Copies that end late, or at random moments: each direction in its order."""

    is_host = False
    waits = 0

    def __init__(self, draw: random.Random | None = None) -> None:
        self._out: deque[LateMark] = deque()
        self._in: deque[LateMark] = deque()
        self._draw = draw
        self._times: list[CopyTime] = []
        #: How often work had to be held behind a copy.
        self.holds = 0

    def to_host(
        self, host_address: int, device_address: int, nbytes: int, *, after: Mark = DONE
    ) -> Mark:
        self._times.append(CopyTime(True, nbytes, 1e-6 + nbytes / 50e9))
        return self._begin(self._out, (host_address, device_address, nbytes), after)

    def to_device(
        self, device_address: int, host_address: int, nbytes: int, *, after: Mark = DONE
    ) -> Mark:
        self._times.append(CopyTime(False, nbytes, 1e-6 + nbytes / 50e9))
        return self._begin(self._in, (device_address, host_address, nbytes), after)

    def _begin(self, queue: deque[LateMark], copy: Any, after: Mark) -> Mark:
        mark = LateMark(self, queue, copy, after)
        queue.append(mark)
        self._run_some()
        return mark

    def _run_some(self) -> None:
        draw = self._draw
        while draw is not None and draw.random() < 0.4:
            queue = draw.choice((self._out, self._in))
            if queue:
                queue.popleft().run()

    def times(self) -> list[CopyTime]:
        self._run_some()
        times, self._times = self._times, []
        return times

    def finish(self) -> None:
        for queue in (self._out, self._in):
            while queue:
                queue.popleft().run()


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
