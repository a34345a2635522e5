"""How to compute a dropped storage again: the shortest chain of functions from what is there.

`plan` walks Chainer's own graph from the producer of a storage back to values that are kept
(or can themselves be brought back) and to parameters; `Recipe.run` applies the functions of that
chain to them. Functions are replayed, never links or user code.

What it does not cover: whether dropping is worth it (policies), and where results go (manager).

Invariants kept here:
  1. Inputs of a replay are the very values of the forward: a source that code outside Chainer
     could have written into is refused, a parameter that changes is copied before it does.
  3. A recipe owns all it needs: it survives `unchain_backward` and the death of a model.
  6. A recipe holds its last function weakly: that one may own the hole that owns the recipe.

Source: Wang et al., PPoPP 2018, section 3.4 (recompute from the last checkpoint); here the chain
ends at whatever is there, by measured cost and not by layer type.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from dynamemo import rules
from dynamemo.errors import InternalError
from dynamemo.lazy import holes_of
from dynamemo.storage import Array, Producer, Storage

#: Key of the record of an application in the function's instance dictionary.
RECORD = "_dynamemo_application"

#: Longest chain that is planned; a longer one is never cheaper than the link.
MAX_STEPS = 16


class Signature:
    """What tells two applications of different cost apart; one object for all that are alike.

    Compared by identity, so that it is cheap to file things under.
    """

    __slots__ = ("is_settled", "key", "nbytes", "transient_bytes")

    def __init__(self, key: tuple[Any, ...], nbytes: int) -> None:
        #: Class, shapes and dtypes.
        self.key = key
        #: Bytes read and written, for a cost nobody measured yet.
        self.nbytes = nbytes
        #: Bytes that existed only while it ran, when that was last looked at.
        self.transient_bytes = 0
        #: Its cost was known well enough when that was last looked at.
        self.is_settled = False


class Application:
    """What was noted of one application of a function, kept in the function itself."""

    __slots__ = ("configuration", "given", "on_death", "op_id", "signature")

    def __init__(
        self,
        op_id: int,
        signature: Signature,
        configuration: tuple[Any, ...] | None,
        given: tuple[str, ...],
        on_death: Callable[[int], None],
    ) -> None:
        self.op_id = op_id
        #: What its measured cost is filed under.
        self.signature = signature
        #: The values of `chainer.config` that it ran under; None: nobody looked, so it cannot be
        #: applied again.
        self.configuration = configuration
        #: Attributes with arrays that the function had before it ran, so not made by it.
        self.given = given
        self.on_death = on_death

    @property
    def transient(self) -> int:
        """Bytes that existed only while it ran."""
        return self.signature.transient_bytes

    @property
    def nbytes(self) -> int:
        """Bytes read and written."""
        return self.signature.nbytes

    def __del__(self) -> None:
        self.on_death(self.op_id)


class ParameterVersion:
    """The value that a parameter had for some applications, copied before it changes.

    `array` is the parameter's own array as long as that is unchanged.
    """

    def __init__(self, array: Array, since: int) -> None:
        self.array = array
        self.since = since
        #: First op id that may have seen another value; None while the parameter is unchanged.
        self.until: int | None = None

    def covers(self, op_id: int) -> bool:
        """Tell whether an application with that id saw this value."""
        return self.since <= op_id and (self.until is None or op_id < self.until)


@dataclass(frozen=True, slots=True)
class FromStep:
    """An input made by an earlier step of the recipe."""

    step: int
    output_index: int


@dataclass(frozen=True, slots=True)
class FromNode:
    """An input that a graph node keeps, resident or with a hole."""

    node: Any

    def holes(self) -> list[Any]:
        """Return the hole in the node's data, if it is away."""
        return holes_of(self.node, "_data")

    def array(self) -> Array:
        """Return the node's array."""
        return self.node.__dict__["_data"]


@dataclass(frozen=True, slots=True)
class FromParameter:
    """An input that is a parameter's value at the time of the forward."""

    version: ParameterVersion

    def holes(self) -> list[Any]:
        """Return the hole in the version's copy, if it is away."""
        return holes_of(self.version, "array")

    def array(self) -> Array:
        """Return the version's array."""
        return self.version.array


Source = FromStep | FromNode | FromParameter


@dataclass(frozen=True, slots=True)
class Step:
    """One application to be repeated; `function` is None for the last one (see `Recipe`)."""

    function: Any
    sources: tuple[Source, ...]
    application: Application


#: Applies a copy of a function again: (function, inputs, application, name of the attribute that is
#: wanted or None) gives that attribute of the copy, or the tuple of outputs.
Replay = Callable[[Any, tuple[Array, ...], Application, "str | None"], Any]


class Recipe:
    """The steps that rebuild one storage."""

    __slots__ = ("_attribute", "_last", "_output_index", "steps")

    def __init__(self, steps: tuple[Step, ...], producer: Producer) -> None:
        self.steps = steps
        self._last = producer.function
        self._output_index = producer.output_index
        self._attribute = producer.attribute

    def outer_sources(self) -> list[FromNode | FromParameter]:
        """Return the inputs that come from outside the recipe."""
        return [
            source
            for step in self.steps
            for source in step.sources
            if not isinstance(source, FromStep)
        ]

    def missing(self) -> list[Storage]:
        """Return the storages that have to come back first."""
        return [hole.storage for source in self.outer_sources() for hole in source.holes()]

    def outer_storages(self, storage_of: Callable[[Array], Storage | None]) -> list[Storage]:
        """Return the managed storages that the recipe reads, resident or away."""
        storages = [hole.storage for source in self.outer_sources() for hole in source.holes()]
        for source in self.outer_sources():
            storage = None if source.holes() else storage_of(source.array())
            if storage is not None:
                storages.append(storage)
        return storages

    def label(self) -> str:
        """Name the function whose result this is."""
        function = self._last()
        return "function" if function is None else str(function.label)

    def run(self, replay: Replay) -> Array:
        """Apply the steps; every outer source has to be resident.

        Outer sources are held, and intermediate results too, until they were used last.
        """
        outer = {
            number: [source.array() for source in step.sources if not isinstance(source, FromStep)]
            for number, step in enumerate(self.steps)
        }
        last_use = {
            (source.step, source.output_index): number
            for number, step in enumerate(self.steps)
            for source in step.sources
            if isinstance(source, FromStep)
        }
        values: dict[tuple[int, int], Array] = {}
        for number, step in enumerate(self.steps):
            function = self._last() if step.function is None else step.function
            if function is None:
                raise InternalError("the function that a dropped tensor needs is gone")
            inputs = tuple(
                values[source.step, source.output_index]
                if isinstance(source, FromStep)
                else source.array()
                for source in step.sources
            )
            for key, use in last_use.items():
                if use == number:
                    values.pop(key, None)
            del outer[number]
            is_last = step.function is None
            made = replay(function, inputs, step.application, self._attribute if is_last else None)
            del inputs
            if is_last and self._attribute is not None:
                return made
            if is_last:
                return made[self._output_index]
            for index in range(len(made)):
                if (number, index) in last_use:
                    values[number, index] = made[index]
            del made
        raise InternalError("a recipe without a last step")


#: Gives the version of a parameter that an application saw, or None where it is gone or unsafe.
VersionOf = Callable[[Any, int], ParameterVersion | None]
#: Tells whether the resident array of a node is, and stays, what it was in forward.
IsSafe = Callable[[Any], bool]
#: Tells whether a function fits in memory when it runs again and its own arrays are unchanged.
IsFit = Callable[[Any, Application], bool]


class _Planner:
    """One walk from a producer back to what is there."""

    def __init__(
        self, target: Storage, version_of: VersionOf, is_safe: IsSafe, is_fit: IsFit
    ) -> None:
        self._target = target
        self._is_fit = is_fit
        self._version_of = version_of
        self._is_safe = is_safe
        self._steps: list[Step] = []
        self._number: dict[int, int] = {}
        self._depth = 0

    def plan(self, producer: Producer) -> Recipe | None:
        function = producer.function()
        if function is None or not rules.is_repeatable(function):
            return None
        if producer.attribute is not None and rules.is_noise(function, producer.attribute):
            return None
        if not self._add(function, is_last=True):
            return None
        return Recipe(tuple(self._steps), producer)

    def _add(self, function: Any, *, is_last: bool = False) -> bool:
        """Append the steps that `function` needs, then its own. False where one cannot be.

        Recursion is bounded by MAX_STEPS, not by the depth of the network.
        """
        application = function.__dict__.get(RECORD)
        if application is None or application.configuration is None:
            return False
        if function.inputs is None or len(self._steps) >= MAX_STEPS:
            return False
        if not self._is_fit(function, application):
            return False
        sources = []
        for node in function.inputs:
            source = self._source(node, application)
            if source is None:
                return False
            sources.append(source)
        self._number[id(function)] = len(self._steps)
        kept = None if is_last else function
        self._steps.append(Step(kept, tuple(sources), application))
        return len(self._steps) <= MAX_STEPS

    def _source(self, node: Any, application: Application) -> Source | None:
        if node.creator_node is None:
            version = self._version_of(node, application.op_id)
            if version is not None:
                return FromParameter(version)
        holes = holes_of(node, "_data")
        if holes:
            storage = holes[0].storage
            is_safe = storage.producer is not None and not storage.exposed
            return FromNode(node) if is_safe and storage is not self._target else None
        if node.__dict__.get("_data") is not None:
            return FromNode(node) if self._is_safe(node) else None
        return self._from_creator(node)

    def _from_creator(self, node: Any) -> Source | None:
        function = node.creator_node
        if function is None or not rules.is_repeatable(function):
            return None
        if function.outputs is None or self._depth >= MAX_STEPS:
            return None
        index = next((i for i, ref in enumerate(function.outputs) if ref() is node), None)
        if index is None:
            return None
        if id(function) not in self._number and not self._descend(function):
            return None
        return FromStep(self._number[id(function)], index)

    def _descend(self, function: Any) -> bool:
        self._depth += 1
        try:
            return self._add(function)
        finally:
            self._depth -= 1


def plan(storage: Storage, version_of: VersionOf, is_safe: IsSafe, is_fit: IsFit) -> Recipe | None:
    """Find the steps that rebuild a resident storage, or None where nothing safe does.

    Parameters
    ----------
    storage : Storage
        What is to be dropped. Its own value is never a source.
    version_of : callable
        Maps (leaf node, op id) to the parameter version that the application saw, or None.
    is_safe : callable
        Tells whether a node's data is unchanged since forward and stays so.
    is_fit : callable
        Tells whether a function may be applied again in the memory there is.

    Returns
    -------
    Recipe or None
        The recipe keeps what it needs alive, its last function excepted.
    """
    if storage.producer is None or storage.exposed or not storage.covered:
        return None
    return _Planner(storage, version_of, is_safe, is_fit).plan(storage.producer)


def arrays_in(value: Any) -> tuple[Any, ...]:
    """Return the items of a tuple, or the value itself as the only one."""
    return value if type(value) is tuple else (value,)


def make_dependent(storage: Storage, source: Storage) -> None:
    """Note that the recipe of `storage` reads `source`."""
    if source.dependents is None:
        source.dependents = weakref.WeakSet()
    source.dependents.add(storage)
