"""The seams in Chainer's classes: one set for the process, shared by the runtimes of its threads.

`FunctionNode.apply` goes to the binding of the thread that calls it; a parameter may change in any
thread, so `UpdateRule.update` and `Optimizer.call_hooks` tell every binding.

Invariants kept here:
  4. Whoever enters first puts the seams in place, and whoever leaves last, in any order, puts back
     every class attribute as it was.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, Protocol

import chainer

from dynamemo.cudnn import settings as cudnn_settings


class Binding(Protocol):
    """Who is told what happens at the seams."""

    #: The thread whose functions it is told of.
    thread_id: int

    def apply(self, original: Any, function: Any, inputs: Any) -> Any:
        """Apply a function by calling `original`."""
        ...

    def about_to_change(self, parameter: Any) -> None:
        """Note that a parameter changes after this."""
        ...

    def make_room(self) -> None:
        """Evict all that can be: what runs now has failed for memory and is tried once more."""
        ...


_bindings: dict[int, Binding] = {}
_originals: list[tuple[type, str, Any]] = []
_lock = threading.Lock()


def enter(binding: Binding) -> None:
    """Send what happens in the binding's thread to it."""
    with _lock:
        if not _bindings:
            _wrap(chainer.FunctionNode, "apply", _with_apply)
            _wrap(chainer.optimizer.UpdateRule, "update", _with_update)
            _wrap(chainer.optimizer.Optimizer, "call_hooks", _with_call_hooks)
            cudnn_settings.make_room = _make_room
        _bindings[binding.thread_id] = binding


def leave(binding: Binding) -> None:
    """Undo `enter`; nothing happens where the binding has left already."""
    with _lock:
        if _bindings.get(binding.thread_id) is not binding:
            return
        del _bindings[binding.thread_id]
        if not _bindings:
            while _originals:
                setattr(*_originals.pop())
            cudnn_settings.make_room = bool


def _wrap(cls: type, name: str, make: Callable[[Any], Any]) -> None:
    original = cls.__dict__[name]
    wrapped = make(original)
    wrapped.__doc__ = original.__doc__
    _originals.append((cls, name, original))
    setattr(cls, name, wrapped)


def _with_apply(original: Any) -> Any:
    binding_of, thread_id = _bindings.get, threading.get_ident

    def apply(function: Any, inputs: Any) -> Any:
        binding = binding_of(thread_id())
        if binding is None:
            return original(function, inputs)
        return binding.apply(original, function, inputs)

    return apply


def _make_room() -> bool:
    """Let this thread's runtime make room for a convolution's workspace; False without one."""
    binding = _bindings.get(threading.get_ident())
    if binding is None:
        return False
    binding.make_room()
    return True


def _with_update(original: Any) -> Any:
    def update(rule: Any, param: Any) -> Any:
        _tell(param)
        return original(rule, param)

    return update


def _with_call_hooks(original: Any) -> Any:
    def call_hooks(optimizer: Any, timing: str = "pre") -> Any:
        target = getattr(optimizer, "target", None)
        if target is not None and _has_hooks(optimizer, timing):
            for param in target.params():
                _tell(param)
        return original(optimizer, timing)

    return call_hooks


def _tell(parameter: Any) -> None:
    for binding in tuple(_bindings.values()):
        binding.about_to_change(parameter)


def _has_hooks(optimizer: Any, timing: str) -> bool:
    """Tell whether an optimizer calls somebody else there; yes where that cannot be known."""
    hookable = optimizer.__dict__.get("_hookable")
    if type(hookable) is not chainer.optimizer._OptimizerHookable:
        return True
    return bool(getattr(hookable, f"_{timing}_update_hooks", True))
