"""Copies cost nothing when they need not: a deep, wide network whose offload fits in its compute.

Claims checked on a GPU (exit code 1 where one does not hold):

- `link`: copies of 4 MiB and more run at 90 % of what the pinned link gives alone, or more, by
  event timings of the very copies of the training;
- `loss`: at a share of the peak, with copies only, a step takes at most 3 % longer than without a
  budget, and every loss, gradient and parameter is bit-equal;
- `flat`: after warm-up the host never waits for a copy, and no event, pinned or device memory is
  added;
- `peer`: PyTorch's `save_on_cpu(pin_memory=True)` on the same network and batch loses at least five
  times more over its own step than ours does within what PyTorch's tensors then take at most, and
  within what its allocator takes from the device for them.

Every run is a process of its own, one after the other; `--repeats` interleaves them.

Usage: python -m benchmarks.copies [--depth N] [--width N] [--batch N] [--share 0.5] [--out FILE]
"""

from __future__ import annotations

import argparse
import hashlib
import json
import statistics
import subprocess
import sys
import time
from typing import Any

from benchmarks.environment import describe

_MOST_LOSS = 0.03
_LEAST_RATE = 0.9
_LEAST_RATIO = 5.0
_LONG_BYTES = 4 << 20


def _train(options: argparse.Namespace, each: Any = None) -> dict[str, Any]:
    import chainer
    import chainer.functions as F
    import chainer.links as L
    import cupy
    import numpy

    numpy.random.seed(0)
    width = options.width
    layers = [
        L.Linear(width, width, initialW=chainer.initializers.HeNormal())
        for _ in range(options.depth)
    ]
    model = chainer.Sequential(*[part for layer in layers for part in (layer, F.relu)])
    model.to_device("@cupy:0")
    optimizer = chainer.optimizers.SGD(1e-4).setup(model)
    x = cupy.random.RandomState(1).standard_normal((options.batch, width), dtype="f")
    digest, seconds = hashlib.blake2b(), []
    for step in range(options.steps):
        cupy.cuda.runtime.deviceSynchronize()
        started = time.perf_counter()
        loss = F.mean(F.square(model(x)))
        model.cleargrads()
        loss.backward()
        optimizer.update()
        array = loss.array
        del loss
        cupy.cuda.runtime.deviceSynchronize()
        seconds.append(time.perf_counter() - started)
        digest.update(array.get().tobytes())
        if each is not None:
            each(step)
    for _, param in sorted(model.namedparams()):
        digest.update(param.array.get().tobytes())
        digest.update(param.grad.get().tobytes())
    return {"digest": digest.hexdigest(), "seconds": seconds}


def _ours(options: argparse.Namespace) -> dict[str, Any]:
    """One run of ours: stock, or within a budget."""
    import cupy

    import dynamemo

    if options.budget is None:
        return _train(options)
    times: list[Any] = []
    rows: list[dict[str, Any]] = []

    def each(step: int) -> None:
        figures = runtime.statistics().as_dict()
        copier = runtime._device.copier
        row = {
            key: figures[key]
            for key in (
                "offloaded_bytes",
                "early_bytes",
                "stalled_bytes",
                "fetched_bytes",
                "prefetched_bytes",
                "awaited_bytes",
                "cancelled_bytes",
                "late_bytes",
                "dropped_bytes",
                "recomputed_functions",
                "host_waits",
                "slab_waits",
            )
        }
        row["events"] = getattr(copier, "events", 0)
        row["taken_bytes"] = _taken(cupy)
        row["pinned_bytes"] = sum(tier.held_bytes for tier in runtime._tier_list)
        rows.append(row)

    runtime = dynamemo.Runtime(
        options.budget or "80%", device="cuda", policy=options.policy, host_budget="60GiB"
    )
    with runtime:
        link = runtime._manager.transfers.measure()
        copier = runtime._device.copier
        take = copier.times

        def noting() -> list[Any]:
            new = take()
            times.extend(new)
            return new

        copier.times = noting
        result = _train(options, each)
        del copier.times
    rates = {
        "out": [c.nbytes / c.elapsed_s for c in times if c.is_to_host and c.nbytes >= _LONG_BYTES],
        "in": [
            c.nbytes / c.elapsed_s for c in times if not c.is_to_host and c.nbytes >= _LONG_BYTES
        ],
    }
    return result | {
        "statistics": runtime.statistics().as_dict(),
        "steps": rows,
        "link": None if link is None else _as_dict(link),
        "rates": {
            way: {"count": len(r), "median": statistics.median(r), "least": min(r)}
            for way, r in rates.items()
            if r
        },
    }


def _as_dict(value: Any) -> dict[str, Any]:
    import dataclasses

    return dataclasses.asdict(value)


def _taken(cupy: Any) -> int:
    free_bytes, total_bytes = cupy.cuda.runtime.memGetInfo()
    return int(total_bytes - free_bytes)


def _torch(options: argparse.Namespace) -> dict[str, Any]:
    """Train the same network and batch in PyTorch, with or without `save_on_cpu`."""
    import contextlib

    import torch

    torch.backends.cuda.matmul.allow_tf32 = False
    torch.manual_seed(0)
    width = options.width
    parts: list[Any] = []
    for _ in range(options.depth):
        parts += [torch.nn.Linear(width, width), torch.nn.ReLU()]
    model = torch.nn.Sequential(*parts).cuda()
    optimizer = torch.optim.SGD(model.parameters(), 1e-4)
    x = torch.randn(options.batch, width, device="cuda")
    seconds = []
    for _ in range(options.steps):
        torch.cuda.synchronize()
        started = time.perf_counter()
        saving: Any = contextlib.nullcontext()
        if options.save_on_cpu:
            saving = torch.autograd.graph.save_on_cpu(pin_memory=True)
        with saving:
            loss = model(x).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        del loss
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - started)
    return {
        "seconds": seconds,
        "peak_bytes": int(torch.cuda.max_memory_allocated()),
        "reserved_bytes": int(torch.cuda.max_memory_reserved()),
    }


def _start(options: argparse.Namespace, kind: str, *extra: str) -> dict[str, Any]:
    command = [sys.executable, "-m", "benchmarks.copies", "--child", kind]
    for name in ("depth", "width", "batch", "steps", "policy"):
        command += [f"--{name}", str(getattr(options, name))]
    child = subprocess.run([*command, *extra], stdout=subprocess.PIPE, text=True, check=False)
    if child.returncode:
        return {"failed": child.returncode}
    result: dict[str, Any] = json.loads(child.stdout.splitlines()[-1])
    return result


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--depth", type=int, default=12)
    parser.add_argument("--width", type=int, default=4096)
    parser.add_argument("--batch", type=int, default=32768)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--share", type=float, default=0.5)
    parser.add_argument("--policy", default="offload")
    parser.add_argument("--peer", action="store_true", help="PyTorch beside ours")
    parser.add_argument("--out", help="file for the results")
    parser.add_argument("--child", choices=("ours", "torch"), help=argparse.SUPPRESS)
    parser.add_argument("--budget", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--save-on-cpu", action="store_true", help=argparse.SUPPRESS)
    return parser


def main() -> int:
    """Run all; print a line each; return the exit code."""
    options = _parser().parse_args()
    if options.child:
        print(json.dumps(_ours(options) if options.child == "ours" else _torch(options)))
        return 0
    runs = {"stock": _start(options, "ours")}
    runs["accounting"] = _start(options, "ours", "--budget", "0")
    peak_bytes = runs["accounting"]["statistics"]["peak_bytes"]
    budget = int(options.share * peak_bytes)
    runs["budget"] = _start(options, "ours", "--budget", str(budget))
    if options.peer:
        runs["torch"] = _start(options, "torch")
        runs["torch save_on_cpu"] = _start(options, "torch", "--save-on-cpu")
        peer_bytes = runs["torch save_on_cpu"]["peak_bytes"]
        runs["torch's peak"] = _start(options, "ours", "--budget", str(peer_bytes))
        peer_bytes = runs["torch save_on_cpu"]["reserved_bytes"]
        runs["torch's reserve"] = _start(options, "ours", "--budget", str(peer_bytes))
    runs["stock again"] = _start(options, "ours")
    failures = _judge(runs)
    asked = {key: value for key, value in vars(options).items() if key != "out"}
    result = {"environment": describe(), "options": asked, "runs": runs}
    if options.out:
        with open(options.out, "w") as file:
            json.dump(result, file, indent=1)
    for failure in failures:
        print(f"FAILED: {failure}")
    return 1 if failures else 0


def _median(run: dict[str, Any]) -> float:
    """Return the median step after warm-up."""
    seconds = run["seconds"]
    return statistics.median(seconds[len(seconds) // 2 :])


def _judge(runs: dict[str, dict[str, Any]]) -> list[str]:
    failures = []
    for name, run in runs.items():
        if "failed" in run:
            return [f"{name}: exit code {run['failed']}"]
        peak = run.get("peak_bytes") or run.get("statistics", {}).get("peak_bytes", 0)
        print(f"{name:20} {_median(run):7.4f} s/step  peak {peak / 2**30:6.2f} GiB", flush=True)
        if "statistics" in run:
            _print_steps(run)
    stock_s = statistics.mean(_median(runs[n]) for n in ("stock", "stock again"))
    for name, run in runs.items():
        if "digest" in run and run["digest"] != runs["stock"]["digest"]:
            failures.append(f"{name}: results differ")
    loss = _median(runs["budget"]) / stock_s - 1
    print(f"loss within the budget: {loss:+.2%}")
    if loss > _MOST_LOSS:
        failures.append(f"loss: {loss:.2%} of a step")
    failures += _judge_rates(runs["budget"]) + _judge_flat(runs["budget"])
    if "torch" in runs:
        peer_loss = _median(runs["torch save_on_cpu"]) / _median(runs["torch"]) - 1
        for name in ("torch's peak", "torch's reserve"):
            own_loss = _median(runs[name]) / stock_s - 1
            print(f"PyTorch loses {peer_loss:.1%}, ours within {name} {own_loss:.1%}")
            if own_loss > 0 and peer_loss / own_loss < _LEAST_RATIO:
                failures.append(f"{name}: only {peer_loss / own_loss:.1f} times less")
    return failures


def _print_steps(run: dict[str, Any]) -> None:
    link, rates = run["link"], run["rates"]
    if link is not None:
        print(
            f"    link {link['out_bytes_per_s'] / 1e9:.1f} out, {link['in_bytes_per_s'] / 1e9:.1f} "
            f"in, {link['both_bytes_per_s'] / 1e9:.1f} GB/s both, {link['latency_s'] * 1e6:.1f} us"
        )
    for way, rate in rates.items():
        print(
            f"    {way}: {rate['count']} copies, median {rate['median'] / 1e9:.1f}, "
            f"least {rate['least'] / 1e9:.1f} GB/s"
        )
    last: dict[str, Any] = {}
    for step, row in enumerate(run["steps"]):
        new = {k: v - last.get(k, 0) for k, v in row.items()}
        shown = "  ".join(
            f"{k.removesuffix('_bytes')} {v / 2**20:.0f}M" if k.endswith("_bytes") else f"{k} {v}"
            for k, v in new.items()
            if v
        )
        print(f"    step {step} ({run['seconds'][step]:.4f} s): {shown}", flush=True)
        last = row


def _judge_rates(run: dict[str, Any]) -> list[str]:
    failures = []
    for way, rate in run["rates"].items():
        link = run["link"][f"{way}_bytes_per_s"]
        if rate["median"] < _LEAST_RATE * link:
            failures.append(f"link: {way} {rate['median'] / link:.0%} of what it gives")
    return failures


def _judge_flat(run: dict[str, Any]) -> list[str]:
    rows = run["steps"]
    middle, last = rows[len(rows) // 2], rows[-1]
    return [
        f"flat: {key} grew from {middle[key]:,} to {last[key]:,}"
        for key in ("host_waits", "slab_waits", "events", "taken_bytes", "pinned_bytes")
        if last[key] > middle[key]
    ]


if __name__ == "__main__":
    sys.exit(main())
