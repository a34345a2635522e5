"""A copier whose copies are done as late as its promises allow.

It stands for a GPU's copy engines without one: a copy reads its source when it runs, not when it is
begun, so whoever writes there too early spoils it.
"""

from __future__ import annotations

import ctypes
import random
import threading
from collections import deque

from dynamemo.allocator import DONE, CopyTime, Mark


class LateMark:
    """The end of a copy that runs when somebody waits for it."""

    def __init__(
        self, copier: LateCopier, queue: deque[LateMark], copy: tuple[int, int, int], after: Mark
    ) -> None:
        self.is_done = False
        self.copy = copy
        self.after = after
        self._copier = copier
        self._queue = queue

    def hold_compute(self) -> None:
        self._copier.holds += 1
        self.run()

    def wait(self) -> None:
        self._copier.waits += not self.is_done
        self.run()

    def run(self) -> None:
        """Run the copies up to this one, in their order."""
        with self._copier.lock:
            while not self.is_done:
                self._queue[0].run_alone()
                self._queue.popleft()

    def run_alone(self) -> None:
        if isinstance(self.after, LateMark):
            self.after.run()
        else:
            self.after.wait()
        ctypes.memmove(*self.copy)
        self.is_done = True
        self.after = DONE


class LateCopier:
    """Copies in the order in which they were begun, in each direction by itself.

    Parameters
    ----------
    fails_at : int, optional
        The copy of that number, from 1 on, is interrupted after it was begun.
    """

    is_host = False

    def __init__(self, *, fails_at: int | None = None) -> None:
        #: How often somebody waited for a copy that had not ended, or held the compute stream.
        self.waits = self.holds = 0
        #: Copies begun so far.
        self.copies = 0
        self.fails_at = fails_at
        self.lock = threading.RLock()
        self.out: deque[LateMark] = deque()
        self.inward: deque[LateMark] = deque()

    def to_host(
        self, host_address: int, device_address: int, nbytes: int, *, after: Mark = DONE
    ) -> Mark:
        return self._begin(self.out, (host_address, device_address, nbytes), after)

    def to_device(
        self, device_address: int, host_address: int, nbytes: int, *, after: Mark = DONE
    ) -> Mark:
        return self._begin(self.inward, (device_address, host_address, nbytes), after)

    def run_due(self, draw: random.Random | None = None) -> None:
        """Run all copies that can run; with `draw`, some of them, chosen at random."""
        for queue in (self.out, self.inward):
            with self.lock:
                count = len(queue) if draw is None else draw.randint(0, len(queue))
                if count:
                    queue[count - 1].run()

    def times(self) -> list[CopyTime]:
        return []

    def finish(self) -> None:
        self.run_due()

    def _begin(self, queue: deque[LateMark], copy: tuple[int, int, int], after: Mark) -> Mark:
        with self.lock:
            mark = LateMark(self, queue, copy, after)
            queue.append(mark)
            self.copies += 1
            if self.copies == self.fails_at:
                raise KeyboardInterrupt
            return mark
