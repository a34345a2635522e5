"""Say which bytes of gradients a backward pass must hold where a trace names none.

A recorder that knows no derivatives sees no gradients. But the backward of a function reads the
gradients of its outputs and makes those of its inputs, so where they have to be follows from the
forward operations. Does not cover temporaries inside a backward, nor second derivatives.
"""

from dynamemo.graph.types import Phase, StorageKind, Trace


def gradient_bytes(trace: Trace) -> list[int]:
    """Compute the bytes of activations' gradients during each operation.

    A gradient is there from the first backward operation that makes or reads it to the last.

    Parameters
    ----------
    trace
        A well-formed trace.

    Returns
    -------
    list of int
        One number an operation; all 0 where the trace names gradients itself.
    """
    change = [0] * (len(trace.operations) + 1)
    nbytes = trace.nbytes_by_id()
    for id, steps in _uses(trace, StorageKind.ACTIVATION).items():
        change[steps[0]] += nbytes[id]
        change[steps[-1] + 1] -= nbytes[id]
    total, totals = 0, []
    for changed in change[:-1]:
        total += changed
        totals.append(total)
    return totals


def parameter_gradient_bytes(trace: Trace) -> int:
    """Compute the bytes of the parameters' gradients, which stay from one iteration to the next."""
    nbytes = trace.nbytes_by_id()
    return sum(nbytes[id] for id in _uses(trace, StorageKind.PARAMETER))


def _uses(trace: Trace, kind: StorageKind) -> dict[int, list[int]]:
    """Find when the gradients of storages of a kind are made or read, by storage, ascending."""
    if any(storage.kind is StorageKind.GRADIENT for storage in trace.storages):
        return {}
    wanted = {storage.id for storage in trace.storages if storage.kind is kind}
    uses: dict[int, list[int]] = {}
    for operation in trace.operations:
        if operation.phase is Phase.BACKWARD and operation.forward_index is not None:
            forward = trace.operations[operation.forward_index]
            for id in wanted.intersection((*forward.inputs, *forward.outputs)):
                uses.setdefault(id, []).append(operation.index)
    return uses
