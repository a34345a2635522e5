"""What a result was measured on: machine, versions, commit."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import subprocess


def describe() -> dict[str, str | int]:
    """Return the machine, the versions of what matters, and the commit (with + for changes)."""
    facts: dict[str, str | int] = {
        "python": platform.python_version(),
        "machine": platform.machine(),
        "cores": os.cpu_count() or 0,
        "commit": _commit(),
    }
    for package in ("chainer", "numpy", "cupy-cuda13x", "cupy-cuda12x", "torch"):
        try:
            facts[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    facts["gpu"] = _run("nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader")
    return facts


def _commit() -> str:
    commit = _run("git", "rev-parse", "--short", "HEAD")
    return commit + ("+" if commit and _run("git", "status", "--porcelain") else "")


def _run(*command: str) -> str:
    try:
        result = subprocess.run(command, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return ""
    return result.stdout.strip()
