"""The command line: what is refused before anything runs, and how the words are split."""

from __future__ import annotations

import pytest

from dynamemo.cli import main
from tests.runtime.processes import RUN, run_python

PRINTING = "import sys; print(sys.argv)"


@pytest.mark.parametrize(
    ("words", "arguments"),
    [
        (["script.py"], []),
        (["script.py", "--budget", "1", "--report"], ["--budget", "1", "--report"]),
        (["script.py", "--"], ["--"]),
        (["script.py", "--", "-x", "--", "y"], ["--", "-x", "--", "y"]),
        (["--", "script.py", "-x"], ["-x"]),
        (["--", "script.py", "--", "-x"], ["--", "-x"]),
        (["--verify", "script.py", "-h"], ["-h"]),
        (["--policy", "lru", "script.py", "-", ""], ["-", ""]),
    ],
)
def test_words_after_the_script_are_the_script_s(words, arguments, tmp_path):
    (tmp_path / "script.py").write_text(PRINTING)
    done = run_python(*RUN, *words, folder=tmp_path)
    assert (done.stdout, done.stderr) == (f"{['script.py', *arguments]}\n", "")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--budget", "10XB"], "dynamemo: '10XB' is not a budget"),
        (["--host-budget", "-5"], "is not a budget"),
        (["--device", "tpu"], "dynamemo: unknown device 'tpu'"),
        (["--spill-dir", "missing"], "dynamemo: cannot make a spill file in folder 'missing'"),
        (["--report", "missing/r.json"], "missing/r.json': No such file or directory"),
        (["--report", "."], "': Is a directory"),
        (["--policy", "torture"], "invalid choice: 'torture'"),
    ],
)
def test_what_cannot_be_set_up_is_one_line_and_the_script_does_not_start(
    options, message, tmp_path
):
    (tmp_path / "script.py").write_text("print('started')")
    done = run_python(*RUN, *options, "script.py", folder=tmp_path)
    assert (done.stdout, done.returncode) == ("", 2)
    assert message in done.stderr.splitlines()[-1]
    assert "Traceback" not in done.stderr


def test_a_report_that_could_be_written_is_not_left_behind_where_nothing_ran(tmp_path):
    (tmp_path / "script.py").write_text("print('started')")
    done = run_python(*RUN, "--report", "r.json", "--device", "tpu", "script.py", folder=tmp_path)
    assert done.returncode == 2
    assert not (tmp_path / "r.json").exists()


@pytest.mark.parametrize("words", [[], ["run"], ["run", "--"], ["run", "--verify"], ["walk"]])
def test_incomplete_commands_show_the_usage(words, capsys):
    with pytest.raises(SystemExit) as stop:
        main(words)
    assert stop.value.code == 2
    assert "usage: dynamemo" in capsys.readouterr().err


@pytest.mark.parametrize("words", [["--help"], ["run", "--help"], ["demo", "--help"]])
def test_help_names_the_options(words, capsys):
    with pytest.raises(SystemExit) as stop:
        main(words)
    assert stop.value.code == 0
    assert "usage: dynamemo" in capsys.readouterr().out


def test_help_does_not_load_chainer(tmp_path):
    code = """
import sys
from dynamemo.cli import main
try:
    main(["--help"])
except SystemExit:
    print("chainer" in sys.modules)
"""
    assert run_python("-c", code, folder=tmp_path).stdout.splitlines()[-1] == "False"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--device", "tpu"], "dynamemo: unknown device 'tpu'"),
        (["--json", "missing/table.json"], "missing/table.json': No such file or directory"),
    ],
)
def test_the_demo_does_not_start_where_it_cannot_end(options, message, tmp_path):
    done = run_python("-m", "dynamemo.cli", "demo", *options, folder=tmp_path)
    assert (done.stdout, done.returncode) == ("", 2)
    assert message in done.stderr
    assert "Traceback" not in done.stderr
