"""What is told about the convolutions of a process: which plan each got, and how much was done."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from dynamemo.allocator import format_bytes

__all__ = ["Assignment", "Counters", "format_table"]


@dataclass(slots=True)
class Counters:
    """How often what was done. In a steady loop only `runs` grows."""

    #: Convolutions enqueued, in any direction.
    runs: int = 0
    #: Convolutions whose plans were listed.
    prepared: int = 0
    #: Plans built.
    builds: int = 0
    #: Plans timed.
    measured: int = 0


@dataclass(frozen=True, slots=True)
class Assignment:
    """The plan in force of one convolution, beside the fastest known one."""

    #: Shapes, strides and the like.
    label: str
    #: "forward", "data" or "filter".
    direction: str
    #: How often it ran.
    calls: int
    tag: str
    workspace_bytes: int
    #: Device time, None where it was not measured.
    elapsed_s: float | None
    fastest_tag: str
    fastest_workspace_bytes: int
    #: What the leanest plan wants.
    least_workspace_bytes: int
    fastest_s: float | None
    #: How often the plan was chosen; more than once where a limit became too low for it.
    choices: int


def format_table(assignments: Sequence[Assignment]) -> str:
    """Return the assignments as text: the workspace given, and the one the fastest plan wants.

    *Source*: figure 12 of SuperNeurons (Wang et al. 2018).
    """
    head = ("convolution", "direction", "calls", "assigned", "fastest", "µs", "fastest µs")
    rows = [head, *(_row(assignment) for assignment in assignments)]
    widths = [max(len(row[place]) for row in rows) for place in range(len(head))]
    return "\n".join(
        "  ".join(
            text.ljust(width) if place < 2 else text.rjust(width)
            for place, (text, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    )


def _row(assignment: Assignment) -> tuple[str, ...]:
    return (
        assignment.label,
        assignment.direction,
        str(assignment.calls),
        format_bytes(assignment.workspace_bytes),
        format_bytes(assignment.fastest_workspace_bytes),
        _microseconds(assignment.elapsed_s),
        _microseconds(assignment.fastest_s),
    )


def _microseconds(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds * 1e6:.0f}"
