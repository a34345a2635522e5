"""The `dynamemo` command: `run` a script within a budget, or see the `demo`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from dynamemo.errors import DynamemoError
from dynamemo.policies import POLICIES
from dynamemo.runtime import Runtime


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit code.

    Parameters
    ----------
    arguments : sequence of str, optional
        Default: the process's own.
    """
    options = _parser().parse_args(arguments)
    try:
        code: int = options.run(options)
    except (DynamemoError, ValueError) as error:
        print(f"dynamemo: {error}", file=sys.stderr)
        return 2
    return code


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="dynamemo", description="Train Chainer models within a budget of device memory."
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    run = commands.add_parser("run", help="run a training script, unchanged, within a budget")
    run.add_argument("--budget", metavar="B", help="bytes, '4GiB', or '60%%' of what is free")
    run.add_argument("--device", default="auto", help="auto (default), cpu, cuda, cuda:1, ...")
    run.add_argument("--host-budget", metavar="B", help="room for evicted tensors, as --budget")
    run.add_argument("--spill-dir", metavar="DIR", help="folder for the spill file")
    run.add_argument(
        "--policy", default="cost-aware", choices=[n for n in POLICIES if n != "torture"]
    )
    run.add_argument("--verify", action="store_true", help="check every recompute (slow)")
    run.add_argument("--report", metavar="FILE", help="write the statistics there, as JSON")
    run.add_argument("script", help="the training script")
    run.add_argument("arguments", nargs=argparse.REMAINDER, metavar="ARGS", help="its arguments")
    run.set_defaults(run=_run)
    demo = commands.add_parser("demo", help="train a small network at several budgets and compare")
    demo.add_argument("--device", default="auto", help="auto (default), cpu, cuda, ...")
    demo.add_argument("--json", metavar="FILE", help="write the table there, as JSON")
    demo.set_defaults(run=_demo)
    return parser


def _run(options: argparse.Namespace) -> int:
    from dynamemo.script import run_script

    runtime = Runtime(
        options.budget,
        device=options.device,
        host_budget=options.host_budget,
        spill_dir=options.spill_dir,
        policy=options.policy,
        verify=options.verify,
    )
    return run_script(options.script, options.arguments, runtime, report=options.report)


def _demo(options: argparse.Namespace) -> int:
    from dynamemo.demo import run_demo

    return run_demo(device=options.device, json_path=options.json)


if __name__ == "__main__":
    sys.exit(main())
