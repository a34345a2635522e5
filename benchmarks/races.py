"""Five hundred steps on which everything moves, copies and kernels are late: not one bit differs.

Claims checked on a GPU (exit code 1 where one does not hold), for each policy:

- loss, gradients, parameters and statistics after every step are bit-equal to a run without
  dynamemo, while delays of up to 200 us are put before functions and copies at random, and all new
  memory is filled with NaN;
- what the device has given (`memGetInfo`, from a second thread) never exceeds the budget and what
  was taken before.

Usage: python -m benchmarks.races [--steps 500] [--policies torture,offload] [--out FILE]
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from typing import TYPE_CHECKING, Any

import dynamemo
from benchmarks.environment import describe

if TYPE_CHECKING:
    from tests.gpu.racing import Step


def main() -> int:
    """Run all; print a line each; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--policies", default="torture,offload")
    parser.add_argument("--out", help="file for the results")
    options = parser.parse_args()
    from tests.gpu.racing import steps

    expected = list(steps(options.steps))
    with dynamemo.Runtime("4GiB", device="cuda", policy="none") as runtime:
        list(steps(2))
    peak_bytes = runtime.statistics().peak_bytes
    rows = [_run(policy, expected, peak_bytes) for policy in options.policies.split(",")]
    if options.out:
        asked = {key: value for key, value in vars(options).items() if key != "out"}
        result = {"environment": describe(), "options": asked, "runs": rows}
        with open(options.out, "w") as file:
            json.dump(result, file, indent=2)
    return any(row["differing_steps"] or row["over_bytes"] > 0 for row in rows)


def _run(policy: str, expected: list[Step], peak_bytes: int) -> dict[str, Any]:
    from tests.gpu import delayed
    from tests.gpu.racing import first_difference, steps

    budget = int((1.2 if policy == "torture" else 0.85) * peak_bytes)
    started = time.perf_counter()
    device = delayed.DelayedDevice(1)
    with (
        delayed.DeviceSampler() as sampler,
        dynamemo.Runtime(budget, device=device, policy=policy) as runtime,
        delayed.poisoned_memory(),
        delayed.DelayedFunctions(2),
    ):
        found = [
            (number, first_difference(step, expected[number]))
            for number, step in enumerate(steps(len(expected)))
        ]
    figures = runtime.statistics()
    differing = [(number, name) for number, name in found if name is not None]
    row = {
        "policy": policy,
        "steps": len(expected),
        "differing_steps": len(differing),
        "first_difference": differing[:1],
        "seconds": time.perf_counter() - started,
        "budget_bytes": budget,
        "over_bytes": sampler.most_bytes - budget,
        "samples": sampler.samples,
        "statistics": figures.as_dict(),
    }
    print(
        f"{policy}: {row['steps']} steps, {len(differing)} differ {differing[:1] or ''}, "
        f"{row['seconds']:.0f} s; "
        f"offloaded {figures.offloaded_bytes / 2**30:.1f}, dropped "
        f"{figures.dropped_bytes / 2**30:.1f} GiB; beyond the budget "
        f"{row['over_bytes'] / 2**20:+.1f} MiB in {sampler.samples} samples",
        flush=True,
    )
    return row


if __name__ == "__main__":
    sys.exit(main())
