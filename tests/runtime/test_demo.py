"""The demo, as a process and in parts."""

from __future__ import annotations

import dataclasses
import io
import json

import pytest
from rich.console import Console

from dynamemo.demo import Row, find_device, table, verdict
from tests.runtime.processes import run_python

GIB = 1 << 30

GOOD = Row(
    name="30 % of the peak",
    budget_bytes=GIB,
    peak_bytes=GIB,
    seconds_per_iteration=12.345,
    dropped_bytes=GIB,
    recomputed_bytes=GIB,
    offloaded_bytes=GIB,
    accuracy=1.0,
    is_equal=True,
    is_within_budget=True,
)


def test_the_demo_keeps_its_promises(tmp_path):
    done = run_python(
        *("-W", "error", "-m", "dynamemo.cli"),
        *("demo", "--device", "cpu", "--json", "table.json"),
        folder=tmp_path,
    )
    assert (done.stderr, done.returncode) == ("", 0)
    rows = json.loads((tmp_path / "table.json").read_text())
    plain, accounting, half, third, smallest = rows
    assert plain["peak_bytes"] is None
    assert plain["accuracy"] > 0.8
    assert all(row["is_equal"] and row["is_within_budget"] for row in rows)
    assert half["budget_bytes"] == accounting["peak_bytes"] * 50 // 100
    assert third["budget_bytes"] == accounting["peak_bytes"] * 30 // 100
    assert smallest["budget_bytes"] <= third["budget_bytes"]
    for row in (half, third, smallest):
        assert row["name"] in done.stdout
        assert row["peak_bytes"] <= row["budget_bytes"]
        assert row["dropped_bytes"] + row["offloaded_bytes"] > 0
    assert done.stdout.count(" yes ") == 5
    assert max(map(len, done.stdout.splitlines())) <= 100
    assert "\x1b" not in done.stdout


def test_the_table_fits_a_hundred_columns():
    numbers = dict.fromkeys(
        ("budget_bytes", "peak_bytes", "dropped_bytes", "recomputed_bytes", "offloaded_bytes"),
        1024 * GIB - (1 << 27),  # 1023.9 GiB, the widest that there is
    )
    widest = dataclasses.replace(GOOD, **numbers, is_equal=False)
    text = io.StringIO()
    Console(file=text, width=100).print(table([GOOD, widest], "cuda:10"))
    assert max(map(len, text.getvalue().splitlines())) <= 100
    assert "…" not in text.getvalue()
    assert text.getvalue().count("1023.9 GiB") == len(numbers)
    for word in ("recomputed", "bit-equal", "1 GiB", "12.345", "100.0%", "yes", "NO"):
        assert word in text.getvalue()


def test_what_was_not_kept_is_said():
    assert verdict([GOOD, GOOD]) == []
    different = dataclasses.replace(GOOD, is_equal=False)
    above = dataclasses.replace(GOOD, is_within_budget=False, peak_bytes=GIB + 1)
    assert verdict([GOOD, different, above]) == [
        "30 % of the peak: the results differ",
        "30 % of the peak: 1,073,741,825 bytes, above 1,073,741,824",
    ]


def test_the_device_is_the_runtime_s():
    assert find_device("cpu") == "cpu"
    with pytest.raises(ValueError, match="unknown device 'tpu'"):
        find_device("tpu")
