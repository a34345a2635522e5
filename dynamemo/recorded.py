"""Complete the recorder's trace with what the runtime knows of functions and of memory.

The recorder knows operations and storages. Looked up here, when a trace is asked for and never
while functions run: seconds as measured by signature, what is noise, and what may be copied out.

What it does not cover: own bytes of operations as measured, and seconds of a backward unless they
were filed
(else `Foresight` takes them from the forward).
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from dynamemo import rules
from dynamemo.graph import Operation, Phase, Storage, StorageKind, Trace
from dynamemo.recipe import Signature

if TYPE_CHECKING:
    from dynamemo.manager import MemoryManager

_MOVABLE = frozenset({StorageKind.ACTIVATION, StorageKind.ATTRIBUTE})


def recorded_trace(manager: MemoryManager) -> Trace:
    """Return the last complete iteration as one can plan it.

    Parameters
    ----------
    manager : MemoryManager
        Of the runtime.

    Returns
    -------
    Trace
        Empty before the first iteration was complete.
    """
    trace = manager.recorder.trace()
    signatures = manager.recorder.traced_signatures()
    noise = _noise(trace, signatures)
    return Trace(
        tuple(_completed_storage(manager, storage, noise) for storage in trace.storages),
        tuple(
            _completed(manager, operation, signature)
            for operation, signature in zip(trace.operations, signatures, strict=True)
        ),
    )


def _completed(manager: MemoryManager, operation: Operation, signature: Any) -> Operation:
    """Add seconds, where the function was measured, and the temporaries of a backward.

    The latter are taken to be those of its forward: a convolution's workspaces are much alike.
    """
    if operation.phase is not Phase.FORWARD and isinstance(signature, Signature):
        operation = replace(operation, transient_bytes=signature.transient_bytes)
    if not manager.costs.is_measured(signature):
        return operation
    if operation.phase is Phase.FORWARD:
        return replace(operation, elapsed_s=manager.costs.estimate(signature, nbytes=0))
    return replace(operation, elapsed_s=manager.foresight.backward_s_of(signature))


def _completed_storage(manager: MemoryManager, storage: Storage, noise: set[int]) -> Storage:
    """Add whether the runtime may copy a storage, and whether it was drawn."""
    is_movable = storage.kind in _MOVABLE and storage.nbytes >= manager.min_bytes
    return replace(storage, is_movable=is_movable, is_noise=storage.id in noise)


def _noise(trace: Trace, signatures: tuple[Any, ...]) -> set[int]:
    """Find the attributes that functions drew: all that a class which draws has made."""
    known: set[int] = set()
    noise: set[int] = set()
    for operation, signature in zip(trace.operations, signatures, strict=True):
        traits = _traits(signature)
        if traits is not None and traits.noise:
            noise.update(set(operation.attributes) - known)
        known.update(operation.storage_ids())
    return noise


def _traits(signature: Any) -> rules.Traits | None:
    """Return what is known of the class of a signature; None where nobody looked."""
    cls = signature.key[0] if isinstance(signature, Signature) else None
    return rules.traits_of_class(cls) if isinstance(cls, type) else None
