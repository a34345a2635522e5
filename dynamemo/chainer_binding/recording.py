"""Read what an application of a function left behind, and tell the manager.

Which arrays the function made, which its backward will read, which are its own attributes, which
belong to parameters; each with the places that refer to it.

What it does not cover: ChainerX and iDeep arrays, arrays in lists that an attribute holds.
"""

from __future__ import annotations

from typing import Any

import chainer

from dynamemo import rules
from dynamemo.chainer_binding.replay import Replayer
from dynamemo.device import Device, Timer
from dynamemo.graph import StorageKind
from dynamemo.lazy import AttributeSlot, VariableBox, VariableSlot, can_have_holes, original_class
from dynamemo.manager import MemoryManager
from dynamemo.parameters import ParameterGuards
from dynamemo.recipe import RECORD, Application, ParameterVersion
from dynamemo.storage import Array, Producer, Storage

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

    Parameters
    ----------
    device : Device
        Whose arrays are managed.
    replayer : Replayer
        Knows the configuration that functions run under.
    """

    def __init__(self, device: Device, replayer: Replayer) -> None:
        self.manager: MemoryManager
        self.guards = ParameterGuards(
            device,
            next_op_id=lambda: self.last_op_id + 1,
            preserve=self.preserve,
            share=self.share,
        )
        #: Id of the newest application.
        self.last_op_id = 0
        self._device = device
        self._replayer = replayer

    def record(
        self,
        function: Any,
        inputs: Any,
        outputs: Any,
        before: dict[str, Any],
        timer: Timer,
        transient_bytes: int,
    ) -> None:
        """Note an application that has just returned.

        Parameters
        ----------
        function, inputs, outputs
            The function node, what it was applied to, and its output variables.
        before : dict
            The function's attributes before it ran.
        timer : Timer
            Of its forward.
        transient_bytes : int
            What it used beyond its results while it ran.
        """
        manager = self.manager
        made: list[tuple[Storage, Producer, bool]] = []
        output_ids = self._note_outputs(function, outputs, made, inputs)
        input_ids, retained_ids = self._note_inputs(function)
        retained_ids += self._note_retained_outputs(function, made)
        attribute_ids, given = self._note_attributes(function, made, before)
        op_id = manager.recorder.forward(
            function.label,
            tuple(input_ids),
            tuple(output_ids),
            retained=tuple(retained_ids),
            attributes=tuple(attribute_ids),
            transient_bytes=transient_bytes,
        )
        self.last_op_id = op_id
        signature = (
            original_class(function),
            tuple([(node.shape, node.dtype) for node in function.inputs]),
            tuple([(y.node.shape, y.node.dtype) for y in outputs]),
        )
        manager.measure(signature, timer)
        function.__dict__[RECORD] = Application(
            op_id,
            signature,
            self._replayer.configuration(),
            nbytes=sum(manager.nbytes_of(i) for i in {*input_ids, *output_ids}),
            transient_bytes=transient_bytes,
            given=tuple(given),
            on_death=manager.forget_operation,
        )
        is_checkpoint = rules.is_checkpoint(function)
        for storage, producer, is_output in made:
            producer.op_id = op_id
            manager.set_producer(storage, producer, is_checkpoint=is_checkpoint and is_output)
            if manager.verify and storage.covered:
                self._take_digest(storage)

    def _take_digest(self, storage: Storage) -> None:
        slot = next(iter(storage.slots.values()), None)
        array = None if slot is None else slot.get()
        if array is not None:
            storage.digest = self._device.digest(array)

    def note_loose_outputs(self, outputs: Any) -> None:
        """Have outputs without a graph managed too: backward's gradients wait in variables."""
        for output in outputs:
            array = output.__dict__["_data"][0]
            storage = None
            if self._device.owns(array):
                storage = self.manager.adopt(array, StorageKind.GRADIENT)
            if storage is not None:
                self.box(output, storage)

    def note_lasting(self) -> None:
        """Let gradients and optimizer state of parameters be copied out between two uses."""
        for parameter in self.guards.parameters():
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
        if array is not None and self._device.owns(array):
            storage = self.manager.adopt(array, StorageKind.WORKSPACE)
            if storage is not None:
                storage.add_slot(AttributeSlot(owner, name, index))

    def _note_outputs(self, function: Any, outputs: Any, made: list[Any], inputs: Any) -> list[int]:
        ids = []
        for index, output in enumerate(outputs):
            data = output.__dict__["_data"]
            array = data[0]
            if not self._device.owns(array):
                continue
            if array.base is not None:
                self._note_view_of_leaf(array, inputs)
            storage = self._adopt(array, StorageKind.ACTIVATION, function, made, index=index)
            if storage is None:
                continue
            ids.append(storage.storage_id)
            self.box(output, storage)
        return ids

    def box(self, output: Any, storage: Storage) -> None:
        """Put a variable's array into a box, and register that as a place of the storage."""
        data = output.__dict__["_data"]
        if type(data) is not VariableBox:
            data = VariableBox(data[0], storage, self.manager.expose, output)
            output.__dict__["_data"] = data
        storage.add_slot(VariableSlot(data))

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
        function: Any,
        made: list[Any],
        *,
        index: int | None = None,
        attribute: str | None = None,
    ) -> Storage | None:
        if not self._device.owns(array):
            return None
        storage = self.manager.adopt(array, kind)
        if storage is None or storage.block is None:
            return None
        is_known = storage.producer is not None or storage.is_leaf or self._is_made(storage, made)
        if not is_known:
            view = self._device.view_of(array, storage.block)
            producer = Producer(function, 0, view, output_index=index, attribute=attribute)
            made.append((storage, producer, index is not None))
        return storage

    def _is_made(self, storage: Storage, made: list[Any]) -> bool:
        return any(entry[0] is storage for entry in made)

    def _note_inputs(self, function: Any) -> tuple[list[int], list[int]]:
        ids, retained_ids = [], []
        retained = function._input_indexes_to_retain or ()
        for index, node in enumerate(function.inputs):
            if node.creator_node is None:
                owner = node.get_variable_or_none()
                if isinstance(owner, chainer.Parameter):
                    storage = self._watch(owner)
                    if storage is not None:
                        ids.append(storage.storage_id)
                        storage.add_slot(AttributeSlot(node, "_data"))
                        if index in retained:
                            retained_ids.append(storage.storage_id)
                    continue
            array = node.__dict__.get("_data")
            if array is None or not self._device.owns(array):
                continue
            storage = self.manager.adopt(array, StorageKind.INPUT)
            if storage is None:
                continue
            if storage.producer is None and node.creator_node is None:
                storage.is_leaf = True
            ids.append(storage.storage_id)
            if index in retained:
                retained_ids.append(storage.storage_id)
                storage.add_slot(AttributeSlot(node, "_data"))
        return ids, retained_ids

    def _watch(self, parameter: Any) -> Storage | None:
        """Have a parameter managed: it can be copied out, never dropped, never a source as such."""
        is_new = self.guards.watch(parameter)
        box = parameter.__dict__["_data"]
        if type(box) is not VariableBox or box.peek() is None:
            return None
        storage = self.manager.adopt(box.peek(), StorageKind.PARAMETER)
        if storage is not None and is_new:
            storage.is_leaf = storage.exposed = storage.is_lasting = True
            storage.add_slot(VariableSlot(box))
        return storage

    def _note_retained_outputs(self, function: Any, made: list[Any]) -> list[int]:
        if not can_have_holes(function):
            return []
        ids = []
        arrays = function.__dict__.get("_retained_output_data") or ()
        indexes = function._output_indexes_to_retain or ()
        for position, (index, array) in enumerate(zip(indexes, arrays, strict=True)):
            storage = self._adopt(array, StorageKind.ACTIVATION, function, made, index=index)
            if storage is None:
                continue
            ids.append(storage.storage_id)
            storage.add_slot(AttributeSlot(function, "_retained_output_data", position))
            node = function.outputs[index]()
            if node is not None:
                storage.add_slot(AttributeSlot(node, "_data"))
        return ids

    def _note_attributes(
        self, function: Any, made: list[Any], before: dict[str, Any]
    ) -> tuple[list[int], set[str]]:
        """Return the storages of a function's own arrays, and the names it had before it ran."""
        ids: list[int] = []
        given: set[str] = set()
        for owner in attribute_owners(function):
            for name, value in list(owner.__dict__.items()):
                if name in _GRAPH_ATTRIBUTES:
                    continue
                is_given = owner is function and before.get(name) is value
                is_input = is_given and name not in rules.side_effect_attributes(function)
                items = enumerate(value) if type(value) is tuple else ((None, value),)
                for position, array in items:
                    if not self._device.owns(array):
                        continue
                    if is_input:
                        given.add(name)
                    is_made = owner is function and position is None and not is_given
                    attribute = name if is_made else None
                    storage = self._note_attribute(function, array, attribute, made)
                    if storage is not None:
                        storage.is_leaf |= is_given and storage.producer is None
                        storage.add_slot(AttributeSlot(owner, name, position))
                        ids.append(storage.storage_id)
        return ids, given

    def _note_attribute(
        self, function: Any, array: Any, attribute: str | None, made: list[Any]
    ) -> Storage | None:
        if attribute is None:
            return self.manager.adopt(array, StorageKind.ATTRIBUTE)
        return self._adopt(array, StorageKind.ATTRIBUTE, function, made, attribute=attribute)


def attribute_owners(function: Any) -> tuple[Any, ...]:
    """Return the objects whose attributes are a function's: itself and an old-style inner one."""
    inner = function.__dict__.get("_function")
    owners = (function,) if inner is None else (function, inner)
    return tuple([owner for owner in owners if can_have_holes(owner)])
