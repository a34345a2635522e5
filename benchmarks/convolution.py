"""Chainer on CuPy 14 with cuDNN trains convolutional networks about as fast as PyTorch.

Claim checked (exit code 1 where it does not hold): a training step of ResNet-50 at batch 256 takes
at most 1.1 times as long as PyTorch's. Smaller batches and VGG-16 are reported.

A step is forward, backward and an update by SGD with momentum, in float32 with TF32 in both, on
random images of 224×224 that stay on the device. Each framework runs in a process of its own, one
after the other. The host does not wait within a run: events mark the steps, and the median of the
times between them is taken after it. PyTorch is eager, with `cudnn.benchmark` where ``--autotune``
is given, which is Chainer's `autotune`.

``--workspaces`` measures something else: how a limit on memory shares out the workspaces of the
first net at the first of the batches, and what that costs, as figure 12 of SuperNeurons does. The
limits are multiples of what the step has in use without any workspace; each convolution gets the
fastest plan within what is free when it first runs. Beside them stand "none" and "fastest".

Usage: python -m benchmarks.convolution [--nets resnet50,vgg16] [--batches 16,64,256]
       [--repeats N] [--autotune] [--workspace 64MiB] [--frameworks chainer,torch]
       [--profile] [--workspaces] [--out FILE]
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import os
import statistics
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import asdict
from typing import Any

from benchmarks.environment import describe
from dynamemo import cudnn  # before any function here imports Chainer
from dynamemo.allocator import format_bytes

#: Limits of ``--workspaces``, in what the step has in use without workspaces.
WORKSPACE_FACTORS = (1.1, 1.25, 1.5)
#: The batch, and the times PyTorch's step, of the claim.
CLAIMED_BATCH, CLAIMED_RATIO = 256, 1.1
IMAGE = (3, 224, 224)
CLASSES = 1000

Step = Callable[[], Any]


def main() -> int:
    """Run all; print a line each; return the exit code."""
    options = _parser().parse_args()
    if options.child:
        for result in _CHILDREN[options.child](options):
            print(json.dumps(result), flush=True)
        return 0
    if options.workspaces:
        results = _start("workspaces", sys.argv[1:])
        _write(options, results)
        return 0 if results else 1
    runs = {name: _start(name, sys.argv[1:]) for name in options.frameworks.split(",")}
    rows = [_row(net, batch, runs) for net, batch in _cases(options)]
    for row in rows:
        print(_line(row))
    _write(options, rows)
    failures = [
        row
        for row in rows
        if (row["net"], row["batch"]) == ("resnet50", CLAIMED_BATCH)
        and row.get("ratio", 0) > CLAIMED_RATIO
    ]
    for row in failures:
        print(f"FAILED: {row['ratio']:.2f} times PyTorch's step, {CLAIMED_RATIO} claimed")
    return 1 if failures else 0


def _write(options: argparse.Namespace, rows: list[dict[str, Any]]) -> None:
    if options.out:
        asked = {key: value for key, value in vars(options).items() if key != "out"}
        result = {"environment": describe(), "options": asked, "runs": rows}
        with open(options.out, "w") as file:
            json.dump(result, file, indent=2)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--nets", default="resnet50,vgg16")
    parser.add_argument("--batches", default="16,64,256", help="of ResNet-50; VGG-16 has 64")
    parser.add_argument("--frameworks", default="chainer,torch")
    parser.add_argument("--warmup", type=int, default=5)
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--autotune", action="store_true")
    parser.add_argument("--workspace", help="Chainer's limit for each convolution, as 64MiB")
    parser.add_argument("--profile", action="store_true", help="where Chainer's time goes")
    parser.add_argument("--workspaces", action="store_true", help="the table of workspaces")
    parser.add_argument("--out", help="file for the results")
    parser.add_argument("--child", choices=tuple(_CHILDREN), help=argparse.SUPPRESS)
    return parser


def _cases(options: argparse.Namespace) -> Iterator[tuple[str, int]]:
    for net in options.nets.split(","):
        batches = options.batches.split(",") if net == "resnet50" else ["64"]
        for batch in batches:
            yield net, int(batch)


def _start(name: str, arguments: list[str]) -> list[dict[str, Any]]:
    """Run a framework in its process; pass on what it prints beside its results."""
    environment = {**os.environ, "CUPY_TF32": "1"}
    command = [sys.executable, "-m", "benchmarks.convolution", *arguments, "--child", name]
    child = subprocess.run(command, stdout=subprocess.PIPE, text=True, env=environment)
    results = []
    for line in child.stdout.splitlines():
        if line.startswith('{"net"'):
            results.append(json.loads(line))
        else:
            print(line)
    if child.returncode:
        print(f"{name}: exit code {child.returncode}")
    return results


def _row(net: str, batch: int, runs: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
    row: dict[str, Any] = {"net": net, "batch": batch}
    for name, results in runs.items():
        for result in results:
            if (result["net"], result["batch"]) == (net, batch):
                row[name] = result
    if "chainer" in row and "torch" in row:
        row["ratio"] = row["chainer"]["median_ms"] / row["torch"]["median_ms"]
    return row


def _line(row: dict[str, Any]) -> str:
    line = f"{row['net']:9} batch {row['batch']:4}"
    for name in ("chainer", "torch"):
        if (result := row.get(name)) is not None:
            line += f"  {name} {result['median_ms']:8.2f} ms (host {result['host_ms']:6.2f})"
    return f"{line}  ratio {row['ratio']:.2f}" if "ratio" in row else line


def _result(net: str, batch: int, times_ms: list[float], host_ms: float) -> dict[str, Any]:
    return {
        "net": net,
        "batch": batch,
        "median_ms": statistics.median(times_ms),
        "least_ms": min(times_ms),
        "most_ms": max(times_ms),
        "host_ms": host_ms,
    }


def _enqueue_all(step: Step, mark: Callable[[], Any], steps: int) -> tuple[list[Any], float]:
    """Run steps with a mark before each and one after all; return those and the host's ms a step.

    Where the device is slower than the host, the host's time may hold waiting for the queue.
    """
    started = time.perf_counter()
    marks = []
    for _ in range(steps):
        marks.append(mark())
        step()
    marks.append(mark())
    return marks, (time.perf_counter() - started) * 1e3 / steps


# -- Chainer --


def _run_chainer(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    import chainer
    import cupy

    assert chainer.backends.cuda.cudnn_enabled, "Chainer runs without cuDNN"
    if options.workspace:
        chainer.backends.cuda.set_max_workspace_size(_nbytes(options.workspace))
    chainer.config.autotune = options.autotune
    for net, batch in _cases(options):
        cudnn.forget()
        step = _chainer_step(net, batch)
        yield _result(net, batch, *_time_chainer(step, options))
        if options.profile:
            _profile(step)
        del step
        cupy.get_default_memory_pool().free_all_blocks()


def _time_chainer(step: Step, options: argparse.Namespace) -> tuple[list[float], float]:
    import cupy

    for _ in range(options.warmup):
        step()
    cupy.cuda.Device().synchronize()

    def mark() -> Any:
        return cupy.cuda.get_current_stream().record()

    marks, host_ms = _enqueue_all(step, mark, options.repeats)
    marks[-1].synchronize()
    pairs = itertools.pairwise(marks)
    return [cupy.cuda.get_elapsed_time(start, stop) for start, stop in pairs], host_ms


def _run_workspaces(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    import chainer
    import cupy

    chainer.config.autotune = True
    net, batch = next(_cases(options))
    step = _chainer_step(net, batch)
    pool = cupy.get_default_memory_pool()
    in_use: list[int] = []

    def none_is_free() -> int:
        in_use.append(pool.used_bytes())
        return 0

    def measure(name: str, **settings: Any) -> dict[str, Any]:
        cudnn.forget()
        gc.collect()  # a step that is still lying about would count as in use
        pool.free_all_blocks()
        with cudnn.using_settings(**settings):
            result = _result(net, batch, *_time_chainer(step, options))
        return {**result, "limit": name, "report": cudnn.report()}

    runs = [measure("none", workspace="free", available_bytes=none_is_free)]
    least_bytes = max(in_use)
    for factor in WORKSPACE_FACTORS:
        budget = int(factor * least_bytes)
        name = f"{factor:g} × {format_bytes(least_bytes)}"
        runs.append(
            measure(
                name,
                workspace="free",
                available_bytes=lambda budget=budget: max(budget - pool.used_bytes(), 0),
            )
        )
    runs.append(measure("fastest", workspace="fastest"))
    _print_workspaces(runs)
    yield from ({**run, "report": [asdict(line) for line in run["report"]]} for run in runs)


def _print_workspaces(runs: list[dict[str, Any]]) -> None:
    """Print what each convolution was given under each limit, and the step's time."""
    shared: dict[tuple[str, str], list[str]] = defaultdict(list)
    for run in runs:
        for line in run["report"]:
            shared[line.label, line.direction].append(format_bytes(line.workspace_bytes))
    heads = [run["limit"] for run in runs]
    print(f"{'':42}", *(f"{head:>17}" for head in heads))
    for (label, direction), workspaces in shared.items():
        print(f"{label:33} {direction:8}", *(f"{nbytes:>17}" for nbytes in workspaces))
    print(f"{'step, ms':42}", *(f"{run['median_ms']:17.2f}" for run in runs))


def _nbytes(text: str) -> int:
    for unit, factor in (("GiB", 1 << 30), ("MiB", 1 << 20)):
        if text.endswith(unit):
            return int(float(text.removesuffix(unit)) * factor)
    return int(text)


def _chainer_step(net: str, batch: int) -> Step:
    import chainer
    import chainer.functions as F
    import chainer.links as L
    import cupy

    factory, output = {
        "resnet50": (L.ResNet50Layers, "fc6"),
        "vgg16": (L.VGG16Layers, "fc8"),
    }[net]
    model = factory(pretrained_model=None)
    model.to_device("@cupy:0")
    optimizer = chainer.optimizers.MomentumSGD(lr=0.001, momentum=0.9).setup(model)
    x = cupy.random.standard_normal((batch, *IMAGE), dtype=cupy.float32)
    t = cupy.random.randint(0, CLASSES, batch).astype(cupy.int32)

    def step() -> None:
        loss = F.softmax_cross_entropy(model(x, layers=[output])[output], t)
        model.cleargrads()
        loss.backward()
        optimizer.update()

    return step


def _profile(step: Step, *, steps: int = 3) -> None:
    """Print the device time of Chainer's functions, and where the host's time goes."""
    import cProfile
    import pstats

    import cupy

    hook = _device_timer()
    with hook:
        for _ in range(steps):
            step()
    cupy.cuda.Device().synchronize()
    print("device ms a step, by function")
    for (name, phase), (count, elapsed_ms) in hook.totals():
        print(f"  {elapsed_ms / steps:8.3f}  {count // steps:4} × {phase:8} {name}")
    profile = cProfile.Profile()
    profile.runcall(lambda: [step() for _ in range(steps)])
    cupy.cuda.Device().synchronize()
    pstats.Stats(profile, stream=sys.stdout).sort_stats("tottime").print_stats(30)


def _device_timer() -> Any:
    import chainer
    import cupy

    class DeviceTimer(chainer.FunctionHook):
        """Times functions by events, read after the run; nested ones count in the outer too."""

        name = "DeviceTimer"

        def __init__(self) -> None:
            self.open: list[Any] = []
            self.pairs: list[tuple[str, str, Any, Any]] = []

        def forward_preprocess(self, function: Any, in_data: Any) -> None:
            self.open.append(cupy.cuda.get_current_stream().record())

        def forward_postprocess(self, function: Any, in_data: Any) -> None:
            self._close(function, "forward")

        def backward_preprocess(self, function: Any, in_data: Any, out_grad: Any) -> None:
            self.forward_preprocess(function, in_data)

        def backward_postprocess(self, function: Any, in_data: Any, out_grad: Any) -> None:
            self._close(function, "backward")

        def _close(self, function: Any, phase: str) -> None:
            stop = cupy.cuda.get_current_stream().record()
            self.pairs.append((type(function).__name__, phase, self.open.pop(), stop))

        def totals(self) -> list[tuple[tuple[str, str], tuple[int, float]]]:
            sums: dict[tuple[str, str], tuple[int, float]] = defaultdict(lambda: (0, 0.0))
            for name, phase, start, stop in self.pairs:
                count, elapsed_ms = sums[name, phase]
                elapsed_ms += cupy.cuda.get_elapsed_time(start, stop)
                sums[name, phase] = count + 1, elapsed_ms
            return sorted(sums.items(), key=lambda item: -item[1][1])

    return DeviceTimer()


# -- PyTorch --


def _run_torch(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    import torch

    torch.backends.cuda.matmul.allow_tf32 = True
    torch.backends.cudnn.allow_tf32 = True
    torch.backends.cudnn.benchmark = options.autotune
    for net, batch in _cases(options):
        step = _torch_step(net, batch)
        for _ in range(options.warmup):
            step()
        torch.cuda.synchronize()

        def mark() -> Any:
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            return event

        marks, host_ms = _enqueue_all(step, mark, options.repeats)
        torch.cuda.synchronize()
        times_ms = [start.elapsed_time(stop) for start, stop in itertools.pairwise(marks)]
        yield _result(net, batch, times_ms, host_ms)
        del step
        torch.cuda.empty_cache()


def _torch_step(net: str, batch: int) -> Step:
    import torch

    model = {"resnet50": _torch_resnet50, "vgg16": _torch_vgg16}[net]().cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.001, momentum=0.9)
    criterion = torch.nn.CrossEntropyLoss()
    x = torch.randn((batch, *IMAGE), device="cuda")
    t = torch.randint(0, CLASSES, (batch,), device="cuda")

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        loss = criterion(model(x), t)
        loss.backward()
        optimizer.step()

    return step


def _torch_resnet50() -> Any:
    """Return the network that Chainer's ResNet50Layers is: strides on the 1×1 convolutions."""
    from torch import nn

    class Bottleneck(nn.Module):
        def __init__(self, inputs: int, middle: int, outputs: int, stride: int) -> None:
            super().__init__()
            self.main = nn.Sequential(
                nn.Conv2d(inputs, middle, 1, stride, bias=False),
                nn.BatchNorm2d(middle),
                nn.ReLU(inplace=True),
                nn.Conv2d(middle, middle, 3, 1, 1, bias=False),
                nn.BatchNorm2d(middle),
                nn.ReLU(inplace=True),
                nn.Conv2d(middle, outputs, 1, bias=False),
                nn.BatchNorm2d(outputs),
            )
            self.side = nn.Identity()
            if inputs != outputs:
                self.side = nn.Sequential(
                    nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs)
                )
            self.relu = nn.ReLU(inplace=True)

        def forward(self, x: Any) -> Any:
            return self.relu(self.main(x) + self.side(x))

    layers: list[Any] = [
        nn.Conv2d(3, 64, 7, 2, 3),
        nn.BatchNorm2d(64),
        nn.ReLU(inplace=True),
        nn.MaxPool2d(3, 2, ceil_mode=True),
    ]
    inputs = 64
    for stage, count in enumerate((3, 4, 6, 3)):
        middle, outputs = 64 << stage, 256 << stage
        for number in range(count):
            stride = 2 if stage and not number else 1
            layers.append(Bottleneck(inputs, middle, outputs, stride))
            inputs = outputs
    layers += [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inputs, CLASSES)]
    return nn.Sequential(*layers)


def _torch_vgg16() -> Any:
    from torch import nn

    layers: list[Any] = []
    inputs = 3
    for outputs, count in ((64, 2), (128, 2), (256, 3), (512, 3), (512, 3)):
        for _ in range(count):
            layers += [nn.Conv2d(inputs, outputs, 3, 1, 1), nn.ReLU(inplace=True)]
            inputs = outputs
        layers.append(nn.MaxPool2d(2))
    layers.append(nn.Flatten())
    for inputs, outputs in ((512 * 7 * 7, 4096), (4096, 4096)):
        layers += [nn.Linear(inputs, outputs), nn.ReLU(inplace=True), nn.Dropout()]
    return nn.Sequential(*layers, nn.Linear(4096, CLASSES))


_CHILDREN = {"chainer": _run_chainer, "torch": _run_torch, "workspaces": _run_workspaces}


if __name__ == "__main__":
    sys.exit(main())
