"""Run a Python script under a runtime, as `python script.py` would run it.

The script sees its own `sys.argv`, `sys.path[0]` and `__main__`; its exit code, its traceback and
what it prints are those of a plain run. It needs no line of dynamemo.
"""

from __future__ import annotations

import builtins
import json
import os
import sys
import traceback
import types
from collections.abc import Sequence
from typing import Any

from dynamemo.runtime import Runtime


def run_script(
    path: str, arguments: Sequence[str], runtime: Runtime, *, report: str | None = None
) -> int:
    """Run the script inside the runtime.

    Parameters
    ----------
    path : str
        The script.
    arguments : sequence of str
        What it finds in `sys.argv[1:]`.
    runtime : Runtime
        Not entered yet.
    report : str, optional
        File to write the statistics to, as JSON, also when the script fails.

    Returns
    -------
    int
        The exit code that `python script.py` would have had.
    """
    try:
        with open(path, "rb") as file:
            source = file.read()
    except OSError as error:
        print(f"dynamemo: cannot read {path!r}: {error.strerror}", file=sys.stderr)
        return 2
    module = _become_main(path, arguments)
    code = 0
    try:
        with runtime:
            exec(compile(source, path, "exec"), module.__dict__)
    except SystemExit as stop:
        code = _exit_code(stop)
    except BaseException as error:
        _print_traceback(error, path)
        code = 130 if isinstance(error, KeyboardInterrupt) else 1
    finally:
        if report is not None:
            _write_report(report, runtime)
    return code


def _become_main(path: str, arguments: Sequence[str]) -> types.ModuleType:
    """Make the module that the script runs in the process's `__main__`."""
    module = types.ModuleType("__main__")
    module.__dict__.update(
        __file__=path, __builtins__=builtins, __cached__=None, __annotations__={}
    )
    sys.modules["__main__"] = module
    sys.argv = [path, *arguments]
    sys.path[0] = os.path.dirname(os.path.realpath(path))
    return module


def _exit_code(stop: SystemExit) -> int:
    if stop.code is None:
        return 0
    if isinstance(stop.code, int):
        return stop.code
    print(stop.code, file=sys.stderr)
    return 1


def _print_traceback(error: BaseException, path: str) -> None:
    """Print the traceback from the script's first line on, as a plain run would."""
    frames = error.__traceback__
    while frames is not None and frames.tb_frame.f_code.co_filename != path:
        frames = frames.tb_next
    hook: Any = sys.excepthook
    if hook is sys.__excepthook__:
        traceback.print_exception(type(error), error, frames or error.__traceback__)
    else:
        hook(type(error), error, frames or error.__traceback__)


def _write_report(path: str, runtime: Runtime) -> None:
    with open(path, "w") as file:
        json.dump(runtime.statistics().as_dict(), file, indent=2)
        file.write("\n")
