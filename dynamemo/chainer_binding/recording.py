"""Read what an application of a function left behind, and tell the manager.

Which arrays the function made, which its backward will read, which are its own attributes, which
belong to parameters; each with the places that refer to it.

What it does not cover: ChainerX and iDeep arrays, arrays in lists that an attribute holds.
"""

from __future__ import annotations

import math
import sys
import weakref
from typing import Any

import chainer

from dynamemo import rules
from dynamemo.chainer_binding.replay import Replayer
from dynamemo.chainer_binding.sampling import Measurement, Sampler
from dynamemo.device import Device
from dynamemo.graph import StorageKind
from dynamemo.lazy import (
    AttributeSlot,
    VariableBox,
    VariableSlot,
    can_have_holes,
    data_of,
    original_class,
)
from dynamemo.manager import MIN_BYTES, MemoryManager
from dynamemo.parameters import ParameterGuards
from dynamemo.recipe import RECORD, Application, ParameterVersion, Signature
from dynamemo.storage import Array, Producer, Storage, View

#: A storage, its array, and which output or attribute of the function it is.
_Made = tuple[Storage, Array, "int | None", "str | None"]

#: Signatures known at once.
MAX_SIGNATURES = 65_536

#: Dead references that a list may hold before it is looked through.
_LEAST_LIMIT = 1024

#: Types of attributes that are no arrays and hold none, looked at first.
_PLAIN = frozenset({type(None), bool, int, float, str, list, dict, type(len)})

#: Attributes of a FunctionNode that are the graph's and not the function's own.
_GRAPH_ATTRIBUTES = frozenset(
    {
        RECORD,
        "inputs",
        "outputs",
        "rank",
        "stack",
        "lazy_grad_sum",
        "_input_indexes_to_retain",
        "_output_indexes_to_retain",
        "_input_layouts",
        "_output_layouts",
        "_output_count",
        "_local_function_hooks",
        "_retained_output_data",
        "_function",
        "_weak_function",
    }
)


class Recording:
    """Tell the manager what functions did.

    Storages, who made them and what the coming backward reads are noted at once. The places that
    refer to arrays matter only to evictions, and most programs have none: they are found again by
    `register_places`, from the functions themselves.

    Parameters
    ----------
    device : Device
        Whose arrays are managed.
    replayer : Replayer
        Knows the configuration that functions run under.
    """

    def __init__(self, device: Device, replayer: Replayer) -> None:
        self.manager: MemoryManager
        self.sampler: Sampler
        self.guards = ParameterGuards(
            device,
            next_op_id=lambda: self.last_op_id + 1,
            preserve=self.preserve,
            share=self.share,
        )
        #: Id of the newest application.
        self.last_op_id = 0
        self._device = device
        self._owns = device.owns
        self._block_of = device.block_of
        self._replayer = replayer
        self._views = _Shared()
        self._signatures: dict[tuple[Any, ...], Signature] = {}
        #: What has places that the manager was not told of yet: boxes of outputs, functions, and
        #: variables without a graph.
        self._boxes = WeakList()
        self._functions = WeakList()
        self._loose = WeakList()

    def attach(self, manager: MemoryManager) -> None:
        """Name the manager that is told."""
        self.manager = manager
        #: Arrays that are shorter are never evicted, so only values that others are made from are
        #: followed: parameters' and functions' own small arrays are not.
        self._least_bytes = 1 if manager.policy.is_eager else MIN_BYTES
        self._adopt_block = manager.adopt_block
        # Bound once: they are kept by every application and box.
        self._forget_operation = manager.forget_operation
        self._expose = manager.expose
        self.sampler = Sampler(self._device, manager.pool, manager.costs)

    def record(
        self,
        function: Any,
        inputs: Any,
        outputs: Any,
        before: dict[str, Any],
        measurement: Measurement | None,
    ) -> None:
        """Note an application that has just returned.

        Parameters
        ----------
        function, inputs, outputs
            The function node, what it was applied to, and its output variables.
        before : dict
            The function's attributes before it ran.
        measurement : Measurement, optional
            What was measured of it.
        """
        manager = self.manager
        made: list[_Made] = []
        output_ids = self._note_outputs(function, outputs, made, inputs)
        input_ids, retained_ids = self._note_inputs(function)
        if function._output_indexes_to_retain:
            retained_ids += self._note_retained_outputs(function, made)
        attribute_ids, given = self._note_attributes(function, made, before)
        cls = original_class(function)
        signature = self._signature(cls, function, outputs)
        self.sampler.file(cls, signature, measurement)
        self.last_op_id = op_id = manager.recorder.forward(
            function.label,
            tuple(input_ids),
            tuple(output_ids),
            retained=tuple(retained_ids),
            attributes=tuple(attribute_ids),
            transient_bytes=signature.transient_bytes,
        )
        function.__dict__[RECORD] = Application(
            op_id, signature, self._replayer.configuration(), given, self._forget_operation
        )
        if made:
            self._note_made(function, made, op_id)
        self._functions.append(function)
        manager.ran_forward(op_id, signature, [entry[0] for entry in made])

    def _note_made(self, function: Any, made: list[_Made], op_id: int) -> None:
        is_checkpoint = rules.is_checkpoint(function)
        for storage, array, index, attribute in made:
            if storage.block is None or storage.is_leaf:
                continue
            view = self._views.shared(self._device.view_of(array, storage.block))
            producer = Producer(function, op_id, view, output_index=index, attribute=attribute)
            storage.producer = producer
            storage.is_checkpoint = is_checkpoint and index is not None
            storage.covered = view.offset == 0 and array.nbytes == storage.nbytes
            if self.manager.verify and storage.covered:
                storage.digest = self._device.digest(array)

    def _signature(self, cls: type, function: Any, outputs: Any) -> Signature:
        parts: list[Any] = [cls]
        for node in function.inputs:
            parts += (node.shape, node.dtype.char)
        parts.append(None)
        for output in outputs:
            node = output._node
            parts += (node.shape, node.dtype.char)
        key = tuple(parts)
        signature = self._signatures.get(key)
        if signature is None:
            if len(self._signatures) >= MAX_SIGNATURES:
                self._signatures.clear()
            nodes = [*function.inputs, *(output._node for output in outputs)]
            nbytes = sum(math.prod(node.shape) * node.dtype.itemsize for node in nodes)
            signature = self._signatures[key] = Signature(key, nbytes)
        return signature

    def note_loose_outputs(self, outputs: Any) -> None:
        """Have outputs without a graph managed too: backward's gradients wait in variables.

        Nothing can be rebuilt from a gradient, so who reads it does not matter, and it is enough to
        find it when memory is short. Of an array that is managed already every reader is watched.
        """
        for output in outputs:
            array = output._data[0]
            block = self._block_of(array) if self._owns(array) else None
            if block is None:
                continue
            if block.owner is None:
                self._loose.append(output)
                continue
            storage = self._adopt_block(block, StorageKind.GRADIENT)
            if storage is not None:
                self.box(output, storage)

    # -- places ------------------------------------------------------------------------

    def register_places(self) -> None:
        """Tell the manager of all places that refer to arrays it knows."""
        self.sampler.settle()
        for box in self._boxes.take():
            storage = box.subject
            if type(storage) is not Storage or box.hole is not None:
                continue
            if self.manager.storage_of(box.peek()) is storage:
                storage.add_slot(VariableSlot(box))
                self._register_node(box.variable())
        for function in self._functions.take():
            self._register_function(function)
        for variable in self._loose.take():
            self._register_loose(variable)

    def _register_function(self, function: Any) -> None:
        nodes = list(function.inputs or ())  # None: the graph was cut there
        nodes += [node for ref in function.outputs or () if (node := ref()) is not None]
        for node in nodes:
            self._register(node, "_data", None, data_of(node))
        if can_have_holes(function):
            retained = function.__dict__.get("_retained_output_data") or ()
            for position, array in enumerate(retained):
                self._register(function, "_retained_output_data", position, array)
        for owner in attribute_owners(function):
            for name, value in list(owner.__dict__.items()):
                if name in _GRAPH_ATTRIBUTES:
                    continue
                if type(value) is tuple:
                    for position, array in enumerate(value):
                        self._register(owner, name, position, array)
                else:
                    self._register(owner, name, None, value)

    def _register_node(self, variable: Any) -> None:
        """Register the array that a variable's node retains: it outlives the functions."""
        node = None if variable is None else variable.__dict__.get("_node")
        if node is not None:
            self._register(node, "_data", None, data_of(node))

    def _register(self, owner: Any, name: str, index: Any, array: Any) -> None:
        if type(array) in _PLAIN or not self._owns(array):
            return
        storage = self.manager.storage_of(array)
        if storage is not None:
            storage.add_slot(AttributeSlot(owner, name, index))

    def _register_loose(self, variable: Any) -> None:
        data = variable.__dict__.get("_data")
        # More references than the variable's, the name's and the argument's: a copy shares the list
        # and has to go on sharing it.
        if type(data) is not list or sys.getrefcount(data) > 3 or not self._owns(data[0]):
            return
        storage = self.manager.adopt(data[0], StorageKind.GRADIENT)
        if storage is not None:
            variable.__dict__["_data"] = box = self._box(variable, data[0], storage)
            storage.add_slot(VariableSlot(box))

    def box(self, output: Any, storage: Storage) -> None:
        """Put a variable's array into a box, a place of the storage."""
        data = output._data
        if type(data) is not VariableBox:
            data = output._data = self._box(output, data[0], storage)
        self._boxes.append(data)

    def _box(self, output: Any, array: Array, storage: Storage) -> VariableBox:
        return VariableBox(array, storage, self._expose, output)

    def boxes(self) -> list[VariableBox]:
        """Return the boxes that are not registered yet, and register none."""
        return self._boxes.take()

    def note_lasting(self) -> None:
        """Let gradients and optimizer state of parameters be copied out between two uses."""
        for parameter in self.guards.parameters():
            self._register_node(parameter)
            self._note_place(parameter, "_grad", None, parameter.__dict__.get("_grad"))
            rule = parameter.__dict__.get("update_rule")
            state = None if rule is None else rule.__dict__.get("_state")
            if type(state) is dict:
                for key, array in state.items():
                    self._note_place(rule, "_state", key, array)

    def preserve(self, version: ParameterVersion) -> None:
        """Give a version a copy of its own, and have that managed."""
        version.array = version.array.copy(order="K")
        self.manager.counters.preserved_bytes += version.array.nbytes
        storage = self.manager.adopt(version.array, StorageKind.PARAMETER)
        if storage is not None:
            storage.is_leaf = True
        self.share(version)

    def share(self, version: ParameterVersion) -> None:
        """Register a version as one more place of its array."""
        storage = self.manager.storage_of(version.array)
        if storage is not None:
            storage.add_slot(AttributeSlot(version, "array"))

    def _note_place(self, owner: Any, name: str, index: Any, array: Any) -> None:
        if array is not None and self._owns(array) and array.nbytes >= self._least_bytes:
            storage = self.manager.adopt(array, StorageKind.WORKSPACE)
            if storage is not None:
                storage.add_slot(AttributeSlot(owner, name, index))

    # -- one application ---------------------------------------------------------------

    def _note_outputs(
        self, function: Any, outputs: Any, made: list[_Made], inputs: Any
    ) -> list[int]:
        ids = []
        for index, output in enumerate(outputs):
            array = output._data[0]
            if not self._owns(array):
                continue
            if array.base is not None:
                self._note_view_of_leaf(array, inputs)
            storage = self._adopt(array, StorageKind.ACTIVATION, made, index, None)
            if storage is not None:
                ids.append(storage.storage_id)
                self.box(output, storage)
        return ids

    def _note_view_of_leaf(self, array: Array, inputs: Any) -> None:
        """Mark a view of memory that no function made: it shares its user's writes."""
        if self.manager.storage_of(array) is not None:
            return
        block = self._device.block_of(array)
        for item in inputs:
            source = item.raw_array if isinstance(item, chainer.Variable) else item
            if block is not None and self._device.block_of(source) is block:
                storage = self.manager.adopt(array, StorageKind.INPUT)
                if storage is not None:
                    storage.is_leaf = True

    def _adopt(
        self,
        array: Array,
        kind: StorageKind,
        made: list[_Made],
        index: int | None,
        attribute: str | None,
    ) -> Storage | None:
        """Have an array of ours managed; note it as made here if nobody made it before."""
        block = self._block_of(array)
        storage = None if block is None else self._adopt_block(block, kind)
        if storage is not None and storage.producer is None and not storage.is_leaf:
            for entry in made:
                if entry[0] is storage:
                    return storage
            made.append((storage, array, index, attribute))
        return storage

    def _note_inputs(self, function: Any) -> tuple[list[int], list[int]]:
        ids: list[int] = []
        retained_ids: list[int] = []
        retained = function._input_indexes_to_retain or ()
        for index, node in enumerate(function.inputs):
            is_leaf = node._creator_node is None
            if is_leaf:
                owner = node.get_variable_or_none()
                if isinstance(owner, chainer.Parameter):
                    storage = self._watch(owner)
                    if storage is not None:
                        ids.append(storage.storage_id)
                        if index in retained:
                            retained_ids.append(storage.storage_id)
                    continue
            array = data_of(node)
            if array is None or not self._owns(array):
                continue
            block = self._block_of(array)
            storage = None if block is None else self._adopt_block(block, StorageKind.INPUT)
            if storage is None:
                continue
            if is_leaf and storage.producer is None:
                storage.is_leaf = True
            ids.append(storage.storage_id)
            if index in retained:
                retained_ids.append(storage.storage_id)
        return ids, retained_ids

    def _watch(self, parameter: Any) -> Storage | None:
        """Have a parameter managed: it can be copied out, never dropped, never a source as such."""
        is_new = self.guards.watch(parameter)
        box = parameter._data
        array = box.peek() if type(box) is VariableBox else None
        if array is None or array.nbytes < self._least_bytes:
            return None
        storage = self.manager.adopt(array, StorageKind.PARAMETER)
        if storage is not None and is_new:
            storage.is_leaf = storage.exposed = storage.is_lasting = True
            storage.add_slot(VariableSlot(box))
        return storage

    def _note_retained_outputs(self, function: Any, made: list[_Made]) -> list[int]:
        if not can_have_holes(function):
            return []
        ids = []
        arrays = function.__dict__.get("_retained_output_data") or ()
        indexes = function._output_indexes_to_retain or ()
        for index, array in zip(indexes, arrays, strict=True):
            if not self._owns(array):
                continue
            storage = self._adopt(array, StorageKind.ACTIVATION, made, index, None)
            if storage is not None:
                ids.append(storage.storage_id)
        return ids

    def _note_attributes(
        self, function: Any, made: list[_Made], before: dict[str, Any]
    ) -> tuple[list[int], tuple[str, ...]]:
        """Return the storages of a function's own arrays, and the names it had before it ran."""
        ids: list[int] = []
        given: dict[str, None] = {}
        owns = self._owns
        for owner in attribute_owners(function):
            for name, value in list(owner.__dict__.items()):
                if type(value) in _PLAIN or name in _GRAPH_ATTRIBUTES:
                    continue
                is_tuple = type(value) is tuple
                arrays = [item for item in value if owns(item)] if is_tuple else [value]
                if not arrays or not (is_tuple or owns(value)):
                    continue
                is_given = owner is function and before.get(name) is value
                if is_given and name not in rules.side_effect_attributes(function):
                    given[name] = None
                is_made = owner is function and not is_tuple and not is_given
                for array in arrays:
                    if array.nbytes < self._least_bytes:
                        continue
                    if is_made:
                        storage = self._adopt(array, StorageKind.ATTRIBUTE, made, None, name)
                    else:
                        storage = self.manager.adopt(array, StorageKind.ATTRIBUTE)
                    if storage is not None:
                        if is_given and storage.producer is None:
                            storage.is_leaf = True
                        ids.append(storage.storage_id)
        return ids, tuple(given)


def attribute_owners(function: Any) -> tuple[Any, ...]:
    """Return the objects whose attributes are a function's: itself and an old-style inner one."""
    inner = function.__dict__.get("_function")
    if inner is None:
        return (function,) if can_have_holes(function) else ()
    return tuple([owner for owner in (function, inner) if can_have_holes(owner)])


class _Shared:
    """Views that are alike are one object: fewer for the cycle collector to look at."""

    __slots__ = ("_known",)

    def __init__(self) -> None:
        self._known: dict[Any, View] = {}

    def shared(self, view: View) -> View:
        """Return the first view that was given and is equal."""
        known = self._known
        key = (view.shape, view.strides, view.offset, view.dtype)
        first = known.get(key)
        if first is None:
            if len(known) >= MAX_SIGNATURES:
                known.clear()
            first = known[key] = view
        return first


class WeakList:
    """Objects in the order they were given, each as long as somebody else keeps it."""

    __slots__ = ("_limit", "_references")

    def __init__(self) -> None:
        self._references: list[weakref.ref[Any]] = []
        self._limit = _LEAST_LIMIT

    def append(self, item: Any) -> None:
        """Add an object."""
        self._references.append(weakref.ref(item))
        if len(self._references) > self._limit:
            self._references = [r for r in self._references if r() is not None]
            self._limit = max(_LEAST_LIMIT, 2 * len(self._references))

    def take(self) -> list[Any]:
        """Return the objects that are alive and forget all."""
        references, self._references = self._references, []
        return [item for reference in references if (item := reference()) is not None]
