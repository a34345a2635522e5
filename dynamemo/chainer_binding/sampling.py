"""Decide which applications are measured, and file what they took.

A timer costs as much as all other notes of an application, so only some applications get one: every
one of a class while some of its signatures are new, then one in `PERIOD`. Which signature an
application will have is known only afterwards; hence the decision by class.

What it does not cover: what becomes of the seconds (`graph.CostModel`).
"""

from __future__ import annotations

from collections import deque
from typing import Any

from dynamemo.allocator import Pool
from dynamemo.device import Device, Timer
from dynamemo.graph import CostModel
from dynamemo.recipe import Signature

#: Applications of a settled class from one measured to the next.
PERIOD = 128
#: Applications of a class that are measured after one with a new signature was seen: enough for the
#: signature to come by again in the next iteration.
BURST = 256


class _Turn:
    """When the next application of a class is measured."""

    __slots__ = ("burst", "left")

    def __init__(self) -> None:
        #: Applications that are still measured.
        self.burst = 1
        #: Applications until the next one of a settled class is.
        self.left = PERIOD


class Measurement:
    """One application that is being measured."""

    __slots__ = ("meter", "started", "timer", "transient_bytes")

    def __init__(self, meter: tuple[int, int], started: Any) -> None:
        self.meter = meter
        self.started = started
        self.timer: Timer | None = None
        self.transient_bytes = 0


class Sampler:
    """Measure some of the applications.

    Parameters
    ----------
    device, pool
        What is measured: the device's time, the pool's highest use.
    costs : CostModel
        Where the seconds go.
    """

    def __init__(self, device: Device, pool: Pool, costs: CostModel) -> None:
        self._device = device
        self._pool = pool
        self._costs = costs
        self._turns: dict[type, _Turn] = {}
        #: Seconds that the device may not know yet, in the order of its work.
        self._timers: deque[tuple[Signature, Timer]] = deque()

    def start(self, cls: type) -> Measurement | None:
        """Begin to measure an application of a function of that class, if it is its turn."""
        turn = self._turns.get(cls)
        if turn is None:
            turn = self._turns[cls] = _Turn()
        if turn.burst:
            turn.burst -= 1
        else:
            turn.left -= 1
            if turn.left:
                return None
            turn.left = PERIOD
        return Measurement(self._pool.start_meter(), self._device.start_timer())

    def stop_timer(self, measurement: Measurement) -> None:
        """Note that the application has returned."""
        measurement.timer = self._device.stop_timer(measurement.started)

    def stop_meter(self, measurement: Measurement) -> None:
        """Note that it is over; also after an exception, since meters nest."""
        measurement.transient_bytes = self._pool.stop_meter(measurement.meter)

    def file(self, cls: type, signature: Signature, measurement: Measurement | None) -> None:
        """Note which signature the application had, and what it took if it was measured."""
        if measurement is None and signature.is_settled:
            return
        if measurement is not None and measurement.timer is not None:
            signature.transient_bytes = measurement.transient_bytes
            self._timers.append((signature, measurement.timer))
            self.settle()
        signature.is_settled = self._costs.is_settled(signature)
        if not signature.is_settled:
            self._turns[cls].burst = BURST

    def settle(self) -> None:
        """File the seconds that the device knows by now."""
        timers = self._timers
        while timers:
            elapsed_s = timers[0][1].elapsed_s()
            if elapsed_s is None:
                return
            self._costs.observe(timers.popleft()[0], elapsed_s)
