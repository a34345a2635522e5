"""`dynamemo run script.py` against `python script.py`: the same script, both ways."""

from __future__ import annotations

import json
import pathlib
import subprocess
import textwrap
from typing import Any

import pytest

from tests.runtime.processes import RUN, run_python

#: Name, script, arguments: what it prints, says and ends with has to be the same both ways.
SCRIPTS = {
    "names": """
        import sys
        names = dict(globals())
        for name in sorted(names):
            value = names[name]
            print(name, type(value).__name__ if name.startswith("__load") else value)
        print(__loader__.name, __loader__.path, __loader__.get_source("__main__") is not None)
        print(sys.argv, sys.path[0], sys.modules["__main__"].__dict__ is globals())
        print(sys._getframe().f_code.co_filename, sys._getframe().f_code.co_flags)
        """,
    "siblings": """
        import pathlib, sibling
        print(sibling.__name__, sibling.__file__, pathlib.Path(__file__).parent)
        try:
            from . import sibling
        except ImportError as error:
            print(error)
        """,
    "pickle": """
        import pickle, copy, typing
        class Point:
            x: "int" = 3
        print(Point.__module__, pickle.loads(pickle.dumps(Point())).x, pickle.dumps(Point()))
        print(typing.get_type_hints(Point))
        """,
    "exit nothing": "import sys; sys.exit()",
    "exit number": "import sys; sys.exit(37)",
    "exit large number": "import sys; sys.exit(1000)",
    "exit text": "import sys; sys.stdout.write('out'); sys.exit('said at the end')",
    "exit object": "raise SystemExit({'a': [1]})",
    "exit true": "raise SystemExit(True)",
    "exit at once": "import os; print('out', flush=True); os._exit(5)",
    "abort": "import os, signal; os.kill(os.getpid(), signal.SIGTERM)",
    "interrupt": """
        import atexit, os, signal, time
        atexit.register(print, "at exit")
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(60)
        """,
    "uncaught": """
        def outer():
            inner()
        def inner():
            raise ValueError("wrong")
        try:
            outer()
        except ValueError:
            outer()
        """,
    "chained": """
        import json
        try:
            json.loads("[")
        except ValueError as error:
            raise RuntimeError("no configuration") from error
        """,
    "group": """
        def fail(error):
            raise error
        errors = []
        for kind in (ValueError, TypeError):
            try:
                fail(kind("one"))
            except Exception as error:
                errors.append(error)
        raise ExceptionGroup("both", errors)
        """,
    "of chainer": """
        import dynamemo, chainer, numpy
        import chainer.functions as F
        chainer.config.type_check = True
        def loss(x):
            return F.sum(F.linear(x, numpy.ones((3, 5), "f")))
        loss(chainer.Variable(numpy.ones((2, 4), "f")))
        """,
    "inside a function of chainer": """
        import dynamemo, chainer, numpy
        class Faulty(chainer.FunctionNode):
            def forward(self, inputs):
                return inputs[0] / self.missing
        Faulty().apply((chainer.Variable(numpy.ones(3, "f")),))
        """,
    "does not compile": """
        print("never")
        def broken(:
        """,
    "does not compile in a sibling": "import broken_sibling",
    "hook": """
        import sys
        def hook(kind, error, traceback):
            depth = 0
            while traceback is not None:
                print(traceback.tb_frame.f_code.co_name, traceback.tb_lineno)
                traceback = traceback.tb_next
            print(kind, error, error.__traceback__.tb_frame.f_code.co_name, sys.excepthook is hook)
        sys.excepthook = hook
        1 / 0
        """,
    "hook that exits": """
        import sys
        sys.excepthook = lambda *failure: sys.exit(9)
        1 / 0
        """,
    "caught and printed": """
        import traceback
        try:
            1 / 0
        except ZeroDivisionError:
            traceback.print_exc()
        """,
    "warnings": """
        import dynamemo, chainer, warnings  # which add filters
        warnings.warn("a user's")
        warnings.warn("a deprecation in the script", DeprecationWarning)
        import sibling
        sibling.warn_there()
        print("\\d")
        print([f for f in warnings.filters if f[1] is None and f[3] is None])
        """,
    "standard input": """
        import sys
        print(input(), sys.stdin.read())
        """,
    "at exit": """
        import atexit, numpy, threading
        held = numpy.ones(100_000)
        atexit.register(lambda: print("first registered", held.sum()))
        atexit.register(print, "last registered")
        def work():
            threading.main_thread().join()
            print("thread", threading.main_thread().is_alive(), (held + 1).sum())
        threading.Thread(target=work).start()
        print("end of the script")
        """,
    "idle executor": """
        import concurrent.futures
        executor = concurrent.futures.ThreadPoolExecutor()
        print(executor.submit(pow, 2, 3).result())
        """,
    "thread that fails": """
        import threading
        def work():
            raise ValueError("in the thread")
        thread = threading.Thread(target=work, name="worker")
        thread.start()
        thread.join()
        """,
    "fork": """
        import os, sys
        print("before", flush=True)
        child = os.fork()
        if not child:
            sys.exit(4)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
        """,
    "fork that fails": """
        import os
        child = os.fork()
        if not child:
            raise ValueError("in the child")
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
        """,
    "other folder": """
        import os
        os.chdir("/")
        1 / 0
        """,
    "iterators with workers": """
        import dynamemo, numpy
        from chainer import dataset, iterators
        class Squares(dataset.DatasetMixin):
            def __len__(self):
                return 12
            def get_example(self, i):
                return numpy.full(20_000, i * i, "f"), numpy.int32(i)
        options = {"repeat": False, "shuffle": False}
        for iterator in (
            iterators.MultiprocessIterator(Squares(), 4, n_processes=2, **options),
            iterators.MultiprocessIterator(Squares(), 4, n_processes=2, shared_mem=1, **options),
            iterators.MultithreadIterator(Squares(), 4, n_threads=2, **options),
        ):
            for batch in iterator:
                print([(int(x.sum()), int(i)) for x, i in batch])
            iterator.finalize()
        """,
    "pool of processes": """
        import multiprocessing, numpy
        class Task:
            def __init__(self, n):
                self.n = n
        def work(task):
            return Task(numpy.ones(task.n * 100_000, "f").sum())
        with multiprocessing.get_context("fork").Pool(2) as pool:
            print([float(task.n) for task in pool.map(work, [Task(1), Task(2), Task(3)])])
        """,
}

ARGUMENTS = ("--budget", "5", "-x", "--", "positional", "--help", "", "a b")


def write(folder: pathlib.Path, text: str, name: str = "script.py") -> None:
    (folder / name).write_bytes(textwrap.dedent(text).lstrip().encode(errors="surrogateescape"))


def run_both(
    name: str, *arguments: str, folder: pathlib.Path, **options: Any
) -> list[subprocess.CompletedProcess[str]]:
    """Run plainly, then under dynamemo."""
    return [run_python(*way, name, *arguments, folder=folder, **options) for way in ((), RUN)]


def assert_same(plain: Any, ours: Any) -> None:
    assert ours.stderr == plain.stderr
    assert ours.stdout == plain.stdout
    assert ours.returncode == plain.returncode


@pytest.mark.parametrize("text", SCRIPTS.values(), ids=SCRIPTS)
def test_a_script_runs_as_it_does_plainly(text, tmp_path):
    write(tmp_path, text)
    write(
        tmp_path,
        """
        import warnings
        def warn_there():
            warnings.warn("a deprecation elsewhere", DeprecationWarning)
            warnings.warn("at the caller", UserWarning, stacklevel=2)
        """,
        "sibling.py",
    )
    write(tmp_path, "x = (\n", "broken_sibling.py")
    # Compiled first, so that both runs find the same in __pycache__.
    run_python("-c", "import sibling", folder=tmp_path)
    assert_same(*run_both("script.py", *ARGUMENTS, folder=tmp_path, input="line\nmore\n"))


@pytest.mark.parametrize(
    ("text", "error"),
    [("def f(): f()\nf()", "RecursionError: "), ("# no coding\nprint('\udcff')", "SyntaxError: ")],
)
def test_a_script_ends_as_plainly_where_only_the_wording_differs(text, error, tmp_path):
    write(tmp_path, text)
    plain, ours = run_both("script.py", folder=tmp_path)
    assert plain.stderr.splitlines()[-1].startswith(error)
    assert ours.stderr.splitlines()[-1].startswith(error)
    assert "dynamemo/" not in ours.stderr
    assert ours.returncode == plain.returncode


@pytest.mark.parametrize("name", ["sub/script.py", "sub/../sub/script.py", "link.py"])
def test_a_script_elsewhere_finds_what_it_does_plainly(name, tmp_path):
    (tmp_path / "sub").mkdir()
    write(tmp_path / "sub", SCRIPTS["names"])
    (tmp_path / "link.py").symlink_to("sub/script.py")
    assert_same(*run_both(name, "-a", folder=tmp_path))


def test_a_folder_runs_its_main_module(tmp_path):
    (tmp_path / "program").mkdir()
    write(
        tmp_path / "program",
        """
        import sys, sibling
        print(__file__, __package__, __spec__.name, __spec__.origin, sys.argv, sys.path[0])
        print(sibling.__file__)
        """,
        "__main__.py",
    )
    write(tmp_path / "program", "", "sibling.py")
    assert_same(*run_both("program", "-a", folder=tmp_path))


@pytest.mark.parametrize("name", ["missing.py", "empty", "missing/script.py"])
def test_nothing_to_run_says_what_python_says(name, tmp_path):
    (tmp_path / "empty").mkdir()
    plain, ours = run_both(name, folder=tmp_path)
    assert ours.stderr == "dynamemo: " + plain.stderr.partition(": ")[2]
    assert (ours.stdout, ours.returncode) == ("", plain.returncode)


def test_compiled_scripts_run(tmp_path):
    write(tmp_path, "import sys; print(__file__, type(__loader__).__name__, sys.argv)")
    run_python("-c", "import py_compile; py_compile.compile('script.py', 's.pyc')", folder=tmp_path)
    assert_same(*run_both("s.pyc", folder=tmp_path))


def test_safe_path_keeps_the_folder_out(tmp_path):
    write(tmp_path, "import sys; print(sys.path)")
    plain, ours = (
        run_python("-P", *way, "script.py", folder=tmp_path)
        for way in ((), ("-m", "dynamemo.cli", *RUN[2:]))
    )
    assert_same(plain, ours)


@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_processes_that_start_afresh_import_chainer(method, tmp_path):
    write(
        tmp_path,
        """
        import multiprocessing, sys
        import chainer
        def work():
            print("in", __name__, chainer.__version__, flush=True)
            sys.exit(3)
        if __name__ == "__main__":
            process = multiprocessing.get_context(sys.argv[1]).Process(target=work)
            process.start()
            process.join()
            print(process.exitcode)
        """,
    )
    ours = run_python(*RUN, "script.py", method, folder=tmp_path)
    assert (ours.stderr, ours.returncode) == ("", 0)
    assert ours.stdout == "in __mp_main__ 7.8.1\n3\n"


TRAINING = """
    import sys
    import dynamemo, chainer, numpy
    import chainer.functions as F
    numpy.random.seed(0)
    model = chainer.Sequential(*[chainer.links.Linear(256, 256) for _ in range(8)])
    optimizer = chainer.optimizers.SGD().setup(model)
    x = numpy.ones((512, 256), "f")
    for step in range(3):
        loss = F.sum(model(x)) / 1e6
        model.cleargrads()
        loss.backward()
        optimizer.update()
    {end}
    """


def report_of(folder: pathlib.Path) -> dict[str, Any]:
    report: dict[str, Any] = json.loads((folder / "report.json").read_text())
    return report


@pytest.mark.parametrize(
    ("end", "code"), [("", 0), ("sys.exit(3)", 3), ("1 / 0", 1), ("import os; os.chdir('/')", 0)]
)
def test_the_report_is_written_however_the_script_ends(end, code, tmp_path):
    write(tmp_path, TRAINING.format(end=end))
    (tmp_path / "report.json").write_text("of an earlier run\n" * 1000)
    ours = run_python(*RUN, "--report", "report.json", "script.py", folder=tmp_path)
    assert ours.returncode == code, ours.stderr
    report = report_of(tmp_path)
    assert report["iterations"] == 3
    assert report["device"] == "cpu"
    assert 0 < report["peak_bytes"] <= report["budget_bytes"] == 64 << 20


def test_the_report_counts_threads_and_exit_functions(tmp_path):
    write(
        tmp_path,
        """
        import atexit, threading, time, numpy
        def work(nbytes):
            numpy.ones(nbytes, "u1").sum()
        def work_later():
            threading.main_thread().join()
            work(10 << 20)
        atexit.register(work, 20 << 20)
        threading.Thread(target=work_later).start()
        """,
    )
    ours = run_python(*RUN, "--report", "report.json", "script.py", folder=tmp_path)
    assert (ours.stderr, ours.returncode) == ("", 0)
    assert report_of(tmp_path)["peak_bytes"] >= 20 << 20


def test_a_forked_child_writes_no_report(tmp_path):
    write(
        tmp_path,
        """
        import os, sys
        child = os.fork()
        if not child:
            sys.exit(0)
        os.waitpid(child, 0)
        print(os.path.exists("report.json"))
        """,
    )
    ours = run_python(*RUN, "--report", "report.json", "script.py", folder=tmp_path)
    assert (ours.stdout, ours.stderr) == ("False\n", "")
    assert report_of(tmp_path)["iterations"] == 0


def test_a_training_runs_within_a_budget_it_would_exceed(tmp_path):
    write(tmp_path, TRAINING.format(end="print(sum(float(p.array.sum()) for p in model.params()))"))
    plain = run_python("script.py", folder=tmp_path)
    ours = run_python(
        *RUN, "--budget", "9MiB", "--report", "report.json", "script.py", folder=tmp_path
    )
    assert (ours.stdout, ours.stderr) == (plain.stdout, "")
    report = report_of(tmp_path)
    assert report["offloaded_bytes"] + report["dropped_bytes"] > 0
    assert report["peak_bytes"] <= report["budget_bytes"] == 9 << 20


def test_out_of_memory_is_one_message_at_the_script_s_line(tmp_path):
    write(
        tmp_path,
        """
        import numpy
        def load():
            return numpy.ones(100 << 20, "u1")
        load()
        """,
    )
    ours = run_python(*RUN, "--report", "report.json", "script.py", folder=tmp_path)
    lines = ours.stderr.splitlines()
    assert ours.returncode == 1
    assert lines[0] == "Traceback (most recent call last):"
    assert f'File "{tmp_path}/script.py", line 4, in <module>' in lines[1]
    assert f'File "{tmp_path}/script.py", line 3, in load' in lines[3]
    assert lines[-1].startswith(
        "dynamemo.allocator.errors.OutOfMemoryError: cannot allocate 104,857,600 bytes: "
    )
    assert "raise the budget to at least" in lines[-1]
    assert ours.stderr.count("Traceback") == ours.stderr.count("Error: ") == 1
    assert "/dynamemo/" not in ours.stderr
    assert report_of(tmp_path)["budget_bytes"] == 64 << 20


def test_out_of_memory_in_a_function_names_it(tmp_path):
    write(tmp_path, TRAINING.format(end="F.relu(numpy.ones((30 << 18,), 'f'))"))
    ours = run_python(*RUN, "script.py", folder=tmp_path)
    assert ours.returncode == 1
    assert "bytes for ReLU: " in ours.stderr.splitlines()[-1]
    assert ours.stderr.count("Traceback") == 1
    assert "/dynamemo/" not in ours.stderr


def test_a_script_can_survive_out_of_memory(tmp_path):
    write(
        tmp_path,
        """
        import numpy
        try:
            numpy.ones(100 << 20, "u1")
        except MemoryError:
            print("went on with", numpy.ones(1 << 20, "u1").sum())
        """,
    )
    ours = run_python(*RUN, "script.py", folder=tmp_path)
    assert (ours.stdout, ours.stderr, ours.returncode) == ("went on with 1048576\n", "", 0)


@pytest.mark.parametrize(
    "text",
    [
        "import dynamemo\ndynamemo.Runtime('1MiB', policy='unknown')",  # a plain error from inside
        "import dynamemo\nraise dynamemo.InternalError('a bug')",
    ],
)
def test_what_may_be_a_fault_of_ours_keeps_its_frames(text, tmp_path):
    write(tmp_path, text)
    assert_same(*run_both("script.py", folder=tmp_path))


def test_a_runtime_inside_is_refused_at_the_script_s_line(tmp_path):
    write(tmp_path, "import dynamemo\nwith dynamemo.Runtime('1MiB', device='cpu'):\n    pass\n")
    ours = run_python(*RUN, "script.py", folder=tmp_path)
    lines = ours.stderr.splitlines()
    assert ours.returncode == 1
    assert lines[-1].startswith("dynamemo.errors.DynamemoError: a dynamemo.Runtime is already")
    assert "script.py" in lines[-3] or "script.py" in lines[-4]
    assert "/dynamemo/" not in ours.stderr
