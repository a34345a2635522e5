"""State what has to be decided: steps, the tensors they make and read, what bringing back costs.

Covers the question (`Problem`) and the three answers for a tensor (`Technique`). Does not cover how
a problem is found (`problem_of_trace`), what an answer costs (`forecast`), or how one is chosen
(`planner`).

A tensor is kept from the step that makes it to its last use. One that backward reads may be away in
between, once: from the end of its last use in forward to its first use in backward, or to the first
rebuild of another tensor that reads it. A rebuild in front of a step counts as a use of its sources
at that step.

A step's workspace is not a choice yet. It would be one more tuple of (own_bytes, elapsed_s)
alternatives in `Step` and one index a step beside the techniques.

Invariants
----------
1. Every value is immutable.
2. In a validated problem tensors are listed in the order of `made_at`, and the sources of a rebuild
   are listed before what is rebuilt from them: no chain of rebuilds has a cycle.
"""

from collections.abc import Hashable
from dataclasses import dataclass
from enum import IntEnum
from itertools import pairwise
from math import inf

from dynamemo.graph.errors import GraphError


class ProblemError(GraphError, ValueError):
    """Report a problem, or techniques for one, that is not well formed."""


class Technique(IntEnum):
    """Tell what happens to a tensor between its last use in forward and its first in backward."""

    #: It stays.
    KEEP = 0
    #: It is dropped and rebuilt.
    RECOMPUTE = 1
    #: It is copied out and brought back.
    OFFLOAD = 2


@dataclass(frozen=True, slots=True)
class Rebuild:
    """Describe how applying functions again makes a tensor.

    Attributes
    ----------
    elapsed_s
        Seconds on the compute stream.
    sources
        Indices of the tensors that must be resident while it runs.
    transient_bytes
        Bytes needed meanwhile beside the sources and the result.
    """

    elapsed_s: float
    sources: tuple[int, ...] = ()
    transient_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Tensor:
    """Describe one tensor that forward makes.

    Attributes
    ----------
    nbytes
        Requested bytes.
    made_at
        The step that makes it.
    last_forward_use
        The last step that reads it before its first backward use; `made_at` where none does.
    uses
        The later steps that read it, ascending; empty where backward does not need it.
    rebuild
        How it is made again; None where that must not be.
    is_movable
        Whether it may be copied out.
    key
        The caller's own name for it, hashable.
    """

    nbytes: int
    made_at: int
    last_forward_use: int
    uses: tuple[int, ...] = ()
    rebuild: Rebuild | None = None
    is_movable: bool = False
    key: Hashable = None


@dataclass(frozen=True, slots=True)
class Step:
    """Describe one run of a function.

    Attributes
    ----------
    label
        Its name, for people.
    elapsed_s
        Seconds on the compute stream.
    own_bytes
        The most bytes in use while it runs beside the problem's tensors: parameters, training data,
        gradients, temporaries, workspaces.
    """

    label: str
    elapsed_s: float
    own_bytes: int = 0


@dataclass(frozen=True, slots=True)
class LinkRate:
    """Describe one direction of the link to where tensors are moved.

    Attributes
    ----------
    bytes_per_s
        Bandwidth.
    latency_s
        Seconds of an empty copy.
    """

    bytes_per_s: float
    latency_s: float = 0.0

    def seconds(self, nbytes: int) -> float:
        """Compute the seconds of one copy."""
        return self.latency_s + nbytes / self.bytes_per_s


@dataclass(frozen=True, slots=True)
class Problem:
    """Hold one iteration as the planner sees it.

    Attributes
    ----------
    steps
        In order of execution.
    tensors
        In the order of `Tensor.made_at`.
    first_backward
        Index of the first backward step; the number of steps where there is none.
    outward, inward
        The link, each way; both directions work at once.
    lasting_bytes
        Bytes that are there at every step (part of each `Step.own_bytes`): parameters and training
        data. They do not grow with the batch in `scaled`.
    """

    steps: tuple[Step, ...]
    tensors: tuple[Tensor, ...]
    first_backward: int
    outward: LinkRate
    inward: LinkRate
    lasting_bytes: int = 0

    def validate(self) -> None:
        """Check that the problem is well formed.

        Raises
        ------
        ProblemError
            If bytes, seconds or rates are negative or not finite, steps of a tensor are out of
            order or do not exist, tensors are not listed in the order of `made_at`, or a rebuild
            reads a tensor that is not listed before.
        """
        if not 0 <= self.first_backward <= len(self.steps):
            raise ProblemError(
                f"first_backward is {self.first_backward}, expected 0 to {len(self.steps)}"
            )
        if self.lasting_bytes < 0:
            raise ProblemError(f"{self.lasting_bytes} lasting bytes, expected 0 or more")
        for index, step in enumerate(self.steps):
            if step.own_bytes < 0 or not 0.0 <= step.elapsed_s < inf:
                raise ProblemError(f"step {index} has negative bytes or unlikely seconds: {step}")
        for link in (self.outward, self.inward):
            if not link.bytes_per_s > 0.0 or not 0.0 <= link.latency_s < inf:
                raise ProblemError(f"{link} is not a link: expected a bandwidth above 0")
        for index, tensor in enumerate(self.tensors):
            self._check_tensor(index, tensor)

    def validate_techniques(self, techniques: tuple[Technique, ...]) -> None:
        """Check that each tensor has a technique that it allows; raises ProblemError.

        A tensor without uses may have any: it is never away.
        """
        if len(techniques) != len(self.tensors):
            raise ProblemError(f"{len(techniques)} techniques for {len(self.tensors)} tensors")
        for index, (tensor, technique) in enumerate(zip(self.tensors, techniques, strict=True)):
            if tensor.uses and not _allows(tensor, technique):
                raise ProblemError(f"tensor {index} ({tensor.key!r}) does not allow {technique!r}")

    def _check_tensor(self, index: int, tensor: Tensor) -> None:
        """Check one tensor; raises ProblemError."""
        if tensor.nbytes < 0:
            raise ProblemError(f"tensor {index} has {tensor.nbytes} bytes, expected 0 or more")
        moments = (tensor.made_at, tensor.last_forward_use, *tensor.uses)
        is_ascending = all(a < b for a, b in pairwise(moments[1:]))
        if not 0 <= moments[0] <= moments[1] or not is_ascending or moments[-1] >= len(self.steps):
            raise ProblemError(
                f"tensor {index} is made, last used in forward and used at steps {moments}: not in "
                f"order, or not among {len(self.steps)} steps"
            )
        if tensor.uses and tensor.uses[0] < self.first_backward:
            raise ProblemError(f"tensor {index} has a backward use at step {tensor.uses[0]}")
        if index and self.tensors[index - 1].made_at > tensor.made_at:
            raise ProblemError(f"tensor {index} is made before the tensor that is listed before it")
        if tensor.rebuild is not None:
            self._check_rebuild(index, tensor, tensor.rebuild)

    def _check_rebuild(self, index: int, tensor: Tensor, rebuild: Rebuild) -> None:
        """Check how one tensor is made again; raises ProblemError."""
        if rebuild.transient_bytes < 0 or not 0.0 <= rebuild.elapsed_s < inf:
            raise ProblemError(f"tensor {index} has negative bytes or unlikely seconds: {rebuild}")
        for source in rebuild.sources:
            if not 0 <= source < index:
                raise ProblemError(
                    f"tensor {index} would be rebuilt from tensor {source}, which is not listed "
                    "before it"
                )


def _allows(tensor: Tensor, technique: Technique) -> bool:
    """Tell whether a technique may be chosen for a tensor."""
    if technique is Technique.RECOMPUTE:
        return tensor.rebuild is not None
    return technique is Technique.KEEP or tensor.is_movable
