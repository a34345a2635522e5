"""Observe Chainer in one thread: the seams, and what happens at each.

Seams, all in the process and all undone by `leave`:

- `FunctionNode.apply` is wrapped: when it returns, the function's retained data, attributes and
  output variables are complete and exceptions are seen. (A function hook sees a function complete
  only at the next function's hook; user code in between could change an array unnoticed.)
- A function hook brings in what a backward needs right before it, and tells the recorder.
- `UpdateRule.update` and `Optimizer.call_hooks` are wrapped: parameters change there.

What it does not cover: ChainerX and iDeep arrays (left unmanaged, said once), functions applied
in another thread than the one that entered the runtime.

Invariants kept here:
  4. After `leave` every class attribute of Chainer is the object it was before.
"""

from __future__ import annotations

import sys
import threading
import types
import warnings
from collections.abc import Callable
from typing import Any

import chainer

from dynamemo import rules
from dynamemo.chainer_binding.recording import Recording, attribute_owners
from dynamemo.chainer_binding.replay import Replayer
from dynamemo.chainer_binding.traversal import Frame, forget_arrays
from dynamemo.device import Device
from dynamemo.lazy import VariableSlot, holes_of, names_with_holes, original_class
from dynamemo.manager import MemoryManager
from dynamemo.parameters import unbox
from dynamemo.recipe import RECORD, ParameterVersion


class _Hook(chainer.FunctionHook):
    """Pass backward's events to the binding."""

    name = "dynamemo"

    def __init__(self, binding: ChainerBinding) -> None:
        self._binding = binding

    def backward_preprocess(self, function: Any, in_data: Any, out_grad: Any) -> None:
        caller = sys._getframe(1)
        self._binding.begin_backward(function, id(caller))
        if function._n_local_function_hooks == 0 and len(chainer.get_function_hooks()) == 1:
            forget_arrays(caller)

    def backward_postprocess(self, function: Any, in_data: Any, out_grad: Any) -> None:
        self._binding.end_backward(function)


class ChainerBinding:
    """Connect Chainer in this thread to a memory manager."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._manager: MemoryManager
        self._thread_id = threading.get_ident()
        self._hook = _Hook(self)
        self._frames: list[Frame] = []
        self._running: list[str] = []
        self._originals: list[tuple[type, str, Any]] = []
        self._has_warned = False
        replayer = Replayer(self._begin, self._end)
        self._recording = Recording(device, replayer)
        #: Applies a function again, for recipes.
        self.replay = replayer.replay

    # -- entering and leaving ----------------------------------------------------------

    def attach(self, manager: MemoryManager) -> None:
        """Name the manager that is told; before `enter`."""
        self._manager = self._recording.manager = manager
        manager.look_around = self._look_around

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
        self._recording.guards.release()
        for storage in self._manager.storages():
            for slot in storage.slots.values():
                box = slot.owner if isinstance(slot, VariableSlot) else None
                owner = None if box is None else box.variable()
                if owner is not None:
                    unbox(owner)

    # -- forward -----------------------------------------------------------------------

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
            self._recording.record(function, inputs, outputs, before, timer, transient_bytes)
        elif outputs and outputs[0]._has_chainerx_array:
            self._warn_unmanaged("ChainerX")
        else:
            self._recording.note_loose_outputs(outputs)
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
            if (array := function.__dict__.get(name)) is not None
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
        """Evict all that can be, the function's inputs too: they come back when it reads them."""
        for frame in self._frames:
            frame.held.clear()
        for item in inputs:
            data = item.__dict__["_data"] if isinstance(item, chainer.Variable) else None
            if type(data) is list and self._device.owns(data[0]):
                storage = self._manager.storage_of(data[0])
                if storage is not None:
                    self._recording.box(item, storage)
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
        """Reckon with writes: a function that is not Chainer's own may change what it gets."""
        for item in inputs:
            array = item.raw_array if isinstance(item, chainer.Variable) else item
            storage = self._manager.storage_of(array) if self._device.owns(array) else None
            if storage is not None:
                self._manager.expose(storage)

    # -- backward ----------------------------------------------------------------------

    def begin_backward(self, function: Any, caller_id: int) -> None:
        """Bring in what the function's backward needs and hold it."""
        if self._frames:
            self._drop_stale_frames()
        self._manager.drain()
        application = function.__dict__.get(RECORD)
        if application is None:
            return
        frame = Frame(function, application.op_id, caller_id)
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
        for owner in attribute_owners(function):
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

    def _look_around(self) -> None:
        if not self._frames:
            self._recording.note_lasting()

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

    # -- parameters --------------------------------------------------------------------

    def _wrapped_update(self, original: Any) -> Any:
        def update(rule: Any, param: Any) -> Any:
            self._recording.guards.about_to_change(param)
            return original(rule, param)

        update.__doc__ = original.__doc__
        return update

    def _wrapped_call_hooks(self, original: Any) -> Any:
        def call_hooks(optimizer: Any, timing: str = "pre") -> Any:
            target = getattr(optimizer, "target", None)
            if target is not None:
                for param in target.params():
                    self._recording.guards.about_to_change(param)
            return original(optimizer, timing)

        call_hooks.__doc__ = original.__doc__
        return call_hooks

    def version_of(self, node: Any, op_id: int) -> ParameterVersion | None:
        """Return the version of a leaf node's parameter that an application saw."""
        owner = node.get_variable_or_none()
        if not isinstance(owner, chainer.Parameter):
            return None
        return self._recording.guards.version_of(owner, op_id)
