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
    #: Bytes copied out to a tier.
    offloaded_bytes: int = 0
    #: Bytes copied back.
    fetched_bytes: int = 0
    #: Parameters copied because they changed while a recipe needed their old value.
    preserved_bytes: int = 0
