"""The `dynamemo` command: `run` a script within a budget, `plan` one, or see the `demo`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from dynamemo.errors import AllocatorError, DynamemoError
from dynamemo.plan_command import add_plan
from dynamemo.policies import POLICIES
from dynamemo.report import check_writable

if TYPE_CHECKING:
    from dynamemo.runtime import Runtime

#: What cannot be done before any training starts: one line and exit code 2, not a traceback.
_SETUP_ERRORS = (DynamemoError, AllocatorError, OSError, ValueError)

#: Stands for "--", of which argparse would swallow one that belongs to the script.
_DASHES = "\0"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit code.

    What a script raises under `run` passes through: the interpreter ends as it would have after
    `python script.py`.

    Parameters
    ----------
    arguments : sequence of str, optional
        Default: the process's own.
    """
    given = list(sys.argv[1:] if arguments is None else arguments)
    if given[:1] == ["run"]:
        given = [_DASHES if argument == "--" else argument for argument in given]
    options = _parser().parse_args(given)
    code: int = options.run(options)
    return code


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="dynamemo", description="Train Chainer models within a budget of device memory."
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    _add_run(commands.add_parser("run", help="run a training script, unchanged, within a budget"))
    _add_demo(commands.add_parser("demo", help="train one network at several budgets and compare"))
    add_plan(commands.add_parser("plan", help="predict what a budget means for a recorded trace"))
    return parser


def _add_run(parser: argparse.ArgumentParser) -> None:
    policies = [name for name in POLICIES if name != "torture"]
    parser.add_argument("--budget", metavar="B", help="bytes, '4GiB', or '60%%' of what is free")
    _add_device(parser)
    parser.add_argument("--host-budget", metavar="B", help="room for evicted tensors, as --budget")
    parser.add_argument("--spill-dir", metavar="DIR", help="folder for the spill file")
    parser.add_argument("--policy", default="cost-aware", choices=policies)
    parser.add_argument("--verify", action="store_true", help="check every recompute (slow)")
    parser.add_argument("--report", metavar="FILE", help="write the statistics there, as JSON")
    parser.add_argument("script", help="the training script, or a folder with a __main__.py")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, metavar="ARGS", help="its own")
    parser.set_defaults(run=_run, parser=parser)


def _add_demo(parser: argparse.ArgumentParser) -> None:
    _add_device(parser, default="cpu")
    parser.add_argument("--json", metavar="FILE", help="write the table there, as JSON")
    parser.set_defaults(run=_demo)


def _add_device(parser: argparse.ArgumentParser, *, default: str = "auto") -> None:
    parser.add_argument(
        "--device",
        default=default,
        type=lambda text: int(text) if text.isdecimal() else text,
        help=f"auto, cpu, cuda, cuda:1 or 1, ... (default: {default})",
    )


def _run(options: argparse.Namespace) -> int:
    from dynamemo.script import ScriptNotFoundError, enter_for_process, find_script, run_script

    name, *arguments = (
        "--" if argument == _DASHES else argument
        for argument in _after_dashes([options.script, *options.arguments], options.parser)
    )
    try:
        script = find_script(name)
        session = enter_for_process(_make_runtime(options), report=options.report)
    except ScriptNotFoundError as error:
        return _refuse(error, error.exit_code)
    except _SETUP_ERRORS as error:
        return _refuse(error, 2)
    run_script(script, arguments, session)
    return 0


def _after_dashes(words: list[str], parser: argparse.ArgumentParser) -> list[str]:
    """Drop the "--" between our options and the script's name."""
    if words[0] != _DASHES:
        return words
    if len(words) == 1:
        parser.error("the following arguments are required: script, ARGS")
    return words[1:]


def _make_runtime(options: argparse.Namespace) -> Runtime:
    from dynamemo.runtime import Runtime  # imports Chainer, which `--help` can do without

    return Runtime(
        options.budget,
        device=options.device,
        host_budget=options.host_budget,
        spill_dir=options.spill_dir,
        policy=options.policy,
        verify=options.verify,
    )


def _demo(options: argparse.Namespace) -> int:
    from dynamemo.demo import find_device, run_demo

    try:
        path = None if options.json is None else check_writable(options.json)
        device = find_device(options.device)
    except _SETUP_ERRORS as error:
        return _refuse(error, 2)
    return run_demo(device=device, json_path=path)


def _refuse(error: Exception, code: int) -> int:
    print(f"dynamemo: {error}", file=sys.stderr)
    return code


if __name__ == "__main__":
    sys.exit(main())
