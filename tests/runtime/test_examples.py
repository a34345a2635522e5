"""Each example runs as a process of its own and prints what its first lines say."""

from __future__ import annotations

import re

import pytest

from tests.runtime.processes import ROOT, run_python

#: What each prints, as regular expressions in order.
PRINTED = {
    "trainer.py": [
        r"epoch +main/loss +main/accuracy +validation/main/accuracy",
        r"2 +0\.\d+ +0\.\d+ +0\.9\d+",
        r"budget 6,291,456 bytes, peak [456],\d{3},\d{3}$",
    ],
    "custom_loop.py": [
        *[r"^loss \d\.\d{6}, peak \d+(\.\d)? MiB$"] * 4,
        r"^iterations 4, budget 20 MiB$",
        r"^dropped ",
        r"^recomputed ",
        r"^offloaded ",
        r"^bit-equal: True$",
    ],
    "pool_alone.py": [
        r"^in use: 4 MiB$",
        r"^refused: cannot allocate 8,388,608 bytes: 4,194,304 of 8,388,608 in use",
        r"^after it: 6 MiB$",
        r"^outside: 1\.048576e\+06 1\.048576e\+06$",
    ],
}


def test_every_example_is_here():
    assert sorted(PRINTED) == sorted(path.name for path in (ROOT / "examples").glob("*.py"))


@pytest.mark.parametrize("name", PRINTED)
def test_an_example_prints_what_it_says(name, tmp_path):
    done = run_python("-W", "error", str(ROOT / "examples" / name), folder=tmp_path)
    assert (done.stderr, done.returncode) == ("", 0)
    lines = iter(done.stdout.splitlines())
    for pattern in PRINTED[name]:
        assert any(re.search(pattern, line) for line in lines), f"{pattern!r} in\n{done.stdout}"
    assert list(tmp_path.iterdir()) == []
