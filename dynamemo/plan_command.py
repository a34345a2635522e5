"""The command `dynamemo plan`: what a budget would mean for a recorded iteration.

It reads a trace that `Runtime.save_trace` wrote as JSON, predicts, and touches no device and no
Chainer.
"""

from __future__ import annotations

import argparse
import math
import sys

from dynamemo.allocator.sizes import format_bytes, parse_budget
from dynamemo.graph.errors import GraphError
from dynamemo.graph.explain import explain
from dynamemo.graph.planner import BudgetError, Planner
from dynamemo.graph.problem import LinkRate, Problem
from dynamemo.graph.problem_of_trace import problem_of
from dynamemo.graph.scaling import largest_factor
from dynamemo.graph.trace_json import loads

#: Exit codes: what was given cannot be read; no plan fits into the budget.
_BAD_INPUT, _INFEASIBLE = 2, 1


def add_plan(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    parser.add_argument(
        "--budget",
        metavar="B",
        required=True,
        help="bytes, '4GiB', or '60%%' of the peak without a budget",
    )
    parser.add_argument("--out-rate", metavar="R", help="bytes a second out, as '20GB'")
    parser.add_argument("--in-rate", metavar="R", help="bytes a second in")
    parser.add_argument("--latency", metavar="S", type=float, help="seconds of an empty copy")
    parser.add_argument(
        "--most-loss", metavar="X", type=float, help="how large may the batch be at such a loss?"
    )
    parser.add_argument("--batch", metavar="N", type=int, help="the batch that was recorded")
    parser.add_argument("trace", metavar="TRACE.json", help="a recorded iteration")
    parser.set_defaults(run=run_plan)


def run_plan(options: argparse.Namespace) -> int:
    """Print what the budget means; return the exit code."""
    try:
        _check(options)
        problem = _problem(options)
        budget_bytes = parse_budget(options.budget, free_bytes=Planner(problem).kept_peak_bytes)
        print(explain(problem, budget_bytes))
        if options.most_loss is not None:
            print(f"\n{_largest(problem, budget_bytes, options)}")
    except BudgetError as error:
        smallest = format_bytes(error.smallest_bytes)
        return _refuse(f"{error} ({smallest}): raise the budget to that", _INFEASIBLE)
    except OSError as error:
        return _refuse(f"cannot read {options.trace!r}: {error.strerror}", _BAD_INPUT)
    except (GraphError, ValueError) as error:
        return _refuse(str(error), _BAD_INPUT)
    return 0


def _check(options: argparse.Namespace) -> None:
    """Refuse options that no trace can make sense of."""
    if options.batch is not None and (options.batch < 1 or options.most_loss is None):
        raise ValueError("--batch is the recorded batch, at least 1, and goes with --most-loss")
    if options.most_loss is not None and not 0.0 <= options.most_loss < math.inf:
        raise ValueError(f"--most-loss {options.most_loss} is not possible: expected 0 or more")
    if options.latency is not None and not 0.0 <= options.latency < math.inf:
        raise ValueError(f"--latency {options.latency} is not possible: expected 0 or more")


def _problem(options: argparse.Namespace) -> Problem:
    """Read the trace and find its problem."""
    with open(options.trace, "rb") as file:
        text = file.read()
    try:
        recording = loads(text)
    except GraphError as error:
        raise ValueError(f"{options.trace}: {error}") from None
    if not recording.trace.operations:
        raise ValueError(f"{options.trace}: the trace is empty: no iteration was complete")
    outward = _link(recording.outward, options.out_rate, options, "--out-rate")
    inward = _link(recording.inward, options.in_rate, options, "--in-rate")
    return problem_of(recording.trace, outward, inward)


def _link(
    recorded: LinkRate | None, rate: str | None, options: argparse.Namespace, name: str
) -> LinkRate:
    """Choose a rate: from the options, else from the file."""
    if rate is None and recorded is None:
        raise ValueError(f"{options.trace} holds no rate of the link: give {name}, as '20GB'")
    latency_s = recorded.latency_s if recorded is not None else 0.0
    if options.latency is not None:
        latency_s = options.latency
    if rate is None:
        assert recorded is not None
        return LinkRate(recorded.bytes_per_s, latency_s)
    return LinkRate(float(parse_budget(rate, free_bytes=_no_share)), latency_s)


def _no_share() -> int:
    raise ValueError("a rate is bytes a second, as '20GB', not a share")


def _largest(problem: Problem, budget_bytes: int, options: argparse.Namespace) -> str:
    """Say how large the batch may be."""
    factor = largest_factor(problem, budget_bytes, options.most_loss)
    loss = f"at a loss of at most {options.most_loss:.0%}"
    if math.isinf(factor):
        return f"no batch is too large {loss}"
    if options.batch is None:
        return f"the batch may be {factor:.2f} times as large {loss}"
    largest = math.floor(options.batch * factor)
    return f"the largest batch {loss}: {largest} (recorded: {options.batch})"


def _refuse(message: str, code: int) -> int:
    print(f"dynamemo: {message}", file=sys.stderr)
    return code
