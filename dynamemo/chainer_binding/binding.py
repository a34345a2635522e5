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
from dynamemo.chainer_binding import seams
from dynamemo.chainer_binding.recording import Recording
from dynamemo.chainer_binding.replay import Replayer
from dynamemo.chainer_binding.sampling import Sampler
from dynamemo.chainer_binding.slumber import Slumber
from dynamemo.chainer_binding.traversal import Frame, bring_in, forget_arrays, needed_by
from dynamemo.device import Device
from dynamemo.lazy import VariableBox, VariableSlot, original_class
from dynamemo.manager import MemoryManager
from dynamemo.parameters import unbox
from dynamemo.recipe import RECORD, ParameterVersion

_config = chainer.config

#: Free bytes, in multiples of a function's inputs, that it is sure not to exceed.
_PLENTY = 16


#: Applies a function: (FunctionNode.apply as it was, function, inputs, what is known of it).
_Run = Callable[[Any, Any, Any, rules.Traits], Any]


class _Hook(chainer.FunctionHook):
    """Pass backward's events to the binding."""

    name = "dynamemo"

    def __init__(self, binding: ChainerBinding) -> None:
        self._binding = binding

    def backward_preprocess(self, function: Any, in_data: Any, out_grad: Any) -> None:
        self._binding.begin_backward(function, id(sys._getframe(1)))

    def backward_postprocess(self, function: Any, in_data: Any, out_grad: Any) -> None:
        self._binding.end_backward(function)


class ChainerBinding:
    """Connect Chainer in this thread to a memory manager."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._manager: MemoryManager
        self._sampler: Sampler
        #: The thread whose functions are observed.
        self.thread_id = threading.get_ident()
        self._hook = _Hook(self)
        self._frames: list[Frame] = []
        self._running: list[str] = []
        self._has_warned = False
        #: Iteration in which something was evicted last; below 0: never.
        self._short_at = -2
        replayer = Replayer(self._begin, self._end)
        self._recording = Recording(device, replayer)
        #: Applies a function again, for recipes.
        self.replay = replayer.replay

    # -- entering and leaving ----------------------------------------------------------

    def attach(self, manager: MemoryManager) -> None:
        """Name the manager that is told; before `enter`."""
        self._manager = manager
        self._recording.attach(manager)
        self._sampler = self._recording.sampler
        self.slumber = Slumber(manager)
        manager.look_around = self._look_around
        manager.look_for_lasting = self._look_for_lasting

    def enter(self) -> None:
        """Put the seams in place."""
        seams.enter(self)
        self._hook.__enter__()

    def leave(self) -> None:
        """Undo what `enter` did."""
        self._frames.clear()
        self._remove_hook()
        seams.leave(self)

    def _remove_hook(self) -> None:
        hooks = chainer.get_function_hooks()
        if hooks.get(self._hook.name) is self._hook:
            del hooks[self._hook.name]

    def release(self) -> None:
        """Give every parameter, and every variable whose array is there, its plain list back."""
        self._recording.guards.release()
        boxes: list[VariableBox | None] = [*self._recording.boxes()]
        for storage in self._manager.storages():
            slots = storage.slots.values()
            boxes += [slot.owner for slot in slots if isinstance(slot, VariableSlot)]
        for box in boxes:
            owner = None if box is None else box.variable()
            if owner is not None:
                unbox(owner)

    # -- forward -----------------------------------------------------------------------

    def apply(self, original: Any, function: Any, inputs: Any) -> Any:
        """Apply a function, and note what it did."""
        slumber = self.slumber
        if slumber.is_asleep:
            slumber.running = type(function)
            try:
                outputs = original(function, inputs)
            except MemoryError as error:
                if not self._may_try_again(function):
                    raise
                error.__traceback__ = None  # its frames keep the first attempt's arrays
                self._clear_arena(inputs)
                outputs = original(function, inputs)
            slumber.running = None
            if function.inputs is not None:
                if slumber.is_asleep:
                    slumber.note(function)
                else:  # it was in the middle of this one that memory became short
                    self._recording.record_late(function)
            return outputs
        return self._apply_seen(original, function, inputs)

    def _may_try_again(self, function: Any) -> bool:
        """Tell whether a function that failed for memory, unseen, may be applied again."""
        traits = rules.traits_of(function)
        if not self.slumber.is_asleep or (traits.is_adapter and not rules.is_trusted(function)):
            return False
        return traits.is_trusted and traits.has_second_try and not traits.side_effects

    def _apply_seen(self, original: Any, function: Any, inputs: Any) -> Any:
        traits = rules.traits_of(function)
        is_trusted = rules.is_trusted(function) if traits.is_adapter else traits.is_trusted
        self._manager.drain()
        if self._frames:
            self._drop_stale_frames()
        if not is_trusted:
            self._expose(inputs)
        run = self._apply_or_retry if is_trusted and traits.has_second_try else _apply_once
        if _makes_graph():
            outputs = self._apply_and_record(run, original, function, inputs, traits)
        else:
            self._begin(traits.label)
            try:
                outputs = run(original, function, inputs, traits)
            finally:
                self._end()
            self._note_loose(outputs)
        if self._manager.policy.is_eager:
            self._evict_all()
        return outputs

    def _sleep_if_calm(self) -> None:
        """Look away from here on, if an iteration begins and nothing was evicted for long."""
        if not self._frames and self.slumber.may_begin(self._short_at):
            self.slumber.begin()
            self._remove_hook()
            # Whatever is alive may be written into from here on, parameters too.
            for storage in self._manager.storages():
                self._manager.expose(storage)
            self._recording.guards.release()

    def _wake(self) -> None:
        """Note what ran while nobody looked: it may be evicted."""
        slumber = self.slumber
        if not slumber.is_asleep:
            return
        functions = slumber.end()
        if self._hook.name not in chainer.get_function_hooks():
            self._hook.__enter__()
        if slumber.running is not None and not self._running:
            self._manager.enter_function(slumber.running.__name__)
        for function in functions:
            if function.inputs is not None:
                self._recording.record_late(function)

    def _apply_and_record(
        self, run: _Run, original: Any, function: Any, inputs: Any, traits: rules.Traits
    ) -> Any:
        self._manager.drain()
        self._sleep_if_calm()
        before = dict(function.__dict__)
        cls = original_class(function)
        self._begin(traits.label)
        measurement = self._sampler.start(cls)
        try:
            outputs = run(original, function, inputs, traits)
            if measurement is not None:
                self._sampler.stop_timer(measurement)
        finally:
            self._end()
            if measurement is not None:
                self._sampler.stop_meter(measurement)
        if function.inputs is not None and not function._is_chainerx_fallback_mode:
            self._recording.record(function, inputs, outputs, before, measurement)
        else:
            self._note_loose(outputs)
        return outputs

    def _note_loose(self, outputs: Any) -> None:
        if outputs and outputs[0]._has_chainerx_array:
            self._warn_unmanaged("ChainerX")
        else:
            self._recording.note_loose_outputs(outputs)

    def _apply_or_retry(
        self, original: Any, function: Any, inputs: Any, traits: rules.Traits
    ) -> Any:
        """Apply; where memory is in too many pieces, evict all that can be and apply once more.

        What a function holds while it runs cannot move. The second time it meets an arena that is
        empty but for what must stay. Only functions that may be applied again get a second time,
        and what the first had changed is put back.
        """
        effects = self._effects(function, inputs) if traits.side_effects else ()
        try:
            return original(function, inputs)
        except MemoryError as error:
            error.__traceback__ = None  # its frames keep the first attempt's arrays
            if effects is None:
                raise
        for array, before in effects:
            array[...] = before
        self._clear_arena(inputs)
        return original(function, inputs)

    def _effects(self, function: Any, inputs: Any) -> list[tuple[Any, Any]] | None:
        """Copy what the function is going to change; None where it cannot fail for memory."""
        if not self._is_short() and self._has_plenty_for(inputs):
            return None
        return [
            (array, array.copy())
            for name in rules.side_effect_attributes(function)
            if (array := function.__dict__.get(name)) is not None
        ]

    def _is_short(self) -> bool:
        """Tell whether something was evicted in this iteration or the one before."""
        return self._manager.recorder.iterations - self._short_at <= 1

    def _has_plenty_for(self, inputs: Any) -> bool:
        """Tell whether many times the inputs' bytes are free."""
        nbytes = 0
        for item in inputs:
            data = item.__dict__["_data"] if isinstance(item, chainer.Variable) else [item]
            array = list.__getitem__(data, 0)
            if array is None:
                return False
            nbytes += array.nbytes
        return self._manager.pool.available_bytes >= _PLENTY * nbytes

    def _clear_arena(self, inputs: Any) -> None:
        """Evict all that can be, the function's inputs too: they come back when it reads them."""
        self._wake()
        for frame in self._frames:
            frame.is_released = True
            frame.held = ()
        for item in inputs:
            data = item.__dict__["_data"] if isinstance(item, chainer.Variable) else None
            if type(data) is list and self._device.owns(data[0]):
                storage = self._manager.storage_of(data[0])
                if storage is not None:
                    self._recording.box(item, storage)
        self._recording.register_places()
        self._manager.evict_all()

    def make_room(self) -> None:
        """Evict all that can be: what runs now has failed for memory and is tried once more."""
        self._clear_arena(())

    def _evict_all(self) -> None:
        """Evict all that can be, but for what running backwards read."""
        self._prepare_eviction()
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
        """Bring in what the function's backward needs."""
        if self._frames:
            self._drop_stale_frames()
        manager = self._manager
        manager.drain()
        application = function.__dict__.get(RECORD)
        if application is None:
            return
        if not (self._frames or manager.recorder.is_iteration_open) and self._is_short():
            # Gradients are cleared by now: what stays can move into their holes.
            self._recording.note_lasting()
            manager.gather_lasting()
        self._frames.append(Frame(function, application.op_id, caller_id))
        self._begin(rules.traits_of(function).backward_label)
        manager.begin_backward(application.op_id)
        manager.prefetch(application.op_id)
        if self._short_at >= 0:
            bring_in(function)

    def end_backward(self, function: Any) -> None:
        """Let go of what the function's backward needed."""
        if RECORD not in function.__dict__:
            return
        while self._frames:
            frame = self._frames.pop()
            self._end()
            if frame.function is function:
                self._manager.end_backward(frame.op_id)
                break
        frame = None  # type: ignore[assignment]
        if self._manager.policy.is_eager:
            self._evict_all()

    def _look_around(self) -> None:
        """Tell the manager, which is about to evict, of what it could not know."""
        self._wake()
        self._sampler.settle()
        self._prepare_eviction()

    def _look_for_lasting(self) -> None:
        """Tell the manager of gradients and optimizer state."""
        if not self._frames:
            self._recording.note_lasting()

    def _prepare_eviction(self) -> None:
        self._short_at = self._manager.recorder.iterations
        self._protect_running()
        self._recording.register_places()

    def _protect_running(self) -> None:
        """Hold what running backwards read, and nothing else that backprop happens to hold."""
        for frame in self._frames:
            if not frame.is_released:
                frame.held = needed_by(frame.function)
        if self._frames and len(chainer.get_function_hooks()) == 1:
            forget_arrays(self._frames)

    def _drop_stale_frames(self) -> None:
        """Forget backwards that an exception ended: their caller runs no more.

        Where the innermost's runs, all do.
        """
        while self._frames and not _is_running(self._frames[-1].caller_id):
            self._frames.pop()
            self._end()
            if not self._frames:
                self._manager.recorder.abandon_backward()

    # -- parameters --------------------------------------------------------------------

    def about_to_change(self, parameter: Any) -> None:
        """Note that a parameter changes after this, whoever changes it."""
        if self.slumber.is_asleep:
            self.slumber.note_update()
            return
        self._recording.guards.about_to_change(parameter)

    def version_of(self, node: Any, op_id: int) -> ParameterVersion | None:
        """Return the version of a leaf node's parameter that an application saw."""
        owner = node.get_variable_or_none()
        if not isinstance(owner, chainer.Parameter):
            return None
        return self._recording.guards.version_of(owner, op_id)


def _apply_once(original: Any, function: Any, inputs: Any, traits: rules.Traits) -> Any:
    return original(function, inputs)


def _makes_graph() -> bool:
    """Tell whether functions applied now become part of a graph."""
    is_wanted = _config._local.__dict__.get("enable_backprop")
    return bool(_config._global.enable_backprop if is_wanted is None else is_wanted)


def _is_running(frame_id: int) -> bool:
    """Tell whether a Python frame is one that this thread runs."""
    frame: types.FrameType | None = sys._getframe(1)
    while frame is not None:
        if id(frame) == frame_id:
            return True
        frame = frame.f_back
    return False
