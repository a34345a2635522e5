"""The one module that knows Chainer: what it applies, keeps and changes, told to the manager.

Seams, all in the process and all undone by `leave`:

- `FunctionNode.apply` is wrapped: when it returns, the function's retained data, attributes and
  output variables are complete and exceptions are seen. (A function hook sees a function complete
  only at the next function's hook; user code in between could change an array unnoticed.)
- A function hook brings in what a backward needs right before it, and tells the recorder.
- `UpdateRule.update` and `Optimizer.call_hooks` are wrapped: parameters change there.

What it does not cover: ChainerX and iDeep arrays (left unmanaged, said once), functions applied
in another thread than the one that entered the runtime.

Invariants kept here:
  1. A replay runs under the configuration of the forward, without hooks, on a copy whose side
     effects are cut off (`rules`).
  4. After `leave` every class attribute of Chainer is the object it was before.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import types
import warnings
from collections.abc import Callable
from typing import Any

import chainer
from chainer import _backprop, configuration, function_node, variable
from chainer.functions.normalization import batch_normalization

from dynamemo import rules
from dynamemo.device import Device, Timer
from dynamemo.graph import StorageKind
from dynamemo.lazy import (
    PEEKERS,
    AttributeSlot,
    VariableBox,
    VariableSlot,
    can_have_holes,
    holes_of,
    names_with_holes,
    original_class,
)
from dynamemo.manager import MemoryManager
from dynamemo.parameters import ParameterGuards, unbox
from dynamemo.recipe import RECORD, Application, ParameterVersion
from dynamemo.storage import Array, Producer, Storage

#: Entries of `chainer.config` that a function's forward may read.
CONFIGURATION = (
    "autotune",
    "compute_mode",
    "cudnn_deterministic",
    "cudnn_fast_batch_normalization",
    "dtype",
    "train",
    "use_cudnn",
    "use_cudnn_tensor_core",
    "use_ideep",
)

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


def _nested_code(code: types.CodeType) -> list[types.CodeType]:
    return [code] + [const for const in code.co_consts if isinstance(const, types.CodeType)]


# Backprop lists the data of all inputs before the hook runs, and only for hooks; the check of a
# gradient's type only compares classes. Both take None for data that was not retained.
for _reader in (
    _backprop._backprop_to_all,
    function_node._backprop,
    variable._check_grad_type,
):
    PEEKERS.update(_nested_code(_reader.__code__))


class _Hook(chainer.FunctionHook):  # type: ignore[misc]
    """Pass backward's events to the binding."""

    name = "dynamemo"

    def __init__(self, binding: ChainerBinding) -> None:
        self._binding = binding

    def backward_preprocess(self, function: Any, in_data: Any, out_grad: Any) -> None:
        caller = sys._getframe(1)
        self._binding.begin_backward(function, id(caller))
        if function._n_local_function_hooks == 0 and len(chainer.get_function_hooks()) == 1:
            _forget_arrays(caller)

    def backward_postprocess(self, function: Any, in_data: Any, out_grad: Any) -> None:
        self._binding.end_backward(function)


def _forget_arrays(traversal: types.FrameType) -> None:
    """Empty the lists of arrays that backprop keeps for hooks until the next function.

    They would hold the function's inputs and gradients in place. Nobody else is there to read them.
    """
    local = traversal.f_locals
    for name in ("in_data", "out_grad_array", "out_grad_data"):
        arrays = local.get(name)
        if type(arrays) is list:
            arrays[:] = [None] * len(arrays)
    if isinstance(local, dict):
        # Up to Python 3.12 a picture of the frame, which would keep alive what the frame deletes.
        local.clear()


class _Frame:
    """A backward that runs now: what it needs is held, so it cannot be evicted."""

    __slots__ = ("caller_id", "function", "held", "op_id", "started")

    def __init__(self, function: Any, op_id: int, caller_id: int) -> None:
        self.function = function
        self.op_id = op_id
        self.caller_id = caller_id
        self.held: list[Any] = []


class ChainerBinding:
    """Connect Chainer in this thread to a memory manager."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._manager: MemoryManager
        self._guards = ParameterGuards(
            device,
            next_op_id=lambda: self._last_op_id + 1,
            preserve=self._preserve,
            share=self._share,
        )
        self._thread_id = threading.get_ident()
        self._hook = _Hook(self)
        self._frames: list[_Frame] = []
        self._running: list[str] = []
        self._originals: list[tuple[type, str, Any]] = []
        self._configurations: dict[tuple[Any, ...], tuple[Any, ...]] = {}
        self._has_warned = False
        self._last_op_id = 0

    # -- entering and leaving --------------------------------------------------------------

    def attach(self, manager: MemoryManager) -> None:
        """Name the manager that is told; before `enter`."""
        self._manager = manager
        manager.look_around = self._note_lasting

    def enter(self) -> None:
        """Put the seams in place."""
        self._wrap(chainer.FunctionNode, "apply", self._wrapped_apply)
        self._wrap(chainer.optimizer.UpdateRule, "update", self._wrapped_update)
        self._wrap(chainer.optimizer.Optimizer, "call_hooks", self._wrapped_call_hooks)
        self._hook.__enter__()

    def _wrap(self, cls: type, name: str, make: Callable[[Any], Any]) -> None:
        original = cls.__dict__[name]
        self._originals.append((cls, name, original))
        setattr(cls, name, make(original))

    def leave(self) -> None:
        """Undo what `enter` did."""
        self._frames.clear()
        hooks = chainer.get_function_hooks()
        if hooks.get(self._hook.name) is self._hook:
            del hooks[self._hook.name]
        for cls, name, original in reversed(self._originals):
            setattr(cls, name, original)
        self._originals.clear()

    def release(self) -> None:
        """Give every parameter, and every variable whose array is there, its plain list back."""
        self._guards.release()
        for storage in self._manager.storages():
            for slot in storage.slots.values():
                box = slot.owner if isinstance(slot, VariableSlot) else None
                owner = None if box is None or box.hole is not None else box.variable()
                if owner is not None:
                    unbox(owner)

    # -- forward ---------------------------------------------------------------------------

    def _wrapped_apply(self, original: Any) -> Any:
        def apply(function: Any, inputs: Any) -> Any:
            if threading.get_ident() != self._thread_id:
                return original(function, inputs)
            return self._apply(original, function, inputs)

        apply.__doc__ = original.__doc__
        return apply

    def _apply(self, original: Any, function: Any, inputs: Any) -> Any:
        manager = self._manager
        manager.drain()
        if self._frames:
            self._drop_stale_frames()
        if not rules.is_trusted(function):
            self._expose(inputs)
        before = dict(function.__dict__)
        self._begin(original_class(function).__name__)
        meter = manager.pool.start_meter()
        started = self._device.start_timer()
        try:
            outputs = self._apply_or_retry(original, function, inputs)
            timer = self._device.stop_timer(started)
        finally:
            self._end()
            transient_bytes = manager.pool.stop_meter(meter)
        if function.inputs is not None and not function._is_chainerx_fallback_mode:
            self._record(function, inputs, outputs, before, timer, transient_bytes)
        elif outputs and outputs[0]._has_chainerx_array:
            self._warn_unmanaged("ChainerX")
        else:
            self._note_loose_outputs(outputs)
        if manager.policy.is_eager:
            manager.evict_all()
        return outputs

    def _apply_or_retry(self, original: Any, function: Any, inputs: Any) -> Any:
        """Apply; where memory is in too many pieces, evict all that can be and apply once more.

        What a function holds while it runs cannot move. The second time it meets an arena that is
        empty but for what must stay. Only functions that may be applied again get a second time,
        and what the first had changed is put back.
        """
        if not rules.is_repeatable(function) or rules.noise_attributes(function):
            return original(function, inputs)
        effects = [
            (array, array.copy())
            for name in rules.side_effect_attributes(function)
            if (array := function.__dict__[name]) is not None
        ]
        try:
            return original(function, inputs)
        except MemoryError as error:
            error.__traceback__ = None  # its frames keep the first attempt's arrays
        for array, before in effects:
            array[...] = before
        self._clear_arena(inputs)
        return original(function, inputs)

    def _clear_arena(self, inputs: Any) -> None:
        """Evict all that can be, the function's own inputs too: they come back when it reads them."""
        for frame in self._frames:
            frame.held.clear()
        for item in inputs:
            data = item.__dict__["_data"] if isinstance(item, chainer.Variable) else None
            if type(data) is list and self._device.owns(data[0]):
                storage = self._manager.storage_of(data[0])
                if storage is not None:
                    self._box(item, storage)
        self._manager.evict_all()

    def _begin(self, label: str) -> None:
        self._running.append(label)
        self._manager.enter_function(label)

    def _end(self) -> None:
        self._running.pop()
        self._manager.enter_function(self._running[-1] if self._running else None)

    def _warn_unmanaged(self, kind: str) -> None:
        if not self._has_warned:
            self._has_warned = True
            warnings.warn(
                f"{kind} arrays are not managed by dynamemo and do not count in its budget",
                RuntimeWarning,
                stacklevel=4,
            )

    def _expose(self, inputs: Any) -> None:
        """A function that is not Chainer's own may write into what it gets."""
        for item in inputs:
            if isinstance(item, chainer.Variable):
                array = item.raw_array
            else:
                array = item
            storage = self._manager.storage_of(array) if self._device.owns(array) else None
            if storage is not None:
                self._manager.expose(storage)

    def _record(
        self,
        function: Any,
        inputs: Any,
        outputs: Any,
        before: dict[str, Any],
        timer: Timer,
        transient_bytes: int,
    ) -> None:
        manager = self._manager
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
        self._last_op_id = op_id
        signature = (
            original_class(function),
            tuple([(node.shape, node.dtype) for node in function.inputs]),
            tuple([(y.node.shape, y.node.dtype) for y in outputs]),
        )
        manager.measure(signature, timer)
        function.__dict__[RECORD] = Application(
            op_id,
            signature,
            self._configuration(),
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

    def _configuration(self) -> tuple[Any, ...]:
        config = configuration.config
        values = tuple([getattr(config, name) for name in CONFIGURATION])
        return self._configurations.setdefault(values, values)

    def _note_outputs(
        self, function: Any, outputs: Any, made: list[Any], inputs: Any
    ) -> list[int]:
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
            self._box(output, storage)
        return ids

    def _note_loose_outputs(self, outputs: Any) -> None:
        """Have outputs without a graph managed too: backward's gradients wait in variables."""
        for output in outputs:
            array = output.__dict__["_data"][0]
            storage = None
            if self._device.owns(array):
                storage = self._manager.adopt(array, StorageKind.GRADIENT)
            if storage is not None:
                self._box(output, storage)

    def _box(self, output: Any, storage: Storage) -> None:
        data = output.__dict__["_data"]
        if type(data) is not VariableBox:
            data = VariableBox(data[0], storage, self._manager.expose, output)
            output.__dict__["_data"] = data
        storage.add_slot(VariableSlot(data))

    def _note_view_of_leaf(self, array: Array, inputs: Any) -> None:
        """A view of memory that no function made shares its user's writes."""
        if self._manager.storage_of(array) is not None:
            return
        block = self._device.block_of(array)
        for item in inputs:
            source = item.raw_array if isinstance(item, chainer.Variable) else item
            if block is not None and self._device.block_of(source) is block:
                storage = self._manager.adopt(array, StorageKind.INPUT)
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
        storage = self._manager.adopt(array, kind)
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
            storage = self._manager.adopt(array, StorageKind.INPUT)
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
        is_new = self._guards.watch(parameter)
        box = parameter.__dict__["_data"]
        if type(box) is not VariableBox or box.peek() is None:
            return None
        storage = self._manager.adopt(box.peek(), StorageKind.PARAMETER)
        if storage is not None and is_new:
            storage.is_leaf = storage.exposed = storage.is_lasting = True
            storage.add_slot(VariableSlot(box))
        return storage

    def _note_retained_outputs(self, function: Any, made: list[Any]) -> list[int]:
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
        """Return the storages of a function's own arrays, and the names that it had before it ran."""
        ids: list[int] = []
        given: set[str] = set()
        for owner in _attribute_owners(function):
            for name, value in list(owner.__dict__.items()):
                if name in _GRAPH_ATTRIBUTES:
                    continue
                is_given = owner is function and before.get(name) is value
                items = enumerate(value) if type(value) is tuple else ((None, value),)
                for position, array in items:
                    if not self._device.owns(array):
                        continue
                    if is_given:
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
            return self._manager.adopt(array, StorageKind.ATTRIBUTE)
        return self._adopt(array, StorageKind.ATTRIBUTE, function, made, attribute=attribute)

    # -- backward --------------------------------------------------------------------------

    def begin_backward(self, function: Any, caller_id: int) -> None:
        """Bring in what the function's backward needs and hold it."""
        if self._frames:
            self._drop_stale_frames()
        self._manager.drain()
        application = function.__dict__.get(RECORD)
        if application is None:
            return
        frame = _Frame(function, application.op_id, caller_id)
        self._frames.append(frame)
        self._begin(f"{original_class(function).__name__} (backward)")
        self._manager.recorder.begin_backward(application.op_id)
        self._make_ready(function, frame.held)

    def _make_ready(self, function: Any, held: list[Any]) -> None:
        for index in function._input_indexes_to_retain or ():
            node = function.inputs[index]
            for hole in holes_of(node, "_data"):
                hole.restore()
            held.append(node.__dict__.get("_data"))
        for owner in _attribute_owners(function):
            held.append(list(owner.__dict__.values()))
            for name in names_with_holes(owner):
                held.append(getattr(owner, name))
        self._make_outputs_ready(function, held)

    def _make_outputs_ready(self, function: Any, held: list[Any]) -> None:
        for index in function._output_indexes_to_retain or ():
            node = function.outputs[index]()
            if node is not None:
                for hole in holes_of(node, "_data"):
                    hole.restore()
                held.append(node.__dict__.get("_data"))

    def end_backward(self, function: Any) -> None:
        """Let go of what the function's backward needed."""
        while self._frames:
            frame = self._frames.pop()
            self._end()
            if frame.function is function:
                self._manager.recorder.end_backward(frame.op_id)
                break
        frame = None  # type: ignore[assignment]
        if self._manager.policy.is_eager:
            self._manager.evict_all()

    def _drop_stale_frames(self) -> None:
        """Forget backwards that an exception ended: their caller runs no more."""
        active = set()
        python_frame: types.FrameType | None = sys._getframe(1)
        while python_frame is not None:
            active.add(id(python_frame))
            python_frame = python_frame.f_back
        while self._frames and self._frames[-1].caller_id not in active:
            self._frames.pop()
            self._end()
            if not self._frames:
                self._manager.recorder.abandon_backward()

    def _note_lasting(self) -> None:
        """Let gradients and optimizer state of parameters be copied out between two uses."""
        if self._frames:
            return
        for parameter in self._guards.parameters():
            self._note_place(parameter, "_grad", None, parameter.__dict__.get("_grad"))
            rule = parameter.__dict__.get("update_rule")
            state = None if rule is None else rule.__dict__.get("_state")
            if type(state) is dict:
                for key, array in state.items():
                    self._note_place(rule, "_state", key, array)

    def _note_place(self, owner: Any, name: str, index: Any, array: Any) -> None:
        if array is not None and self._device.owns(array):
            storage = self._manager.adopt(array, StorageKind.WORKSPACE)
            if storage is not None:
                storage.add_slot(AttributeSlot(owner, name, index))

    # -- parameters ------------------------------------------------------------------------

    def _wrapped_update(self, original: Any) -> Any:
        def update(rule: Any, param: Any) -> Any:
            self._guards.about_to_change(param)
            return original(rule, param)

        update.__doc__ = original.__doc__
        return update

    def _wrapped_call_hooks(self, original: Any) -> Any:
        def call_hooks(optimizer: Any, timing: str = "pre") -> Any:
            target = getattr(optimizer, "target", None)
            if target is not None:
                for param in target.params():
                    self._guards.about_to_change(param)
            return original(optimizer, timing)

        call_hooks.__doc__ = original.__doc__
        return call_hooks

    def version_of(self, node: Any, op_id: int) -> ParameterVersion | None:
        """Return the version of a leaf node's parameter that an application saw."""
        owner = node.get_variable_or_none()
        if not isinstance(owner, chainer.Parameter):
            return None
        return self._guards.version_of(owner, op_id)

    def _preserve(self, version: ParameterVersion) -> None:
        version.array = version.array.copy(order="K")
        self._manager.counters.preserved_bytes += version.array.nbytes
        storage = self._manager.adopt(version.array, StorageKind.PARAMETER)
        if storage is not None:
            storage.is_leaf = True
        self._share(version)

    def _share(self, version: ParameterVersion) -> None:
        storage = self._manager.storage_of(version.array)
        if storage is not None:
            storage.add_slot(AttributeSlot(version, "array"))

    # -- replay ----------------------------------------------------------------------------

    def replay(
        self,
        function: Any,
        inputs: tuple[Array, ...],
        application: Application,
        attribute: str | None,
    ) -> Any:
        """Apply a copy of the function again, without hooks and without effects outside.

        Returns
        -------
        tuple of array, or array
            The outputs, or the attribute of that name which the forward set in the copy.
        """
        copy = self._bare_copy(function, application)
        self._begin(f"{type(copy).__name__} (recompute)")
        try:
            if self._configuration() == application.configuration:
                return _forward(copy, inputs, attribute)
            with _configured(application.configuration):
                return _forward(copy, inputs, attribute)
        finally:
            self._end()

    def _bare_copy(self, function: Any, application: Application) -> Any:
        needed = (*application.given, *rules.noise_attributes(function))
        held = [getattr(function, name) for name in names_with_holes(function) if name in needed]
        copy = object.__new__(original_class(function))
        copy.__dict__.update(
            (name, value)
            for name, value in function.__dict__.items()
            if name not in _NOT_COPIED and not name.startswith("_dynamemo")
        )
        del held
        for name in rules.side_effect_attributes(function):
            copy.__dict__[name] = None
        return copy


#: Attributes of a function that its copy must not share.
_NOT_COPIED = frozenset({"inputs", "outputs", "_retained_output_data", "_local_function_hooks"})


def _attribute_owners(function: Any) -> tuple[Any, ...]:
    """Return the objects whose attributes are a function's: itself and an old-style inner one."""
    inner = function.__dict__.get("_function")
    return (function,) if inner is None or not can_have_holes(inner) else (function, inner)


def _configured(values: tuple[Any, ...]) -> contextlib.ExitStack:
    stack = contextlib.ExitStack()
    for name, value in zip(CONFIGURATION, values, strict=True):
        stack.enter_context(chainer.using_config(name, value))
    return stack


def _forward(copy: Any, inputs: tuple[Array, ...], attribute: str | None) -> Any:
    if attribute is not None:
        copy.forward(inputs)
        return copy.__dict__[attribute]
    if type(copy) is batch_normalization.BatchNormalization and _is_plain(copy):
        return (_normalize_again(copy, inputs),)
    return copy.forward(inputs)


def _is_plain(copy: Any) -> bool:
    is_general = type(copy._impl) is batch_normalization.GeneralBatchNormalizationImpl
    return is_general and copy.mean is not None and copy.inv_std is not None


def _normalize_again(copy: Any, inputs: tuple[Array, ...]) -> Array:
    """Give BatchNormalization's output from its saved mean and inverse deviation.

    The same elementwise pass that its forward ends with; the statistics, which cost two passes
    over the input, are not computed again.
    """
    x, gamma, beta = inputs
    dtype = copy.mean.dtype
    expander = copy.expander
    return batch_normalization._apply_bn_fwd(
        chainer.backend.get_array_module(x),
        x,
        copy.mean[expander],
        copy.inv_std[expander],
        gamma[expander].astype(dtype, copy=False),
        beta[expander].astype(dtype, copy=False),
    )
