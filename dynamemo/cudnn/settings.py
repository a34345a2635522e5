"""What can be set for cuDNN beyond Chainer's own switches.

Chainer's switches (`use_cudnn`, `cudnn_deterministic`, `autotune`, `use_cudnn_tensor_core`,
`set_max_workspace_size`) mean what they always did. Here are those that it has no name for.
"""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from enum import Enum
from types import EllipsisType
from typing import Any

from dynamemo.cudnn.workspace import WorkspacePolicy

__all__ = ["Settings", "Source", "configure", "current", "tensor_core_is_allowed", "using_settings"]

#: Workspace allowed until a program sets it, bytes, for a convolution of any size; with CuPy 7 to
#: 13 it was 8 MiB.
DEFAULT_WORKSPACE_BYTES = 32 << 20
#: Until then a convolution is allowed so many times the bytes that it reads and writes, if that is
#: more. cuDNN 9's fast engines copy these into another layout and want a little more than once
#: that; its heuristics also propose engines that want nine times it.
DEFAULT_WORKSPACE_RATIO = 2
#: And never more than this.
DEFAULT_MAX_WORKSPACE_BYTES = 2 << 30

#: Workspace that is never worth going without, bytes. cuDNN's matrix products, which do the
#: convolutions of 1×1, want 400; what it has without any workspace is more than ten times slower.
NEGLIGIBLE_WORKSPACE_BYTES = 64 << 10


class Source(Enum):
    """Where plans come from first; the other is asked where the first has none."""

    GRAPH = "graph"
    LEGACY = "legacy"


@dataclass(frozen=True, slots=True)
class Settings:
    """One state of the settings."""

    #: Whether float32 convolutions may round their inputs to TF32. None: as ``CUPY_TF32`` says.
    tf32: bool | None = None
    #: Whether what does not always give the same bits may be used, where Chainer allows it.
    nondeterministic: bool = False
    workspace: WorkspacePolicy = WorkspacePolicy.CHAINER
    source: Source = Source.GRAPH
    #: Returns the bytes that a workspace may take, under `WorkspacePolicy.FREE`.
    available_bytes: Callable[[], int] | None = None

    def limit_bytes(self, touched_bytes: int) -> float:
        """Return the most that a workspace may take now.

        Parameters
        ----------
        touched_bytes : int
            What the convolution reads and writes.
        """
        if self.workspace is WorkspacePolicy.CHAINER:
            if _max_workspace_bytes is not None:
                return _max_workspace_bytes
            wanted_bytes = max(DEFAULT_WORKSPACE_BYTES, DEFAULT_WORKSPACE_RATIO * touched_bytes)
            return min(wanted_bytes, DEFAULT_MAX_WORKSPACE_BYTES)
        if self.workspace is WorkspacePolicy.NONE:
            return NEGLIGIBLE_WORKSPACE_BYTES
        if self.workspace is WorkspacePolicy.FREE and self.available_bytes is not None:
            return max(self.available_bytes(), NEGLIGIBLE_WORKSPACE_BYTES)
        return math.inf


def _from_environment() -> Settings:
    return Settings(
        workspace=WorkspacePolicy(os.environ.get("DYNAMEMO_CUDNN_WORKSPACE", "chainer")),
        source=Source(os.environ.get("DYNAMEMO_CUDNN_SOURCE", "graph")),
        nondeterministic=os.environ.get("DYNAMEMO_CUDNN_NONDETERMINISTIC") == "1",
    )


#: What is in force.
current = _from_environment()


def plan_key() -> tuple[object, ...]:
    """Return those settings that decide which plans a convolution has."""
    return current.source.value, current.tf32, current.nondeterministic


#: Whether every run has to choose alike: Chainer's `cudnn_deterministic`, once Chainer is there.
must_repeat: Callable[[], bool] = bool

#: Gives memory free where it can, while a budget holds in this thread; False where none does. What
#: is run must not depend on the budget then: a convolution whose workspace does not fit is an
#: error, and not done by another plan, which would round differently.
make_room: Callable[[], bool] = bool

#: What the program set, None before.
_max_workspace_bytes: int | None = None


def get_max_workspace_size() -> int:
    """Return the bytes of workspace that Chainer allows: the most where nobody has set it."""
    return DEFAULT_MAX_WORKSPACE_BYTES if _max_workspace_bytes is None else _max_workspace_bytes


def set_max_workspace_size(size: int) -> None:
    """Set the bytes of workspace that Chainer allows."""
    global _max_workspace_bytes
    _max_workspace_bytes = size


def configure(
    *,
    tf32: bool | EllipsisType | None = ...,
    nondeterministic: bool | EllipsisType = ...,
    workspace: WorkspacePolicy | str | EllipsisType = ...,
    source: Source | str | EllipsisType = ...,
    available_bytes: Callable[[], int] | EllipsisType | None = ...,
) -> Settings:
    """Change settings for the whole process; what is left out stays.

    Parameters
    ----------
    tf32, nondeterministic, workspace, source, available_bytes
        As in `Settings`; policy and source also by their values.

    Returns
    -------
    Settings
        What was in force before.
    """
    global current
    before = now = current
    if tf32 is not ...:
        now = replace(now, tf32=tf32)
    if nondeterministic is not ...:
        now = replace(now, nondeterministic=nondeterministic)
    if workspace is not ...:
        now = replace(now, workspace=WorkspacePolicy(workspace))
    if source is not ...:
        now = replace(now, source=Source(source))
    if available_bytes is not ...:
        now = replace(now, available_bytes=available_bytes)
    current = now
    return before


@contextlib.contextmanager
def using_settings(**changes: Any) -> Iterator[Settings]:
    """Change settings as `configure` does, for the time of the context, in all threads."""
    global current
    before = configure(**changes)
    try:
        yield current
    finally:
        current = before


def is_tuned(auto_tune: bool) -> bool:
    """Tell whether candidates are timed: what is measured is not the same in every run."""
    return bool(auto_tune) and not must_repeat()


def tensor_core_is_allowed(dtype_char: str, asked: bool | str) -> bool:
    """Tell whether a convolution may use tensor cores.

    Half precision loses nothing by them, double precision neither; single precision is rounded to
    TF32, which has 10 bits after the point.

    Parameters
    ----------
    dtype_char : str
    asked : bool or str
        Chainer's `use_cudnn_tensor_core`: "always", "auto" or "never", or True or False.
    """
    if asked in ("never", False):
        return dtype_char == "d"
    if dtype_char != "f" or asked in ("always", True):
        return True
    if current.tf32 is not None:
        return current.tf32
    return os.environ.get("CUPY_TF32", "0") == "1"
