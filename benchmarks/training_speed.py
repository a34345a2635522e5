"""A network trains within a budget about as fast as without one, and with the very same results.

Claims checked (exit code 1 where one does not hold):

- with a budget that holds everything ("ample"), a step takes at most `--most-ample` longer than
  without dynamemo;
- within each of `--budgets`, at most as much longer as is written behind it;
- parameters and gradients after the last step are bit-equal to those without dynamemo.

All modes train the same network from the same seed in one process, one after the other, over and
over (`--rounds`). The host does not wait within a run: events mark the steps, the first of which
are left out. The median over the steps of all rounds counts, and the smallest round's median is
printed beside it. On a CPU the clock takes the place of events.

Usage: python -m benchmarks.training_speed [--net resnet50|vgg16] [--batch N]
       [--budgets 11.2GB:0.03,7.5GB:0.08] [--profile MODE] [--out FILE]
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import hashlib
import itertools
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import dynamemo
from benchmarks.environment import describe

PLAIN, AMPLE = "without dynamemo", "ample"
CLASSES = 1000


def _network(name: str) -> tuple[Any, str]:
    import chainer.links as L

    factory, output = {
        "resnet50": (L.ResNet50Layers, "fc6"),
        "resnet101": (L.ResNet101Layers, "fc6"),
        "vgg16": (L.VGG16Layers, "fc8"),
    }[name]
    return factory(pretrained_model=None), output


class _Training:
    """A network with its optimizer on a device, from a fixed seed."""

    def __init__(self, options: argparse.Namespace) -> None:
        import chainer
        import numpy

        numpy.random.seed(0)
        self.xp = numpy
        self.model, self.output = _network(options.net)
        generator = numpy.random.RandomState(1)
        x = generator.standard_normal((options.batch, 3, options.size, options.size)).astype("f")
        t = generator.randint(0, CLASSES, options.batch).astype("i")
        if options.device != "cpu":
            import cupy

            self.xp = cupy
            cupy.random.seed(0)
            self.model.to_device("@cupy:0")
        self.x, self.t = self.xp.asarray(x), self.xp.asarray(t)
        self.optimizer = chainer.optimizers.MomentumSGD(lr=0.001).setup(self.model)

    def step(self) -> None:
        import chainer.functions as F

        loss = F.softmax_cross_entropy(
            self.model(self.x, layers=[self.output])[self.output], self.t
        )
        self.model.cleargrads()
        loss.backward()
        self.optimizer.update()

    def digest(self) -> str:
        from chainer.backends.cuda import to_cpu

        digest = hashlib.blake2b()
        for _, param in sorted(self.model.namedparams()):
            digest.update(to_cpu(param.array).tobytes())
            digest.update(to_cpu(param.grad).tobytes())
        return digest.hexdigest()

    def timed(self, steps: int) -> tuple[list[float], float]:
        """Return the milliseconds of each step, and of the host for one."""
        started = time.perf_counter()
        marks = []
        for _ in range(steps):
            marks.append(self._mark())
            self.step()
        marks.append(self._mark())
        host_ms = (time.perf_counter() - started) * 1e3 / steps
        return [self._between_ms(*pair) for pair in itertools.pairwise(marks)], host_ms

    def _mark(self) -> Any:
        if self.xp.__name__ == "cupy":
            return self.xp.cuda.get_current_stream().record()
        return time.perf_counter()

    def _between_ms(self, start: Any, stop: Any) -> float:
        if self.xp.__name__ == "cupy":
            stop.synchronize()
            return float(self.xp.cuda.get_elapsed_time(start, stop))
        return float(stop - start) * 1e3


def _modes(
    options: argparse.Namespace,
) -> Iterator[tuple[str, float, Callable[[], contextlib.AbstractContextManager[Any]]]]:
    """Yield the name of each mode, the loss it may have, and its context."""

    def runtime(budget: str) -> Callable[[], dynamemo.Runtime]:
        return lambda: dynamemo.Runtime(budget, device=options.device, policy=options.policy)

    yield PLAIN, 0.0, contextlib.nullcontext
    yield AMPLE, options.most_ample, runtime(options.ample)
    for text in filter(None, options.budgets.split(",")):
        budget, _, limit = text.partition(":")
        yield budget, float(limit or "inf"), runtime(budget)


def _run(options: argparse.Namespace, context: Any) -> dict[str, Any]:
    """Train once; return times, results and what the runtime says."""
    with context as runtime:
        training = _Training(options)
        for _ in range(options.warm_up):
            training.step()
        steps_ms, host_ms = training.timed(options.steps)
        result = {"steps_ms": steps_ms, "host_ms": host_ms, "digest": training.digest()}
        del training
    if runtime is not None:
        result["statistics"] = runtime.statistics().as_dict()
    _let_go(options)
    return result


def _let_go(options: argparse.Namespace) -> None:
    gc.collect()
    if options.device != "cpu":
        import cupy

        cupy.get_default_memory_pool().free_all_blocks()


def _profile(options: argparse.Namespace) -> None:
    import cProfile
    import pstats

    context = {name: make for name, _, make in _modes(options)}[options.profile]()
    with context:
        training = _Training(options)
        for _ in range(options.warm_up):
            training.step()
        profile = cProfile.Profile()
        with profile:
            for _ in range(options.steps):
                training.step()
        del training
    pstats.Stats(profile).sort_stats("tottime").print_stats(45)


def _judge(options: argparse.Namespace, runs: dict[str, list[dict[str, Any]]]) -> list[str]:
    """Print a line a mode; return what does not hold."""
    failures = []
    limits = {name: limit for name, limit, _ in _modes(options)}
    expected = runs[PLAIN][0]["digest"]
    plain_ms = _median_ms(runs[PLAIN])
    for name, results in runs.items():
        if not results:
            continue
        step_ms = _median_ms(results)
        loss = step_ms / plain_ms - 1
        least_ms = min(statistics.median(result["steps_ms"]) for result in results)
        is_equal = all(result["digest"] == expected for result in results)
        line = f"{name:18} {step_ms:9.2f} ms ({loss:+7.1%})  least {least_ms:9.2f}"
        line += f"  host {statistics.median(r['host_ms'] for r in results):8.2f}"
        if figures := results[-1].get("statistics"):
            steps = max(figures["iterations"], 1)
            line += f"  peak {figures['peak_bytes'] / 1e9:6.2f} GB, a step:"
            for key in ("dropped", "recomputed", "offloaded", "fetched"):
                line += f" {key} {figures[f'{key}_bytes'] / steps / 1e9:.2f}"
        print(f"{line}  {'bit-equal' if is_equal else 'DIFFERENT'}", flush=True)
        if not is_equal:
            failures.append(f"{name}: results differ")
        if loss > limits[name] and name != PLAIN:
            failures.append(f"{name}: {loss:.1%} lost, at most {limits[name]:.0%} allowed")
    return failures


def _median_ms(results: list[dict[str, Any]]) -> float:
    return statistics.median(ms for result in results for ms in result["steps_ms"])


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--net", default="resnet50")
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--size", type=int, default=224)
    parser.add_argument("--ample", default="80%", help="a budget that holds everything")
    parser.add_argument("--most-ample", type=float, default=0.03)
    parser.add_argument("--budgets", default="", help="BUDGET[:MOST LOSS],...")
    parser.add_argument("--policy", default="cost-aware")
    parser.add_argument("--warm-up", type=int, default=5)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--profile", metavar="MODE", help="print where one mode's host time goes")
    parser.add_argument("--out", help="file for the results")
    return parser


def main() -> int:
    """Run all modes in alternation; print a line each; return the exit code."""
    options = _parser().parse_args()
    if options.profile:
        _profile(options)
        return 0
    modes = list(_modes(options))
    runs: dict[str, list[dict[str, Any]]] = {name: [] for name, _, _ in modes}
    failures = []
    for _ in range(options.rounds):
        for name, _, make in list(modes):
            try:
                runs[name].append(_run(options, make()))
            except dynamemo.OutOfMemoryError as error:
                failures.append(f"{name}: {error}")
                modes = [mode for mode in modes if mode[0] != name]
                del error
                _let_go(options)
    failures += _judge(options, runs)
    if options.out:
        asked = {k: v for k, v in vars(options).items() if k not in ("out", "profile")}
        with open(options.out, "w") as file:
            json.dump({"environment": describe(), "options": asked, "runs": runs}, file, indent=1)
    for failure in failures:
        print(f"FAILED: {failure}")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
