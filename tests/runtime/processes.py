"""Run Python processes as a user would, away from the checkout."""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys
from typing import Any

ROOT = pathlib.Path(__file__).parents[2]

#: `dynamemo run`, as the installed command does it.
RUN = ("-m", "dynamemo.cli", "run", "--budget", "64MiB", "--device", "cpu")


def run_python(
    *arguments: str, folder: pathlib.Path, variables: dict[str, str] | None = None, **options: Any
) -> subprocess.CompletedProcess[str]:
    """Run the interpreter of the tests in the folder, with this checkout importable."""
    environment = {name: text for name, text in os.environ.items() if name != "PYTHONWARNINGS"}
    environment |= {"PYTHONPATH": str(ROOT), "COLUMNS": "100", **(variables or {})}
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        **options,
    )
