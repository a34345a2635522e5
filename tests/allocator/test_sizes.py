"""Budgets as people write them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynamemo.allocator import format_bytes, parse_budget


@pytest.mark.parametrize(
    ("value", "nbytes"),
    [
        (1, 1),
        (np.int64(5000), 5000),
        ("4096", 4096),
        ("4GiB", 4 << 30),
        ("4 gib", 4 << 30),
        ("4g", 4 << 30),
        ("4Gi", 4 << 30),
        ("512 MB", 512 * 10**6),
        ("1.5g", 3 << 29),
        (".5k", 512),
        ("7 B", 7),
        ("60%", 600),
        (" 12.5 % ", 125),
        ("100%", 1000),
    ],
)
def test_accepted(value: Any, nbytes: int) -> None:
    assert parse_budget(value, free_bytes=lambda: 1000) == nbytes


@pytest.mark.parametrize(
    "value",
    [
        "",
        "much",
        "4 GiB/s",
        "-1",
        "1e9",
        "0",
        0,
        -3,
        "0%",
        "120%",
        "4 i",
        True,
        1.5,
        None,
        "%",
        ".",
    ],
)
def test_refused(value: Any) -> None:
    with pytest.raises(ValueError, match=r"is not a budget.*4GiB.*60%"):
        parse_budget(value, free_bytes=lambda: 1000)


def test_a_percentage_leaves_the_reserve() -> None:
    assert parse_budget("50%", free_bytes=lambda: 1000, reserve_bytes=200) == 400
    with pytest.raises(ValueError, match="is not a budget"):
        parse_budget("50%", free_bytes=lambda: 100, reserve_bytes=200)


@given(st.integers(1, 1 << 50))
def test_formatted_sizes_read_back_closely(nbytes: int) -> None:
    read = parse_budget(format_bytes(nbytes), free_bytes=lambda: 0)
    assert abs(read - nbytes) <= 0.05 * nbytes + 1
