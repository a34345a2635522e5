"""Look away while everything fits, and make up for it when memory becomes short.

Notes cost more host time than small functions take, and where nothing is evicted nobody reads them.
So after some iterations without an eviction functions are only remembered, weakly. The first
request that does not fit wakes the runtime: what is alive of them is noted then, in the order in
which it ran, before anything is evicted for that request.

Invariants kept here (numbers of the design's list):
  1. What was not looked at is only copied, never computed again: code outside Chainer may have
     written into it, and parameters may have changed.
  4. While it sleeps a function costs one call and one weak reference more than without a runtime.
  6. What is remembered is bounded by what is alive.
"""

from __future__ import annotations

import weakref
from typing import Any

from dynamemo.manager import MemoryManager

ref = weakref.ref

#: Iterations that are noted before the first sleep: costs are measured in them.
LEAST_ITERATIONS = 4
#: Iterations without an eviction before the runtime sleeps (again).
CALM_ITERATIONS = 2
#: References, dead ones too, from which the list is looked through.
_LEAST_LIMIT = 1024


class Slumber:
    """Whether the runtime sleeps, and what ran meanwhile.

    Parameters
    ----------
    manager : MemoryManager
    """

    def __init__(self, manager: MemoryManager) -> None:
        self._manager = manager
        self.is_asleep = False
        #: Class of the function that runs.
        self.running: type | None = None
        #: Iterations that ended while it slept, as far as an update of parameters ended them.
        self.iterations = 0
        self._functions: list[weakref.ref[Any]] = []
        self._most_references = _LEAST_LIMIT
        self._has_updated = False
        self._looked_at = -1

    def may_begin(self, short_at: int) -> bool:
        """Tell, once an iteration, whether nothing speaks against it.

        Parameters
        ----------
        short_at : int
            The iteration in which something was evicted last; below 0: never.
        """
        manager = self._manager
        iteration = manager.recorder.iterations
        if iteration == self._looked_at:
            return False
        self._looked_at = iteration
        if iteration < LEAST_ITERATIONS or manager.verify or not manager.policy.can_sleep:
            return False
        if short_at >= 0 and iteration - short_at <= CALM_ITERATIONS:
            return False
        return not any(storage.is_away for storage in manager.storages())

    def begin(self) -> None:
        """Fall asleep."""
        self.is_asleep = True

    def note(self, function: Any) -> None:
        """Remember a function that has become part of a graph."""
        if self._has_updated:
            self._has_updated = False
            self.iterations += 1
        functions = self._functions
        functions.append(ref(function))
        if len(functions) > self._most_references:
            functions[:] = [item for item in functions if item() is not None]
            self._most_references = max(_LEAST_LIMIT, 2 * len(functions))

    def note_update(self) -> None:
        """Note that a parameter changes."""
        self._has_updated = True

    @property
    def finished_iterations(self) -> int:
        """Iterations that ended while it slept, the last one too if its update has begun."""
        return self.iterations + self._has_updated

    def end(self) -> list[Any]:
        """Wake up; return the functions that are alive, in the order in which they ran."""
        self.is_asleep = False
        functions, self._functions = self._functions, []
        return [function for item in functions if (function := item()) is not None]
