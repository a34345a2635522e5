"""What the runtime counts while it runs. One mutable object; `Statistics` is its frozen picture."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Counters:
    """Totals since the runtime was entered."""

    #: Bytes whose value was dropped to be recomputed later.
    dropped_bytes: int = 0
    #: Bytes rebuilt by applying functions again.
    recomputed_bytes: int = 0
    #: Applications that rebuilt something.
    recomputed_functions: int = 0
    #: Bytes copied out to a tier, early or under pressure.
    offloaded_bytes: int = 0
    #: Of these: copied out ahead of need, as the iteration before suggested.
    early_bytes: int = 0
    #: Bytes whose block was wanted before their copy had ended: the device waited.
    stalled_bytes: int = 0
    #: Bytes copied back.
    fetched_bytes: int = 0
    #: Bytes whose copy back began before they were read.
    prefetched_bytes: int = 0
    #: Of these: not yet there when they were read.
    awaited_bytes: int = 0
    #: Of these: given up again before anybody read them.
    cancelled_bytes: int = 0
    #: Bytes whose copy back began only when they were read.
    late_bytes: int = 0
    #: Parameters copied because they changed while a recipe needed their old value.
    preserved_bytes: int = 0
    #: Parameters, gradients and optimizer state that were moved together.
    moved_bytes: int = 0
