"""Claim: a forecast of 5,000 steps takes at most 30 ms, and a first plan for it about 100 ms.

A chain of 2,500 functions with skips, and its backward; 2,499 tensors, each movable and with a
rebuild from the one before it. For each budget (a share of the peak without one): the milliseconds
of a first plan of a new problem, what it predicts, its gap to the lower bound, and the same after a
refinement. The milliseconds are medians of several rounds in one process.

Usage: python -m benchmarks.planning [--functions N] [--rounds N] [--refine N] [--out FILE]
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from random import Random
from statistics import median
from typing import Any

from benchmarks.environment import describe
from dynamemo.graph.forecast import forecast
from dynamemo.graph.planner import Planner
from dynamemo.graph.problem import LinkRate, Problem, Rebuild, Step, Technique, Tensor

#: Shares of the peak without a budget.
SHARES = (0.7, 0.5, 0.3, 0.15)
#: Bytes a second each way: hides nearly all that is copied, some of it, little.
RATES = (30e9, 8e9, 2e9)


def network(functions: int, bytes_per_s: float) -> Problem:
    """Make the chain; every eighth tensor is read once more four functions later."""
    random = Random(0)
    forward = [Step(f"f{i}", random.uniform(0.5, 1.5) * 1e-4, 10_000_000) for i in range(functions)]
    backward = [
        Step(f"b{i}", random.uniform(1.0, 3.0) * 1e-4, 30_000_000)
        for i in reversed(range(functions))
    ]
    last = 2 * functions - 1
    tensors = []
    for i in range(functions - 1):
        readers = {i, i + 1} | ({min(i + 4, functions - 1)} if i % 8 == 0 else set())
        tensors.append(
            Tensor(
                random.choice((1, 2, 4, 8)) * 1_000_000,
                i,
                max(readers),
                tuple(sorted(last - reader for reader in readers)),
                Rebuild(forward[i].elapsed_s, (i - 1,) if i else ()),
                True,
                i,
            )
        )
    link = LinkRate(bytes_per_s, 1e-5)
    return Problem((*forward, *backward), tuple(tensors), functions, link, link)


def _median_ms(rounds: int, run: Callable[[], Any]) -> float:
    taken = []
    for _ in range(rounds):
        began = time.perf_counter()
        run()
        taken.append(time.perf_counter() - began)
    return median(taken) * 1e3


def _measure(problem: Problem, budget: int, options: argparse.Namespace) -> dict[str, float]:
    plan_ms = _median_ms(options.rounds, lambda: Planner(problem).plan(budget))
    planner = Planner(problem)
    first = planner.plan(budget)
    made_for = first.forecast.budget_bytes
    forecast_ms = _median_ms(options.rounds, lambda: forecast(problem, first.techniques, made_for))
    refined = planner.refine(budget, forecasts=options.refine)
    return {
        "plan_ms": plan_ms,
        "forecast_ms": forecast_ms,
        "loss": first.forecast.elapsed_s / first.forecast.compute_s - 1,
        "gap": first.gap,
        "refined_gap": refined.gap,
    }


def main() -> int:
    """Print a line a budget and link."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--functions", type=int, default=2500)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--refine", type=int, default=50, help="forecasts of the refinement")
    parser.add_argument("--out", help="file for the results")
    options = parser.parse_args()
    rows = []
    print("GB/s  share   plan ms  forecast ms     loss      gap  refined")
    for rate in RATES:
        problem = network(options.functions, rate)
        problem.validate()
        kept = forecast(problem, (Technique.KEEP,) * len(problem.tensors), 1 << 60)
        for share in SHARES:
            row = _measure(problem, int(share * kept.peak_bytes), options)
            rows.append({"bytes_per_s": rate, "share": share, **row})
            print(
                f"{rate / 1e9:4.0f}  {share:5.2f} {row['plan_ms']:9.1f} {row['forecast_ms']:12.1f}"
                f" {row['loss']:8.2%} {row['gap']:8.2%} {row['refined_gap']:8.2%}",
                flush=True,
            )
    if options.out:
        asked = {key: value for key, value in vars(options).items() if key != "out"}
        with open(options.out, "w") as file:
            json.dump({"environment": describe(), "options": asked, "rows": rows}, file, indent=2)
            file.write("\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
