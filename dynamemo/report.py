"""JSON files that are written after hours of work: whether they can be is known before it."""

from __future__ import annotations

import json
import os
from typing import Any


def check_writable(path: str) -> str:
    """Return the absolute path of a file that can be written; what is in it stays.

    Raises
    ------
    OSError
        If it cannot be written, with a message that names it.
    """
    path = os.path.abspath(path)
    is_new = not os.path.lexists(path)
    try:
        with open(path, "a"):
            pass
    except OSError as error:
        raise OSError(f"cannot write {path!r}: {error.strerror}") from error
    if is_new:
        os.remove(path)
    return path


def write_json(path: str, value: Any) -> None:
    """Write the value to the file, indented."""
    with open(path, "w") as file:
        json.dump(value, file, indent=2)
        file.write("\n")
