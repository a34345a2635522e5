"""Find the places that refer to managed arrays, when somebody wants to evict.

Only evictions need them, and most programs have none. So while functions run it is only noted,
weakly, what has places: the boxes of output variables, functions, variables without a graph. The
places are read off them when memory is short.

Invariants kept here:
  3. A place that was not found, or not yet, is a reference that nobody knows: what it refers to is
     not evicted.
  6. What is noted is bounded by what is alive.
"""

from __future__ import annotations

import sys
import weakref
from typing import Any, TypeVar

from dynamemo.device import Device
from dynamemo.evictor import MIN_BYTES
from dynamemo.graph import StorageKind
from dynamemo.lazy import AttributeSlot, VariableBox, VariableSlot, can_have_holes, data_of
from dynamemo.manager import MemoryManager
from dynamemo.recipe import RECORD, ParameterVersion
from dynamemo.storage import Array, Storage

ref = weakref.ref
_T = TypeVar("_T")

#: Dead references that a list may hold before it is looked through.
_LEAST_LIMIT = 1024

#: Types of attributes that are no arrays and hold none, looked at first.
PLAIN = frozenset({type(None), bool, int, float, str, list, dict, type(len)})

#: Attributes of a FunctionNode that are the graph's and not the function's own.
GRAPH_ATTRIBUTES = frozenset(
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


class Places:
    """Know what has places, and tell the manager of them.

    Parameters
    ----------
    device : Device
        Whose arrays are managed.
    """

    def __init__(self, device: Device) -> None:
        self.manager: MemoryManager
        self._device = device
        self._owns = device.owns
        self._block_of = device.block_of
        #: What has places that the manager was not told of yet: boxes of outputs, functions, and
        #: variables without a graph.
        self._boxes: list[weakref.ref[VariableBox]] = []
        self._functions: list[weakref.ref[Any]] = []
        self._loose: list[weakref.ref[Any]] = []
        #: References, dead ones too, from which these lists are looked through.
        self._most_references = _LEAST_LIMIT

    def attach(self, manager: MemoryManager) -> None:
        """Name the manager that is told."""
        self.manager = manager
        #: Arrays that are shorter are never evicted, so only values that others are made from are
        #: followed: parameters' and functions' own small arrays are not.
        self._least_bytes = 1 if manager.policy.is_eager else MIN_BYTES
        self._adopt_block = manager.adopt_block
        self._expose = manager.expose  # bound once, for all boxes

    # -- while functions run -----------------------------------------------------------

    def note_function(self, function: Any) -> None:
        """Note a function that has just been applied: it and its nodes have places."""
        self._functions.append(ref(function))
        if len(self._functions) > self._most_references:
            self._forget_dead()

    def note_loose_outputs(self, outputs: Any) -> None:
        """Have outputs without a graph managed too: backward's gradients wait in variables.

        Nothing can be rebuilt from a gradient, so who reads it does not matter, and it is enough to
        find it when memory is short. Of an array that is managed already every reader is watched.
        """
        if len(self._loose) > self._most_references:
            self._forget_dead()
        for output in outputs:
            array = output._data[0]
            block = self._block_of(array) if self._owns(array) else None
            if block is None:
                continue
            if block.owner is None:
                self._loose.append(ref(output))
                continue
            storage = self._adopt_block(block, StorageKind.GRADIENT)
            if storage is not None:
                self.box(output, storage)

    def note_variable(self, variable: Any) -> None:
        """Note a variable that has a place, if its array is still there when somebody evicts."""
        self._loose.append(ref(variable))

    def box(self, output: Any, storage: Storage) -> None:
        """Put a variable's array into a box, a place of the storage."""
        data = output._data
        if type(data) is not VariableBox:
            data = output._data = self._box(output, data[0], storage)
        self._boxes.append(ref(data))

    def _box(self, output: Any, array: Array, storage: Storage) -> VariableBox:
        return VariableBox(array, storage, self._expose, output)

    def _forget_dead(self) -> None:
        """Forget what died without memory ever being short."""
        lists = (self._boxes, self._functions, self._loose)
        for references in lists:
            references[:] = [r for r in references if r() is not None]
        self._most_references = max(_LEAST_LIMIT, 2 * max(map(len, lists)))

    # -- when somebody wants to evict --------------------------------------------------

    def register_places(self) -> None:
        """Tell the manager of all places that refer to arrays it knows."""
        for box in self.boxes():
            storage = box.subject
            if type(storage) is not Storage or box.hole is not None:
                continue
            if self.manager.storage_of(box.peek()) is storage:
                storage.add_slot(VariableSlot(box))
                self._register_node(box.variable())
        functions, self._functions = self._functions, []
        for function in _alive(functions):
            self._register_function(function)
        loose, self._loose = self._loose, []
        for variable in _alive(loose):
            self._register_loose(variable)

    def boxes(self) -> list[VariableBox]:
        """Return the boxes that are not registered yet, to be forgotten here."""
        boxes, self._boxes = self._boxes, []
        return _alive(boxes)

    def _register_function(self, function: Any) -> None:
        nodes = list(function.inputs or ())  # None: the graph was cut there
        nodes += [node for output in function.outputs or () if (node := output()) is not None]
        for node in nodes:
            self._register(node, "_data", None, data_of(node))
        if can_have_holes(function):
            retained = function.__dict__.get("_retained_output_data") or ()
            for position, array in enumerate(retained):
                self._register(function, "_retained_output_data", position, array)
        for owner in attribute_owners(function):
            for name, value in list(owner.__dict__.items()):
                if name in GRAPH_ATTRIBUTES:
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
        if type(array) in PLAIN or not self._owns(array):
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

    def share(self, version: ParameterVersion) -> None:
        """Register a version as one more place of its array."""
        storage = self.manager.storage_of(version.array)
        if storage is not None:
            storage.add_slot(AttributeSlot(version, "array"))

    def note_place(self, owner: Any, name: str, index: Any, array: Any) -> None:
        """Have an array that is no tensor of a graph managed, with the place it is in."""
        if array is not None and self._owns(array) and array.nbytes >= self._least_bytes:
            storage = self.manager.adopt(array, StorageKind.WORKSPACE)
            if storage is not None:
                storage.add_slot(AttributeSlot(owner, name, index))


def attribute_owners(function: Any) -> tuple[Any, ...]:
    """Return the objects whose attributes are a function's: itself and an old-style inner one."""
    inner = function.__dict__.get("_function")
    if inner is None:
        return (function,) if can_have_holes(function) else ()
    return tuple([owner for owner in (function, inner) if can_have_holes(owner)])


def _alive(references: list[weakref.ref[_T]]) -> list[_T]:
    """Return the objects that are alive."""
    return [item for reference in references if (item := reference()) is not None]
