"""A whole training step of a real Chainer model, with its true sizes, on a machine without a GPU.

Arrays are allocated and never touched, seconds are worked out (`benchmarks/rehearsing`); Chainer's
own code and the runtime run as they do on a GPU. For trying schedules where GPU time is scarce.

Per budget a line: virtual milliseconds of the last step, what that is more than without a budget,
the peak, what a step dropped, computed again, copied out and fetched, and how long work was held
behind copies. Running out of memory is such a line too (exit code 1).

Where memory is tight, what is evicted when, and so whether it fits, depends on where parameters lie
and in which order sets are walked: on luck, here as on a GPU. `--seed` draws it; the same seed
gives the same numbers (on Linux).

Usage: python -m benchmarks.rehearsal [--net resnet50] [--batch 256] [--size 224]
       [--budgets 11.2GB,7.5GB] [--policy P] [--steps 8] [--seed 0] [--explain-oom]
       [--trace FILE] [--out FILE]
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import json
import os
import sys
import time
from typing import Any

from benchmarks.environment import describe
from benchmarks.rehearsing.networks import NETWORKS, Options
from benchmarks.rehearsing.rehearse import Result, rehearse

#: Of Linux's `personality`: addresses are the same in every process.
_ADDR_NO_RANDOMIZE = 0x0040000


def _run(options: argparse.Namespace, budget: str, **changes: Any) -> Result:
    network, shape = NETWORKS[options.net], Options(options.batch, options.size)
    arguments = {
        "steps": options.steps,
        "policy": options.policy,
        "explains": options.explain_oom,
        **changes,
    }
    return rehearse(lambda: network(shape), lambda training: training.step(), budget, **arguments)


def _line(name: str, result: Result, plain_s: float, seconds: float) -> str:
    if result.error is not None:
        return f"{name:10} after {len(result.steps)} steps: {result.error}"
    last = result.steps[-1]
    line = f"{name:10} {last.elapsed_s * 1e3:8.2f} ms ({last.elapsed_s / plain_s - 1:+7.1%})"
    line += f"  peak {result.peak_bytes / 1e9:6.2f} GB, a step:"
    for key in ("dropped", "recomputed", "offloaded", "fetched"):
        line += f" {key} {getattr(last, f'{key}_bytes') / 1e9:.2f}"
    return f"{line}  held {last.held_s * 1e3:.2f} ms  [{seconds / len(result.steps):.2f} s a step]"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--net", default="resnet50", choices=sorted(NETWORKS))
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--size", type=int, default=224, help="pixels of a side, or tokens")
    parser.add_argument("--ample", default="130GB", help="a budget that holds everything")
    parser.add_argument("--budgets", default="")
    parser.add_argument("--policy", default="cost-aware")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--seed", type=int, default=0, help="of the order in sets and dictionaries")
    parser.add_argument("--explain-oom", action="store_true", help="show the arena where it fails")
    parser.add_argument("--trace", help="file for the trace of the last budget's last step")
    parser.add_argument("--out", help="file for the results")
    return parser


def _begin_again(seed: int) -> None:
    """Start this program anew with a given seed of hashes, and addresses that are not random."""
    if os.environ.get("PYTHONHASHSEED") == str(seed):
        return
    with contextlib.suppress(AttributeError, OSError):  # Linux only
        ctypes.CDLL(None).personality(_ADDR_NO_RANDOMIZE)
    arguments = [sys.executable, "-m", "benchmarks.rehearsal", *sys.argv[1:]]
    os.execve(sys.executable, arguments, {**os.environ, "PYTHONHASHSEED": str(seed)})


def main() -> int:
    """Rehearse each budget; print a line each; return the exit code."""
    options = _parser().parse_args()
    _begin_again(options.seed)
    results: dict[str, Result] = {}
    plain_s = float("inf")
    for name in ("ample", *filter(None, options.budgets.split(","))):
        began = time.perf_counter()
        if name == "ample":
            result = _run(options, options.ample, policy="none", steps=2)
            plain_s = result.steps[-1].elapsed_s if result.steps else plain_s
        else:
            result = _run(options, name, trace=options.trace)
        results[name] = result
        print(_line(name, result, plain_s, time.perf_counter() - began), flush=True)
        if result.arena_map is not None:
            print(result.arena_map, flush=True)
    if options.out:
        asked = {key: value for key, value in vars(options).items() if key != "out"}
        runs = {name: result.as_dict() for name, result in results.items()}
        with open(options.out, "w") as file:
            json.dump({"environment": describe(), "options": asked, "runs": runs}, file, indent=1)
            file.write("\n")
    return 1 if any(result.error for result in results.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
