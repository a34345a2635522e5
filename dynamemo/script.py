"""Run a Python script under a runtime, as `python script.py` would run it.

The script needs no line of dynamemo. What remains different is in its call stack, below its own
first frame, and that NumPy and Chainer are loaded before its first line: environment variables
that they read when they are loaded have to be set outside.

Invariants:
  1. The script is the process's `__main__` until the process ends, also for pickles and
     `multiprocessing`. `sys.argv`, `sys.path[0]` and `__main__`'s names are those of a plain run.
  2. What ends the script ends the process: its exception reaches the interpreter, which prints it
     and chooses the exit code. The traceback starts at the script and leaves out our frames.
  3. The runtime is left when the process ends, after the script's threads and `atexit` functions;
     after an exception at once. Then the report is written. A forked child does neither.
"""

from __future__ import annotations

import atexit
import builtins
import importlib
import importlib.machinery
import importlib.util
import os
import sys
import types
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from dynamemo import allocator
from dynamemo.errors import AllocatorError, DynamemoError, InternalError, OutOfMemoryError
from dynamemo.report import check_writable, write_json
from dynamemo.runtime import Runtime

_OUR_FOLDER = os.path.dirname(os.path.abspath(__file__)) + os.sep


class ScriptNotFoundError(DynamemoError):
    """There is nothing to run at the path that was given.

    Attributes
    ----------
    exit_code : int
        What `python` ends with there.
    """

    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(message)
        self.exit_code = exit_code


@dataclass(frozen=True, slots=True)
class Script:
    """A script that exists and was not run yet."""

    #: What the script finds in `sys.argv[0]`: its path as it was given.
    name: str
    #: What it finds in `sys.path[0]`.
    folder: str
    #: What becomes `__main__`.
    module: types.ModuleType
    #: Its source; None where the loader has the code.
    source: bytes | None

    def code(self) -> types.CodeType:
        """Compile it.

        Raises
        ------
        SyntaxError
        """
        if self.source is not None:
            path = str(self.module.__file__)
            return compile(self.source, path, "exec", dont_inherit=True)
        loader: Any = self.module.__loader__
        code: types.CodeType = loader.get_code("__main__")
        return code


class Session:
    """A runtime that was entered for the rest of the process, and its report file."""

    def __init__(self, runtime: Runtime, report: str | None) -> None:
        self._runtime = runtime
        self._report = report
        self._process = os.getpid()
        self._is_left = False
        atexit.register(self.leave)

    def leave(self, error: BaseException | None = None) -> BaseException | None:
        """Leave the runtime and write the report; the second time do nothing.

        Returns
        -------
        BaseException or None
            What ends the script: the error, or for NumPy's `MemoryError` the one that explains it.
        """
        if self._is_left or os.getpid() != self._process:
            return error
        self._is_left = True
        kind, frames = (None, None) if error is None else (type(error), error.__traceback__)
        try:
            self._runtime.__exit__(kind, error, frames)
        except OutOfMemoryError as ours:
            ours.__cause__, ours.__suppress_context__ = None, True  # one message, not two
            error = ours.with_traceback(frames)
        finally:
            self._write_report()
        return error

    def _write_report(self) -> None:
        if self._report is not None:
            write_json(self._report, self._runtime.statistics().as_dict())


def find_script(name: str) -> Script:
    """Find what `python NAME` would run: a file, or the `__main__` of a folder or an archive.

    Raises
    ------
    ScriptNotFoundError
    """
    if sys.path_hooks and _is_searchable(name):
        return _find_in_folder(name)
    path = os.path.join(os.getcwd(), name)  # not normalised: Python's own __file__ is not either
    try:
        with open(path, "rb") as file:
            source: bytes | None = file.read()
    except OSError as error:
        raise ScriptNotFoundError(
            f"can't open file {path!r}: [Errno {error.errno}] {error.strerror}", 2
        ) from error
    loader: Any = importlib.machinery.SourceFileLoader("__main__", path)
    if name.endswith(".pyc"):
        loader, source = importlib.machinery.SourcelessFileLoader("__main__", path), None
    module = types.ModuleType("__main__")
    module.__dict__.update(__loader__=loader, __file__=path, __cached__=None)
    return Script(name, os.path.dirname(os.path.realpath(path)), module, source)


def _is_searchable(name: str) -> bool:
    for hook in sys.path_hooks:
        try:
            hook(name)
        except ImportError:
            continue
        return True
    return False


def _find_in_folder(name: str) -> Script:
    path = os.path.abspath(name)
    spec = importlib.machinery.PathFinder.find_spec("__main__", [path])
    if spec is None or spec.loader is None:
        raise ScriptNotFoundError(f"can't find '__main__' module in {path!r}", 1)
    return Script(name, path, importlib.util.module_from_spec(spec), None)


def enter_for_process(runtime: Runtime, *, report: str | None = None) -> Session:
    """Enter the runtime for the rest of the process.

    Parameters
    ----------
    runtime : Runtime
        Not entered yet.
    report : str, optional
        File to write the statistics to, as JSON, also when the script fails. It is opened now as
        well, so that a wrong path costs no training.

    Raises
    ------
    OSError
        If the report cannot be written; the runtime has not been entered.
    DynamemoError, AllocatorError
        If the runtime cannot be entered.
    """
    path = None if report is None else check_writable(report)
    runtime.__enter__()
    return Session(runtime, path)


def run_script(script: Script, arguments: Sequence[str], session: Session) -> None:
    """Run the script as the process's `__main__`.

    Parameters
    ----------
    script : Script
        From `find_script`.
    arguments : sequence of str
        What it finds in `sys.argv[1:]`.
    session : Session
        From `enter_for_process`.

    Raises
    ------
    BaseException
        What the script raised. `sys.excepthook` is set to show it without our frames.
    """
    _become_main(script, arguments)
    _let_spawned_processes_import_chainer()
    code = None
    try:
        code = script.code()
        exec(code, script.module.__dict__)
    except SystemExit:
        raise
    except BaseException as error:
        shown = session.leave(error) or error
        _show_without_our_frames(shown, code)
        raise shown  # noqa: B904  it is the same, or takes the other's place


def _become_main(script: Script, arguments: Sequence[str]) -> None:
    names = script.module.__dict__
    names["__builtins__"] = builtins
    names.setdefault("__annotations__", {})
    sys.modules["__main__"] = script.module
    sys.argv = [script.name, *arguments]
    if getattr(sys.flags, "safe_path", False):  # python -P put no folder there
        if script.module.__spec__ is not None:
            sys.path.insert(0, script.folder)
    else:
        sys.path[0] = script.folder


class _ImportOfDynamemo:
    """Imports dynamemo in the process that unpickles it."""

    def __reduce__(self) -> tuple[Any, ...]:
        return importlib.import_module, ("dynamemo",)


def _let_spawned_processes_import_chainer() -> None:
    """Have children that `multiprocessing` starts afresh import dynamemo before the script.

    They import the script again, and Chainer with it, which on NumPy 2 needs dynamemo. A forked
    child has inherited it.
    """
    from multiprocessing import spawn

    original = spawn.get_preparation_data

    def get_preparation_data(name: str) -> dict[str, Any]:
        return {"dynamemo": _ImportOfDynamemo(), **original(name)}

    spawn.get_preparation_data = get_preparation_data


def _show_without_our_frames(error: BaseException, code: types.CodeType | None) -> None:
    """Make the interpreter print the error as after a plain run, by whatever hook is set."""
    for each in _chain(error, set()):
        each.__traceback__ = _without_our_frames(each, code if each is error else None)
    if code is None:  # it does not compile: no line of it has run
        error.__traceback__ = None
    frames, hook = error.__traceback__, sys.excepthook

    def show(kind: Any, value: Any, traceback: Any) -> None:
        sys.excepthook = hook
        if value is error:  # on its way here it has passed our frames again
            value.__traceback__ = traceback = frames
        hook(kind, value, traceback)

    sys.excepthook = show


def _chain(error: BaseException | None, seen: set[int]) -> Iterator[BaseException]:
    """Yield the error and all that is printed with it."""
    if error is None or id(error) in seen:
        return
    seen.add(id(error))
    yield error
    for other in (error.__cause__, error.__context__, *getattr(error, "exceptions", ())):
        yield from _chain(other, seen)


def _without_our_frames(
    error: BaseException, first: types.CodeType | None
) -> types.TracebackType | None:
    """Copy the traceback from the script's frame on, leaving out dynamemo's.

    A fault of dynamemo itself keeps its frames: without them nobody could find it.
    """
    entries = list(_entries(error.__traceback__))
    starts = [place for place, entry in enumerate(entries) if entry.tb_frame.f_code is first]
    entries = entries[starts[0] if starts else 0 :]
    if not _is_fault_of_ours(error, entries):
        entries = [entry for entry in entries if not _is_ours(entry)]
    copy = None
    for entry in reversed(entries):
        copy = types.TracebackType(copy, entry.tb_frame, entry.tb_lasti, entry.tb_lineno)
    return copy


def _entries(traceback: types.TracebackType | None) -> Iterator[types.TracebackType]:
    while traceback is not None:
        yield traceback
        traceback = traceback.tb_next


def _is_fault_of_ours(error: BaseException, entries: list[types.TracebackType]) -> bool:
    if isinstance(error, InternalError | allocator.InternalError):
        return True
    is_said = isinstance(error, DynamemoError | AllocatorError)
    return not is_said and bool(entries) and _is_ours(entries[-1])


def _is_ours(entry: types.TracebackType) -> bool:
    return entry.tb_frame.f_code.co_filename.startswith(_OUR_FOLDER)
