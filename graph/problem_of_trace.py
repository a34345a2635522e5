"""Find the problem that a recorded iteration poses.

Covers which storages are tensors to decide on, when each is made and read, and how each can be made
again. Does not cover what was not recorded: a step whose own bytes were not measured counts its
transients, what lasts, and the gradients that the trace names, or, where it names none, those that
its backward operations must hold (`gradients`).

A tensor is a storage of kind ACTIVATION or ATTRIBUTE that a forward operation of the trace made.
The first operation that names it as an output or an attribute made it, unless it or an earlier one
read it: then it was there before, and lasts like parameters and training data.

Invariants
----------
1. What comes back is a validated problem; its tensors' keys are storage ids, its steps the
   operations.
2. A rebuild reads only tensors that backward needs anyway, and parameters. It never reads training
   data or what was there before, which a user may have overwritten.
3. A rebuild applies at most `MAX_CHAIN` operations, each of them repeatable.

Source: Wang et al., PPoPP 2018, section 3.4, rebuild from the nearest layer that is kept. We
differ: the chain ends at whatever backward needs, whether that is kept, dropped or moved.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field

from dynamemo.graph.gradients import gradient_bytes, parameter_gradient_bytes
from dynamemo.graph.problem import LinkRate, Problem, Rebuild, Step, Tensor
from dynamemo.graph.types import Operation, Phase, Storage, StorageKind, Trace

#: Most operations that one rebuild applies.
MAX_CHAIN = 16

_DECIDED_KINDS = frozenset({StorageKind.ACTIVATION, StorageKind.ATTRIBUTE})
_LASTING_KINDS = frozenset({StorageKind.PARAMETER, StorageKind.INPUT})


@dataclass(slots=True)
class _Life:
    """Collect when one storage is made and read; mutable while the trace is walked."""

    storage: Storage
    first: int
    last: int
    made_at: int = -1
    last_forward_use: int = -1
    uses: list[int] = field(default_factory=list)
    #: Operations that wrote it without reading it.
    makers: int = 0

    @property
    def is_tensor(self) -> bool:
        return self.made_at >= 0 and self.storage.kind in _DECIDED_KINDS


def problem_of(trace: Trace, outward: LinkRate, inward: LinkRate) -> Problem:
    """Find the problem of a trace.

    Parameters
    ----------
    trace
        A well-formed trace.
    outward, inward
        The link that tensors would be moved over.

    Returns
    -------
    Problem
        Validated.

    Raises
    ------
    ProblemError
        If a measured time is not finite.
    """
    lives = _lives(trace)
    made = sorted(
        (life for life in lives.values() if life.is_tensor),
        key=lambda life: (life.made_at, not life.storage.is_noise),
    )
    index_of = {life.storage.id: index for index, life in enumerate(made)}
    chains = _Chains(trace, lives, index_of)
    lasting_bytes = sum(life.storage.nbytes for life in lives.values() if _lasts(life))
    lasting_bytes += parameter_gradient_bytes(trace)
    own = _own_bytes(trace, lives, lasting_bytes)
    problem = Problem(
        tuple(
            Step(operation.label, operation.elapsed_s or 0.0, own_bytes)
            for operation, own_bytes in zip(trace.operations, own, strict=True)
        ),
        tuple(_tensor(life, chains) for life in made),
        _first_backward(trace),
        outward,
        inward,
        lasting_bytes,
    )
    problem.validate()
    return problem


def _lives(trace: Trace) -> dict[int, _Life]:
    """Walk the trace once; return the life of every storage that an operation names."""
    storages = {storage.id: storage for storage in trace.storages}
    lives: dict[int, _Life] = {}
    for step, operation in enumerate(trace.operations):
        is_forward = operation.phase is Phase.FORWARD
        written = dict.fromkeys((*operation.outputs, *operation.attributes))
        for id in dict.fromkeys(operation.storage_ids()):
            life = lives.get(id)
            if life is None:
                life = lives[id] = _Life(storages[id], step, step)
                if is_forward and id in written and id not in operation.inputs:
                    life.made_at = step
            life.last = step
            life.makers += is_forward and id in operation.outputs and id not in operation.inputs
            if is_forward and not life.uses:
                life.last_forward_use = step
            else:
                life.uses.append(step)
    return lives


def _lasts(life: _Life) -> bool:
    """Tell whether a storage is there at every step, whatever is decided."""
    kind = life.storage.kind
    return kind in _LASTING_KINDS or (kind in _DECIDED_KINDS and not life.is_tensor)


def _own_bytes(trace: Trace, lives: dict[int, _Life], lasting_bytes: int) -> Iterator[int]:
    """Yield each operation's own bytes: as measured, or from what the trace names."""
    change = [0] * (len(trace.operations) + 1)
    for life in lives.values():
        if not life.is_tensor and not _lasts(life):
            change[life.first] += life.storage.nbytes
            change[life.last + 1] -= life.storage.nbytes
    others = 0
    gradients = gradient_bytes(trace)
    for operation, changed, made in zip(trace.operations, change, gradients, strict=False):
        others += changed
        if operation.own_bytes is None:
            yield operation.transient_bytes + lasting_bytes + others + made
        else:
            yield operation.own_bytes


def _first_backward(trace: Trace) -> int:
    """Return the first operation that is not forward, or the number of operations."""
    for operation in trace.operations:
        if operation.phase is not Phase.FORWARD:
            return operation.index
    return len(trace.operations)


def _tensor(life: _Life, chains: "_Chains") -> Tensor:
    """Turn a finished life into a tensor."""
    storage = life.storage
    return Tensor(
        storage.nbytes,
        life.made_at,
        life.last_forward_use,
        tuple(life.uses),
        chains.rebuild(life) if life.uses else None,
        storage.is_movable,
        storage.id,
    )


class _Chains:
    """Find how tensors are made again."""

    def __init__(self, trace: Trace, lives: dict[int, _Life], index_of: dict[int, int]) -> None:
        self._trace = trace
        self._lives = lives
        self._index_of = index_of

    def rebuild(self, life: _Life) -> Rebuild | None:
        """Find how a tensor that backward needs is made again; None where it must not be."""
        if life.storage.is_noise or life.makers > 1:
            return None
        sources: set[int] = set()
        steps = {life.made_at}
        open_steps = [life.made_at]
        while open_steps:
            operation = self._trace.operations[open_steps.pop()]
            if not operation.is_repeatable:
                return None
            for read in self._reads(operation):
                if read.storage.kind is StorageKind.PARAMETER:
                    continue
                if not read.is_tensor:
                    return None
                if read.uses:
                    sources.add(self._index_of[read.storage.id])
                elif read.storage.is_noise or read.makers > 1 or len(steps) >= MAX_CHAIN:
                    return None
                elif read.made_at not in steps:
                    steps.add(read.made_at)
                    open_steps.append(read.made_at)
        return Rebuild(
            sum(_replay_s(self._trace.operations[step]) for step in steps),
            tuple(sorted(sources)),
            self._transient_bytes(sorted(steps), life.storage.id),
        )

    def _reads(self, operation: Operation) -> Iterator[_Life]:
        """Yield what has to be there when an operation is applied again."""
        for id in dict.fromkeys(operation.inputs):
            yield self._lives[id]
        for id in dict.fromkeys(operation.attributes):
            life = self._lives[id]
            if life.storage.is_noise or life.made_at < operation.index:
                yield life

    def _transient_bytes(self, steps: list[int], wanted: int) -> int:
        """Compute the most bytes that a chain needs beside its sources and its result."""
        operations = [self._trace.operations[step] for step in steps]
        last_read = {id: step for step, o in zip(steps, operations, strict=True) for id in o.inputs}
        live: set[int] = set()
        most = 0
        for operation in operations:
            made = (*operation.outputs, *operation.attributes)
            live.update(id for id in made if self._lives[id].made_at == operation.index)
            live.discard(wanted)
            bytes_now = sum(self._lives[id].storage.nbytes for id in live)
            most = max(most, bytes_now + operation.transient_bytes)
            live = {id for id in live if last_read.get(id, -1) > operation.index}
        return most


def _replay_s(operation: Operation) -> float:
    """Return the seconds to apply an operation again; 0 where nothing was measured."""
    seconds = operation.elapsed_s if operation.replay_s is None else operation.replay_s
    return seconds or 0.0
