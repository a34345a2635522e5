"""Read what an application of a function left behind, and tell the manager.

Which arrays the function made, which its backward will read, which are its own attributes, which
belong to parameters. The places that refer to them are `places`' matter.

What it does not cover: ChainerX and iDeep arrays, arrays in lists that an attribute holds.
"""

from __future__ import annotations

import math
from typing import Any

import chainer

from dynamemo import rules
from dynamemo.chainer_binding.places import GRAPH_ATTRIBUTES, PLAIN, Places, attribute_owners
from dynamemo.chainer_binding.replay import Replayer
from dynamemo.chainer_binding.sampling import Measurement, Sampler
from dynamemo.device import Device
from dynamemo.graph import StorageKind
from dynamemo.lazy import (
    VariableBox,
    VariableSlot,
    can_have_holes,
    data_of,
    original_class,
)
from dynamemo.manager import MemoryManager
from dynamemo.parameters import ParameterGuards
from dynamemo.recipe import RECORD, Application, ParameterVersion, Signature
from dynamemo.storage import Array, Producer, Storage, View

#: A storage, its array, and which output or attribute of the function it is.
_Made = tuple[Storage, Array, "int | None", "str | None"]

#: Signatures known at once.
MAX_SIGNATURES = 65_536

#: Of applications that nobody looked at.
_UNSEEN = Signature(("unseen",), 0)


class Recording(Places):
    """Tell the manager what functions did.

    Storages, who made them and what the coming backward reads are noted at once. The places that
    refer to arrays are found when they matter (`Places`).

    Parameters
    ----------
    device : Device
        Whose arrays are managed.
    replayer : Replayer
        Knows the configuration that functions run under.
    """

    def __init__(self, device: Device, replayer: Replayer) -> None:
        super().__init__(device)
        self.sampler: Sampler
        self.guards = ParameterGuards(
            device,
            next_op_id=lambda: self.last_op_id + 1,
            preserve=self.preserve,
            share=self.share,
        )
        #: Id of the newest application.
        self.last_op_id = 0
        self._replayer = replayer
        self._views = _Shared()
        self._signatures: dict[tuple[Any, ...], Signature] = {}

    def attach(self, manager: MemoryManager) -> None:
        """Name the manager that is told."""
        super().attach(manager)
        self._forget_operation = manager.forget_operation  # bound once, for all applications
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
        input_ids, retained_ids, makers, is_complete = self._note_inputs(function)
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
            signature=signature,
            is_repeatable=is_complete and rules.traits_of_class(cls).is_repeatable,
            makers=makers,
        )
        function.__dict__[RECORD] = Application(
            op_id, signature, self._replayer.configuration(), given, self._forget_operation
        )
        if made:
            self._note_made(function, made, op_id)
        self.note_function(function)
        manager.ran_forward(op_id, signature, [entry[0] for entry in made])

    def record_late(self, function: Any) -> None:
        """Note an application that nobody looked at when it ran.

        Its arrays can be copied out from now on. They are never rebuilt and nothing is rebuilt from
        them: nobody knows what was written into them since.
        """
        manager = self.manager
        made: list[_Made] = []
        input_ids, retained_ids, *_ = self._note_inputs(function)
        nodes = [node for output in function.outputs or () if (node := output()) is not None]
        output_ids = []
        for node in nodes:
            array = data_of(node)
            if array is not None and self._owns(array):
                storage = self._adopt(array, StorageKind.ACTIVATION, made, None, None)
                if storage is not None:
                    output_ids.append(storage.storage_id)
            variable = node.get_variable_or_none()
            if variable is not None:
                self.note_variable(variable)
        if function._output_indexes_to_retain:
            retained_ids += self._note_retained_outputs(function, made)
        attribute_ids, _ = self._note_attributes(function, made, {})
        for storage, *_ in made:
            storage.exposed = True
        self.last_op_id = op_id = manager.recorder.forward(
            function.label,
            tuple(input_ids),
            tuple(output_ids),
            retained=tuple(retained_ids),
            attributes=tuple(attribute_ids),
        )
        function.__dict__[RECORD] = Application(op_id, _UNSEEN, None, (), self._forget_operation)
        self.note_function(function)

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
            parts += (node.shape, node.dtype)  # both None for a variable without an array
        parts.append(None)
        for output in outputs:
            node = output._node
            parts += (node.shape, node.dtype)
        key = tuple(parts)
        signature = self._signatures.get(key)
        if signature is None:
            if len(self._signatures) >= MAX_SIGNATURES:
                self._signatures.clear()
            nodes = [*function.inputs, *(output._node for output in outputs)]
            nbytes = sum(
                math.prod(node.shape) * node.dtype.itemsize for node in nodes if node.dtype
            )
            signature = self._signatures[key] = Signature(key, nbytes)
        return signature

    def note_lasting(self) -> None:
        """Let gradients and optimizer state of parameters be copied out between two uses."""
        for parameter in self.guards.parameters():
            self._register_node(parameter)
            self.note_place(parameter, "_grad", None, parameter.__dict__.get("_grad"))
            rule = parameter.__dict__.get("update_rule")
            state = None if rule is None else rule.__dict__.get("_state")
            if type(state) is dict:
                for key, array in state.items():
                    self.note_place(rule, "_state", key, array)

    def preserve(self, version: ParameterVersion) -> None:
        """Give a version a copy of its own, and have that managed."""
        version.array = version.array.copy(order="K")
        self.manager.counters.preserved_bytes += version.array.nbytes
        storage = self.manager.adopt(version.array, StorageKind.PARAMETER)
        if storage is not None:
            storage.is_leaf = True
        self.share(version)

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

    def _note_inputs(self, function: Any) -> tuple[list[int], list[int], list[int], bool]:
        """Return what it read, what of it backward reads, who made the rest, and if that is all."""
        ids: list[int] = []
        retained_ids: list[int] = []
        makers: list[int] = []
        is_complete = True
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
            if array is None:
                maker = None if is_leaf else node._creator_node.__dict__.get(RECORD)
                if maker is None:
                    is_complete = False
                else:
                    makers.append(maker.op_id)
                continue
            block = self._block_of(array) if self._owns(array) else None
            storage = None if block is None else self._adopt_block(block, StorageKind.INPUT)
            if storage is None:
                is_complete = False
                continue
            if is_leaf and storage.producer is None:
                storage.is_leaf = True
            ids.append(storage.storage_id)
            if index in retained:
                retained_ids.append(storage.storage_id)
        return ids, retained_ids, makers, is_complete

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
                if type(value) in PLAIN or name in GRAPH_ATTRIBUTES:
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
