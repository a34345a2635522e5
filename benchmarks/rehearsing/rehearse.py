"""Rehearse a training within a budget: what it would take, in memory and in virtual seconds."""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import dynamemo
from benchmarks.rehearsing.arena_map import ArenaMap, Witness
from benchmarks.rehearsing.machine import RehearsedDevice
from benchmarks.rehearsing.standing_in import standing_in
from dynamemo.statistics import Statistics

#: Host memory for evicted values, as on the machines with the GPU.
HOST_BUDGET = "64GB"
_COUNTED = ("dropped", "recomputed", "offloaded", "fetched")


@dataclass(frozen=True, slots=True)
class Step:
    """What one step took."""

    elapsed_s: float
    #: Of these, how long work was held behind copies.
    held_s: float
    dropped_bytes: int
    recomputed_bytes: int
    offloaded_bytes: int
    fetched_bytes: int


@dataclass(frozen=True, slots=True)
class Result:
    """What a rehearsal gave."""

    budget_bytes: int
    policy: str
    steps: tuple[Step, ...]
    #: All memory at once, at its highest.
    peak_bytes: int
    #: Message of the error that ended it, None where it went to its end.
    error: str | None
    #: What lay where at the last request that failed, where that was asked for.
    arena_map: ArenaMap | None = None

    def as_dict(self) -> dict[str, Any]:
        """Return it as JSON could be made of, without the map."""
        figures = {name: getattr(self, name) for name in ("budget_bytes", "policy", "peak_bytes")}
        return {**figures, "steps": [asdict(step) for step in self.steps], "error": self.error}


def rehearse(
    make: Callable[[], Any],
    step: Callable[[Any], Any],
    budget: int | str,
    *,
    steps: int = 8,
    policy: str = "cost-aware",
    device: RehearsedDevice | None = None,
    host_budget: int | str = HOST_BUDGET,
    explains: bool = False,
    trace: str | None = None,
) -> Result:
    """Train on a GPU that is not there.

    Parameters
    ----------
    make : callable
        Makes the training, its model and batch on the device ``"@cupy:0"``.
    step : callable
        Trains once; given what `make` returned.
    budget : int or str
        Of the runtime.
    explains : bool
        Whether a map of the arena is made where memory runs out (slower).
    trace : path, optional
        Where the last step's trace is saved for ``dynamemo plan``.
    """
    device = device or RehearsedDevice()
    runtime = dynamemo.Runtime(budget, device=device, policy=policy, host_budget=host_budget)
    taken: list[Step] = []
    witness = Witness(device) if explains else None
    error = None
    gc.collect()  # so that the collector's next turns come when they would in a fresh process
    try:
        with standing_in(device.gpu), runtime:
            if witness is not None:
                witness.attach(runtime)
            training = make()
            for _ in range(steps):
                taken.append(_one_step(functools.partial(step, training), runtime, device))
            if trace is not None:
                runtime.save_trace(trace)
            del training
    except dynamemo.OutOfMemoryError as failure:
        error = str(failure)
    gc.collect()
    final = runtime.statistics()
    arena_map = None if witness is None or error is None else witness.last
    counted = (final.budget_bytes, final.policy, tuple(taken), final.peak_bytes)
    return Result(*counted, error, arena_map)


def _one_step(run: Callable[[], Any], runtime: dynamemo.Runtime, device: RehearsedDevice) -> Step:
    before, began_s, held_s = runtime.statistics(), device.clock.now_s, device.clock.held_s
    run()
    after = runtime.statistics()
    return Step(
        device.clock.now_s - began_s, device.clock.held_s - held_s, *_differences(before, after)
    )


def _differences(before: Statistics, after: Statistics) -> tuple[int, ...]:
    names = [f"{name}_bytes" for name in _COUNTED]
    return tuple(getattr(after, name) - getattr(before, name) for name in names)
