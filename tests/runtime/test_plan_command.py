"""The command `dynamemo plan`: what it prints, and one line for what it cannot use."""

from __future__ import annotations

from dataclasses import replace

import pytest

from dynamemo.cli import main
from dynamemo.graph.lowering import lower
from dynamemo.graph.networks import alexnet
from dynamemo.graph.problem import LinkRate
from dynamemo.graph.trace_json import dumps
from dynamemo.graph.types import Trace

LINK = LinkRate(1e10, 1e-5)


def recorded() -> Trace:
    trace = lower(alexnet(4))
    return Trace(
        tuple(replace(storage, is_movable=True) for storage in trace.storages),
        tuple(
            replace(operation, elapsed_s=1e-3, is_repeatable=True) for operation in trace.operations
        ),
    )


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "trace.json"
    path.write_text(dumps(recorded(), outward=LINK, inward=LINK))
    return str(path)


def test_it_tells_what_a_budget_means(file, capsys):
    assert main(["plan", "--budget", "70%", "--most-loss", "0.2", "--batch", "4", file]) == 0
    text = capsys.readouterr().out
    for words in ("smallest feasible", "lower bound", "made by", "the largest batch at a loss of"):
        assert words in text


def test_options_stand_for_rates_that_the_file_lacks(tmp_path, capsys):
    path = tmp_path / "trace.json"
    path.write_text(dumps(recorded()))
    assert main(["plan", "--budget", "70%", str(path)]) == 2
    assert "holds no rate of the link: give --out-rate" in capsys.readouterr().err
    rates = ["--out-rate", "10GB", "--in-rate", "10GB", "--latency", "1e-5"]
    assert main(["plan", "--budget", "70%", *rates, str(path)]) == 0


@pytest.mark.parametrize(
    ("options", "code", "message"),
    [
        (["--budget", "1KiB"], 1, "is not feasible; the smallest that is found to be"),
        (["--budget", "10XB"], 2, "'10XB' is not a budget"),
        (["--budget", "1GiB", "--out-rate", "5%"], 2, "not a share"),
        (["--budget", "1GiB", "--latency", "-1"], 2, "--latency -1.0 is not possible"),
        (["--budget", "1GiB", "--most-loss", "-1"], 2, "--most-loss -1.0 is not possible"),
        (["--budget", "1GiB", "--batch", "4"], 2, "goes with --most-loss"),
    ],
)
def test_what_is_not_possible_is_one_line(file, options, code, message, capsys):
    assert main(["plan", *options, file]) == code
    printed = capsys.readouterr()
    assert printed.out == ""
    assert message in printed.err
    assert len(printed.err.splitlines()) == 1


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "No such file or directory"),
        ("", "not JSON"),
        ("{}", "not a trace"),
        (dumps(Trace(), outward=LINK, inward=LINK), "the trace is empty"),
    ],
)
def test_a_file_that_is_no_trace_is_one_line(text, message, tmp_path, capsys):
    path = tmp_path / "trace.json"
    if text is not None:
        path.write_text(text)
    assert main(["plan", "--budget", "1GiB", str(path)]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert len(error.splitlines()) == 1


def test_help_names_it(capsys):
    with pytest.raises(SystemExit) as stop:
        main(["plan", "--help"])
    assert stop.value.code == 0
    assert "TRACE.json" in capsys.readouterr().out
