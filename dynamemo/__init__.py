"""Train unchanged Chainer models inside a byte budget, with bit-equal results.

`import dynamemo` makes `import chainer` work where Chainer's last release no longer does by itself
(NumPy 2, Python 3.12, setuptools 81; see `dynamemo.compat`). `Runtime` is the context manager;
`using_pool` gives the budgeted allocator alone.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dynamemo import compat

compat.install()

from dynamemo.allocator import format_bytes, using_pool  # noqa: E402
from dynamemo.errors import (  # noqa: E402
    DynamemoError,
    InternalError,
    OutOfMemoryError,
    RecomputeError,
    SpillError,
)
from dynamemo.policies import Candidate, Policy, Suggestion, Technique  # noqa: E402
from dynamemo.rules import register_recomputable  # noqa: E402
from dynamemo.statistics import Statistics  # noqa: E402

if TYPE_CHECKING:
    from dynamemo.runtime import Runtime

__all__ = [
    "Candidate",
    "DynamemoError",
    "InternalError",
    "OutOfMemoryError",
    "Policy",
    "RecomputeError",
    "Runtime",
    "SpillError",
    "Statistics",
    "Suggestion",
    "Technique",
    "format_bytes",
    "register_recomputable",
    "using_pool",
]


def __getattr__(name: str) -> Any:
    # Chainer is imported with the first use of the runtime, not by `import dynamemo`.
    if name == "Runtime":
        from dynamemo.runtime import Runtime

        return Runtime
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
