"""ResNet-50 trains within a share of its peak, bit-equal, and the process or device shows it.

Claims checked (exit code 1 where one does not hold):

- losses, gradients, parameters and BatchNormalization statistics are bit-equal to a run without
  dynamemo, at each share;
- CPU: the process's resident memory, sampled from another process, falls accordingly;
- GPU: memory taken from the device (`memGetInfo`, sampled from a second thread) never exceeds the
  budget by more than what the CUDA context and its libraries had taken before.

Every run is a process of its own, started by this script, one after the other.

Usage: python -m benchmarks.resnet50 [--device cpu|cuda] [--batch N] [--size N] [--shares 0.5,0.3]
"""

from __future__ import annotations

import argparse
import gc
import hashlib
import json
import os
import subprocess
import sys
import threading
import time
from typing import Any

from benchmarks.environment import describe


def _train(options: argparse.Namespace) -> dict[str, Any]:
    import chainer
    import chainer.functions as F
    import chainer.links as L
    import numpy

    gpu = options.device != "cpu"
    numpy.random.seed(0)
    model = L.ResNet50Layers(pretrained_model=None)
    xp = numpy
    if gpu:
        import cupy as xp

        model.to_device("@cupy:0")
    optimizer = chainer.optimizers.MomentumSGD(0.01).setup(model)
    generator = numpy.random.RandomState(1)
    digest, seconds = hashlib.blake2b(), []
    for _ in range(options.steps):
        shape = (options.batch, 3, options.size, options.size)
        x = xp.asarray(generator.standard_normal(shape).astype("f"))
        t = xp.asarray(generator.randint(0, 1000, options.batch).astype("i"))
        started = time.perf_counter()
        loss = F.softmax_cross_entropy(model(x, layers=["fc6"])["fc6"], t)
        model.cleargrads()
        loss.backward()
        optimizer.update()
        digest.update(chainer.backends.cuda.to_cpu(loss.array).tobytes())
        seconds.append(time.perf_counter() - started)
        del loss
    _digest_model(model, digest)
    return {"digest": digest.hexdigest(), "seconds": min(seconds)}


def _digest_model(model: Any, digest: Any) -> None:
    import chainer
    import numpy

    for _, param in sorted(model.namedparams()):
        digest.update(chainer.backends.cuda.to_cpu(param.array).tobytes())
        digest.update(chainer.backends.cuda.to_cpu(param.grad).tobytes())
    for _, link in sorted(model.namedlinks()):
        for name in sorted(link._persistent):
            value = chainer.backends.cuda.to_cpu(getattr(link, name))
            digest.update(numpy.asarray(value).tobytes())


class _DeviceSampler:
    """The most that was taken from the device, seen from a second thread."""

    def __init__(self, options: argparse.Namespace) -> None:
        import cupy

        self._cupy = cupy
        self._warm_up(options)
        self.fixed_bytes = self._taken()
        self.most_bytes = 0
        self.samples = 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def _warm_up(self, options: argparse.Namespace) -> None:
        """Let CUDA and its libraries take what they take: handles, workspaces, loaded kernels.

        One step at the run's own size, so that the same kernels are chosen.
        """
        cupy = self._cupy
        # Without a pool: what is left of the step (CuPy's own arrays) then takes its true size.
        with cupy.cuda.using_allocator(cupy.cuda.memory._malloc):
            _train(argparse.Namespace(**{**vars(options), "steps": 1}))
        gc.collect()
        cupy.get_default_memory_pool().free_all_blocks()

    def _taken(self) -> int:
        free_bytes, total_bytes = self._cupy.cuda.runtime.memGetInfo()
        return int(total_bytes - free_bytes)

    def _run(self) -> None:
        while not self._stop.is_set():
            self.most_bytes = max(self.most_bytes, self._taken())
            self.samples += 1
            time.sleep(0.0005)

    def __enter__(self) -> _DeviceSampler:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()


def _child(options: argparse.Namespace) -> dict[str, Any]:
    """One run, in its own process."""
    import dynamemo

    sampler = None if options.device == "cpu" else _DeviceSampler(options)
    if options.budget is None:
        return _train(options)
    runtime = dynamemo.Runtime(
        options.budget or "80%", device=options.device, policy=options.policy
    )
    if sampler is None:
        with runtime:
            result = _train(options)
    else:
        with sampler, runtime:
            result = _train(options)
        result |= {
            "fixed_bytes": sampler.fixed_bytes,
            "most_bytes": sampler.most_bytes,
            "samples": sampler.samples,
        }
    return result | {"statistics": runtime.statistics().as_dict()}


def _start(options: argparse.Namespace, *extra: str) -> dict[str, Any]:
    """Run a child; sample its resident memory from here meanwhile."""
    command = [sys.executable, "-m", "benchmarks.resnet50", "--child", "--device", options.device]
    for name in ("batch", "size", "steps"):
        command += [f"--{name}", str(getattr(options, name))]
    child = subprocess.Popen([*command, *extra], stdout=subprocess.PIPE, text=True)
    resident_bytes = 0
    while child.poll() is None:
        resident_bytes = max(resident_bytes, _resident_bytes(child.pid))
        time.sleep(0.005)
    output = child.stdout.read() if child.stdout else ""
    if child.returncode:
        return {"failed": child.returncode}
    return json.loads(output.splitlines()[-1]) | {"resident_bytes": resident_bytes}


def _resident_bytes(pid: int) -> int:
    try:
        with open(f"/proc/{pid}/statm") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, IndexError, ValueError):
        return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--size", type=int, default=224)
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--shares", default="0.5,0.3", help="of what does not stay, see --of")
    parser.add_argument(
        "--of",
        choices=("peak", "activations"),
        default="peak",
        help="activations: the parameters, gradients and optimizer state are added to the share",
    )
    parser.add_argument("--out", help="file for the results")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--budget", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--policy", default="cost-aware")
    return parser


def main() -> int:
    """Run all; print a line each; return the exit code."""
    options = _parser().parse_args()
    if options.child:
        print(json.dumps(_child(options)))
        return 0
    stock = _start(options)
    accounting = _start(options, "--budget", "0", "--policy", "none")
    runs = {"without dynamemo": stock, "accounting": accounting}
    peak_bytes = accounting["statistics"]["peak_bytes"]
    lasting_bytes = accounting["statistics"]["current_bytes"]
    for share in (float(text) for text in options.shares.split(",")):
        fixed = 0 if options.of == "peak" else lasting_bytes
        budget = int(fixed + share * (peak_bytes - fixed))
        runs[f"{share:.0%} of {options.of}"] = _start(
            options, "--budget", str(budget), "--policy", options.policy
        )
    failures = _judge(runs, stock)
    asked = {key: value for key, value in vars(options).items() if key not in ("out", "child")}
    result = {"environment": describe(), "options": asked, "runs": runs}
    if options.out:
        with open(options.out, "w") as file:
            json.dump(result, file, indent=2)
    for failure in failures:
        print(f"FAILED: {failure}")
    return 1 if failures else 0


def _judge(runs: dict[str, dict[str, Any]], stock: dict[str, Any]) -> list[str]:
    failures = []
    for name, run in runs.items():
        if "failed" in run:
            failures.append(f"{name}: exit code {run['failed']}")
            continue
        is_equal = run["digest"] == stock["digest"]
        figures = run.get("statistics")
        line = f"{name:24} {run['seconds']:7.3f} s/step  resident {_mib(run['resident_bytes'])} MiB"
        if figures:
            line += f"  budget {_mib(figures['budget_bytes'])}  peak {_mib(figures['peak_bytes'])}"
            line += f"  dropped {_mib(figures['dropped_bytes'])}"
            line += f"  offloaded {_mib(figures['offloaded_bytes'])} MiB"
        if "most_bytes" in run and figures:
            over = run["most_bytes"] - run["fixed_bytes"] - figures["budget_bytes"]
            line += f"  taken over budget {over / 2**20:+.1f} MiB in {run['samples']} samples"
            if over > 0:
                failures.append(f"{name}: {over:,} bytes over the budget")
        print(f"{line}  {'bit-equal' if is_equal else 'DIFFERENT'}", flush=True)
        if not is_equal:
            failures.append(f"{name}: results differ")
    return failures


def _mib(nbytes: int) -> str:
    return f"{nbytes / 2**20:8.0f}"


if __name__ == "__main__":
    sys.exit(main())
