"""Which of a convolution's plans is run: the fastest whose workspace fits what is free.

Pure bookkeeping over numbers: no cuDNN, no device. A `Chooser` belongs to one convolution (its
shapes, types and direction) and knows its candidates in the order of cuDNN's heuristics, with the
seconds that were measured, if any.

1. A choice is a function of the candidates, what was measured, and the limit: never of the call.
2. Once made, a choice stays until the limit no longer admits it, or somebody asks to reconsider:
   a convolution that is done again, in the next iteration or to rebuild its output, is done alike.
3. A choice never exceeds the limit where any candidate meets it; where none does, it is the
   candidate with the least workspace.

*Source*: the dynamic workspace allocation of SuperNeurons (Wang et al. 2018, section 3.5 and
figure 12). There the choice is made at every call; here it stays (2), because another algorithm
rounds differently and results have to be the same.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

__all__ = ["Candidate", "Chooser", "WorkspacePolicy"]

#: Candidates that are timed at most: cuDNN lists them by expected speed.
MEASURED_AT_MOST = 8


class WorkspacePolicy(Enum):
    """What limits the workspace of a convolution."""

    #: Chainer's `set_max_workspace_size`.
    CHAINER = "chainer"
    #: What the pool has free: `Settings.available_bytes`, or next to nothing.
    FREE = "free"
    #: Next to no workspace (`settings.NEGLIGIBLE_WORKSPACE_BYTES`), where any plan does without.
    NONE = "none"
    #: No limit.
    FASTEST = "fastest"


@dataclass(frozen=True, slots=True)
class Candidate:
    """One way to do a convolution."""

    #: Names the plan, the same in every run on the same device and version of cuDNN.
    tag: str
    #: Bytes of scratch memory.
    workspace_bytes: int


class Chooser:
    """The candidates of one convolution, and which is in force.

    Parameters
    ----------
    candidates : sequence of Candidate
        By expected speed, fastest first; at least one.
    """

    def __init__(self, candidates: Sequence[Candidate]) -> None:
        if not candidates:
            raise ValueError("no candidates to choose from")
        self.candidates = list(candidates)
        #: Index of the candidate in force, None before the first choice.
        self.assigned: int | None = None
        #: How often a choice was made.
        self.choices = 0
        self._seconds: dict[int, float] = {}
        self._rejected: set[int] = set()

    def choose(self, limit_bytes: float) -> int:
        """Return the index of the candidate to run, and keep it in force.

        Raises
        ------
        LookupError
            If every candidate was rejected.
        """
        if self.assigned is not None and self._admits(self.assigned, limit_bytes):
            return self.assigned
        best = self.best(limit_bytes)
        if best != self.assigned:
            self.assigned = best
            self.choices += 1
        return best

    def best(self, limit_bytes: float) -> int:
        """Return the index of the fastest candidate within the limit; change nothing."""
        usable = self.usable()
        fitting = [index for index in usable if self._admits(index, limit_bytes)]
        if fitting:
            return min(fitting, key=self._expected)
        if not usable:
            raise LookupError("every candidate was rejected")
        return min(usable, key=lambda index: (self.candidates[index].workspace_bytes, index))

    def to_measure(self, limit_bytes: float) -> tuple[int, ...]:
        """Return the candidates worth timing: the first few within the limit, and the leanest.

        Those that were timed already are not among them.
        """
        fitting = [index for index in self.usable() if self._admits(index, limit_bytes)]
        first, rest = fitting[:MEASURED_AT_MOST], fitting[MEASURED_AT_MOST:]
        if rest:
            leanest = min(fitting, key=lambda i: (self.candidates[i].workspace_bytes, i))
            if leanest in rest:
                first[-1] = leanest
        return tuple(index for index in first if index not in self._seconds)

    def note_seconds(self, index: int, seconds: float) -> None:
        """Take note of the device time of a candidate."""
        self._seconds[index] = seconds

    def note_workspace(self, index: int, workspace_bytes: int) -> None:
        """Correct a candidate's workspace by what its built plan says."""
        self.candidates[index] = Candidate(self.candidates[index].tag, workspace_bytes)

    def reject(self, index: int) -> None:
        """Leave a candidate out from now on: it cannot be built or run."""
        self._rejected.add(index)
        if self.assigned == index:
            self.assigned = None

    def reconsider(self) -> None:
        """Let the next call choose anew."""
        self.assigned = None

    def seconds(self, index: int) -> float | None:
        """Return the measured device time of a candidate, None where it was not timed."""
        return self._seconds.get(index)

    def validate(self) -> None:
        """Check that the candidate in force is usable."""
        assert self.assigned is None or self.assigned in self.usable()

    def usable(self) -> list[int]:
        """Return the indices of the candidates that were not rejected."""
        return [i for i in range(len(self.candidates)) if i not in self._rejected]

    def _admits(self, index: int, limit_bytes: float) -> bool:
        return self.candidates[index].workspace_bytes <= limit_bytes

    def _expected(self, index: int) -> tuple[float, int]:
        """Measured ones come first, by time; the others in the order of the heuristics."""
        return self._seconds.get(index, math.inf), index
