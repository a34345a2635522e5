"""Claim: where nothing has to be evicted, the runtime costs at most 8 % of a host-bound step.

A chain of small functions (linear, batch normalization, relu, sum, reshape) trains without
dynamemo, with its pool alone, with a runtime that only accounts, and with the default policy and a
budget that fits; one after the other in the same process, over and over, medians side by side.
`pool` is what handing out memory costs (on a CPU mostly NumPy's callbacks, on a GPU little); what a
runtime has beyond it is bookkeeping. Times are the host's: arrays are small, so that nothing but
Python counts.

`--device light` is a CPU without these callbacks, the nearest to a GPU where there is none.

Usage: python -m benchmarks.overhead [--device cpu|light|cuda] [--rounds N] [--out FILE]
       python -m benchmarks.overhead --profile MODE   (where the time of one mode goes)
"""

from __future__ import annotations

import argparse
import contextlib
import cProfile
import gc
import json
import pstats
import sys
import time
import weakref
from collections.abc import Callable
from statistics import median
from typing import Any

import dynamemo
import dynamemo.runtime
from benchmarks.environment import describe
from dynamemo.allocator import Block, Pool
from dynamemo.allocator.block import BLOCK_SLOTS
from dynamemo.device import HostDevice
from dynamemo.storage import View

#: Parts of a step, and of which count their time is given per item.
PARTS = ("forward", "backward", "update")
#: Functions in a block of the chain.
BLOCK_FUNCTIONS = 6
#: Enough for the chain several times over; mapped, hardly touched.
BUDGET = 1 << 30


class _WatchedBlock(Block, weakref.ref[Any]):
    """Notices the death of its array, as a GPU's block notices that of its memory."""

    __slots__ = (*BLOCK_SLOTS, "key")
    key: int


class _LightDevice(HostDevice):
    """A CPU whose arrays find their blocks as fast as a GPU's do.

    NumPy's callbacks cost more than all bookkeeping, and a GPU has none. So memory stays NumPy's,
    and a block is taken when the runtime first looks for it. Nothing can be evicted.
    """

    def __init__(self) -> None:
        super().__init__()
        self._blocks: dict[int, Block] = {}
        self._note_death = self._free  # bound once

    def make_pool(self, budget_bytes: int) -> Pool:
        self._pool = super().make_pool(budget_bytes)
        return self._pool

    def using_pool(
        self, pool: Pool, *, small_bytes: int | None
    ) -> contextlib.AbstractContextManager[Any]:
        return contextlib.nullcontext()

    def block_of(self, array: Any) -> Block | None:
        base = array.base
        while base is not None:
            array = base
            base = array.base
        block = self._blocks.get(id(array))
        return self._take(array) if block is None else block

    def _take(self, root: Any) -> Block:
        block = _WatchedBlock(root, self._note_death)
        block.address = 0
        block.key = id(root)
        self._pool.place(block, root.nbytes, None, 0)
        self._blocks[block.key] = block
        return block

    def _free(self, block: Any) -> None:
        del self._blocks[block.key]
        self._pool.late.append(block)

    def view_of(self, array: Any, block: Block) -> View:
        return View(0, array.shape, array.dtype, array.strides)


def _runtime(device: str, policy: str) -> Any:
    if device == "light":
        dynamemo.runtime._resolve_device = lambda name: _LightDevice()
    return dynamemo.Runtime(BUDGET, device=device, policy=policy)


def _pool(device: str) -> Any:
    return (
        contextlib.nullcontext()
        if device == "light"
        else dynamemo.using_pool(BUDGET, device=device)
    )


def _modes(device: str) -> dict[str, Callable[[], contextlib.AbstractContextManager[Any]]]:
    def runtime(policy: str) -> Callable[[], Any]:
        return lambda: _runtime(device, policy)

    return {
        "plain": contextlib.nullcontext,
        "pool": lambda: _pool(device),
        "none": runtime("none"),
        "cost-aware": runtime("cost-aware"),
    }


def _chain(blocks: int, width: int) -> Any:
    import chainer
    import chainer.functions as F
    import chainer.links as L

    class Chain(chainer.ChainList):
        def __init__(self) -> None:
            super().__init__()
            for _ in range(blocks):
                self.append(L.Linear(width, width))
                self.append(L.BatchNormalization(width))

        def forward(self, x: Any) -> Any:
            links = list(self.children())
            for linear, normalize in zip(links[::2], links[1::2], strict=True):
                y = F.relu(normalize(linear(x)))
                y = F.reshape(F.reshape(y, (-1, 2, width // 2)), (-1, width))
                x = x + y
            return F.sum(x)

    return Chain()


class _Training:
    """A model and its optimizer, and the seconds of the parts of each step."""

    def __init__(self, options: argparse.Namespace) -> None:
        import chainer
        import numpy

        numpy.random.seed(0)
        self.model = _chain(options.blocks, options.width)
        self.xp = numpy
        if options.device == "cuda":
            import cupy

            self.xp = cupy
            self.model.to_device("@cupy:0")
        self.optimizer = chainer.optimizers.MomentumSGD(1e-6).setup(self.model)
        self.x = self.xp.ones((options.batch, options.width), "f")
        self.seconds: dict[str, list[float]] = {part: [] for part in PARTS}

    def step(self) -> None:
        started = self._now()
        loss = self.model(self.x)
        forward = self._now()
        self.model.cleargrads()
        loss.backward()
        backward = self._now()
        self.optimizer.update()
        update = self._now()
        for part, elapsed_s in zip(
            PARTS, (forward - started, backward - forward, update - backward), strict=True
        ):
            self.seconds[part].append(elapsed_s)

    def _now(self) -> float:
        if self.xp.__name__ == "cupy":
            # The queue of launches must not fill up, and its work must not count as the host's.
            now = time.perf_counter()
            self.xp.cuda.get_current_stream().synchronize()
            self._waited_s = getattr(self, "_waited_s", 0.0) + time.perf_counter() - now
            return time.perf_counter() - self._waited_s
        return time.thread_time()  # whoever else uses the machine does not count


def _run(options: argparse.Namespace, mode: str) -> dict[str, float]:
    """Train once in a mode; return the median seconds of each part."""
    with _modes(options.device)[mode]():
        training = _Training(options)
        for _ in range(options.warm_up):
            training.step()
        for part in PARTS:
            training.seconds[part].clear()
        gc.collect()
        for _ in range(options.steps):
            training.step()
        seconds = {part: median(training.seconds[part]) for part in PARTS}
        del training
    return seconds


def _profile(options: argparse.Namespace, mode: str) -> None:
    with _modes(options.device)[mode]():
        training = _Training(options)
        for _ in range(options.warm_up):
            training.step()
        profile = cProfile.Profile()
        with profile:
            for _ in range(options.steps):
                training.step()
        del training
    statistics = pstats.Stats(profile)
    statistics.sort_stats("tottime").print_stats(50)


def _summary(options: argparse.Namespace, runs: dict[str, list[dict[str, float]]]) -> Any:
    """Return microseconds per function (per parameter for updates), and the share over plain."""
    counts = dict.fromkeys(PARTS, options.blocks * BLOCK_FUNCTIONS + 1)
    counts["update"] = options.blocks * 4
    plain = {part: median(run[part] for run in runs["plain"]) for part in PARTS}
    summary = {}
    for mode, results in runs.items():
        seconds = {part: median(run[part] for run in results) for part in PARTS}
        summary[mode] = {
            **{f"{part}_us": seconds[part] / counts[part] * 1e6 for part in PARTS},
            **{
                f"{part}_added_us": (seconds[part] - plain[part]) / counts[part] * 1e6
                for part in PARTS
            },
            "step_ms": sum(seconds.values()) * 1e3,
            "overhead": sum(seconds.values()) / sum(plain.values()) - 1,
        }
    return summary


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", choices=("cpu", "light", "cuda"), default="cpu")
    parser.add_argument("--blocks", type=int, default=50)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--warm-up", type=int, default=12)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", help="file for the results")
    parser.add_argument("--profile", metavar="MODE", help="print where one mode's time goes")
    return parser


def main() -> int:
    """Run all modes in alternation; print a line each."""
    options = _parser().parse_args()
    if options.profile:
        _profile(options, options.profile)
        return 0
    runs: dict[str, list[dict[str, float]]] = {mode: [] for mode in _modes(options.device)}
    for _ in range(options.rounds):
        for mode, results in runs.items():
            results.append(_run(options, mode))
    summary = _summary(options, runs)
    print(f"{'us per function':16}{'forward':>18}{'backward':>18}{'update':>18}{'step':>12}")
    for mode, figures in summary.items():
        line = f"{mode:16}"
        for part in PARTS:
            line += f"{figures[f'{part}_us']:9.1f} ({figures[f'{part}_added_us']:+6.1f})"
        print(f"{line}{figures['step_ms']:9.1f} ms  {figures['overhead']:+7.1%}")
    if options.out:
        asked = {k: v for k, v in vars(options).items() if k not in ("out", "profile")}
        result = {"environment": describe(), "options": asked, "modes": summary}
        with open(options.out, "w") as file:
            json.dump(result, file, indent=2)
    return 0


if __name__ == "__main__":
    sys.exit(main())
