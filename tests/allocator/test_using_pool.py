"""The allocator by itself."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest

from dynamemo.allocator import root_array, using_pool


def test_numpy_in_a_pool() -> None:
    with using_pool("2MiB", device="cpu") as pool:
        array = np.ones(100_000)
        assert root_array(array)[1] is not None
        with pytest.raises(MemoryError):
            np.ones(1_000_000)
        assert pool.budget_bytes == 2 << 20
    assert array.sum() == 100_000


def test_a_percentage_of_the_machine() -> None:
    with using_pool("1%", device="cpu") as pool:
        assert pool.budget_bytes > 1 << 20


@pytest.mark.parametrize("device", ["tpu", "cuda:99", "cuda:x", 99, -1])
def test_a_device_that_does_not_exist(device: str | int) -> None:
    with pytest.raises(ValueError, match="no device"), using_pool("1MiB", device=device):
        pass


def test_a_budget_that_is_not_a_size() -> None:
    with pytest.raises(ValueError, match="is not a budget"), using_pool("lots", device="cpu"):
        pass


def test_cupy_is_not_imported_with_the_package() -> None:
    script = "import sys, dynamemo.allocator; sys.exit('cupy' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0
