"""Parameters that recipes read: their value is copied before it changes.

Optimizers change parameters in place, also between two backward passes over one graph. A dropped
tensor that was computed from a parameter needs the value of its forward. So a recipe refers to a
*version*; as long as the parameter is unchanged the version is the parameter's own array, and right
before a change (`about_to_change`) the version gets a copy, which is managed like any activation.

A change is announced by the binding (optimizers, update rules) or noticed by the variable's box
(any other reader of the array might write to it). An array that somebody already refers to when a
recipe asks is not trusted at all: then there is no version.

Invariant kept here: 3. A version's array holds the value of its forward.
"""

from __future__ import annotations

import gc
import sys
import weakref
from collections.abc import Callable
from typing import Any

from dynamemo.device import Device
from dynamemo.lazy import VariableBox
from dynamemo.recipe import ParameterVersion

#: References to a list that one variable has for itself, seen from a function that looks at it: the
#: variable's, the local name's and the argument of getrefcount.
_OWN_REFERENCES = 3


class _Guard:
    """What is known of one parameter."""

    __slots__ = ("changed_at", "is_trusted", "versions")

    def __init__(self, changed_at: int, *, is_trusted: bool) -> None:
        #: Nobody has held the array since `changed_at`, who could write to it unnoticed.
        self.is_trusted = is_trusted
        #: First op id that may see the present value.
        self.changed_at = changed_at
        self.versions: list[weakref.ref[ParameterVersion]] = []

    def alive(self) -> list[ParameterVersion]:
        """Return the versions that recipes still need."""
        versions = [version for ref in self.versions if (version := ref()) is not None]
        self.versions = [weakref.ref(version) for version in versions]
        return versions


class ParameterGuards:
    """All parameters that recipes have read.

    Parameters
    ----------
    device : Device
        Tells whether somebody else refers to an array.
    next_op_id : callable
        The id that the next function will get.
    preserve : callable
        Copies the array of a version and has the copy managed.
    share : callable
        Has the array of a version managed as one more place of the parameter's own.
    """

    def __init__(
        self,
        device: Device,
        *,
        next_op_id: Callable[[], int],
        preserve: Callable[[ParameterVersion], None],
        share: Callable[[ParameterVersion], None],
    ) -> None:
        self._device = device
        self._next_op_id = next_op_id
        self._preserve = preserve
        self._share = share
        self._watched: dict[int, weakref.ref[Any]] = {}

    def watch(self, parameter: Any) -> bool:
        """Notice from now on when the parameter changes; False where that was so already.

        Called right after a function has read it: trust that was lost, because somebody got hold
        of the array, begins anew with that function if nobody holds it any more.
        """
        data = parameter._data
        if type(data) is VariableBox:
            guard = data.subject
            if guard is None or not guard.is_trusted:
                self._trust_again(parameter, data)
            return False
        if data[0] is None or not self._device.owns(data[0]):
            return False
        if sys.getrefcount(data) > _OWN_REFERENCES:
            return False  # a copy of the parameter shares its list, and has to go on sharing it
        guard = _Guard(0, is_trusted=False)
        box = VariableBox(data[0], guard, self._lose_trust, parameter)
        parameter.__dict__["_data"] = box
        del data
        self._trust_again(parameter, box)
        key = id(parameter)
        self._watched[key] = weakref.ref(parameter, lambda _: self._watched.pop(key, None))
        return True

    def version_of(self, parameter: Any, op_id: int) -> ParameterVersion | None:
        """Return the version that an application saw, or None where there is no safe one."""
        box = parameter.__dict__["_data"]
        if type(box) is not VariableBox:
            return None
        guard = self._guard(box)
        for version in guard.alive():
            if version.covers(op_id):
                return version
        if not guard.is_trusted or op_id < guard.changed_at:
            return None
        if not self._is_untouched(parameter, box):
            return None
        version = ParameterVersion(box.peek(), guard.changed_at)
        self._share(version)
        guard.versions.append(weakref.ref(version))
        return version

    def _guard(self, box: VariableBox) -> _Guard:
        if box.subject is None:
            # The array was replaced by another: what came before saw another value.
            box.subject = _Guard(self._next_op_id(), is_trusted=False)
        guard: _Guard = box.subject
        return guard

    def _is_untouched(self, parameter: Any, box: VariableBox) -> bool:
        """Tell whether nobody but the parameter, its node and its versions holds the array."""
        if box.hole is not None:
            return False
        arrays = [box.peek()]
        known = 1 + (parameter.node.__dict__.get("_data") is arrays[0])
        known += sum(v.__dict__.get("array") is arrays[0] for v in self._guard(box).alive())
        return self._device.is_exclusive(arrays, [known])

    def _trust_again(self, parameter: Any, box: VariableBox) -> None:
        guard = self._guard(box)
        if not guard.is_trusted and self._is_untouched(parameter, box):
            guard.is_trusted = True
            guard.changed_at = self._next_op_id()

    def _lose_trust(self, guard: _Guard) -> None:
        """Reckon with writes: somebody outside Chainer gets hold of the array."""
        self._change(guard)
        guard.is_trusted = False

    def about_to_change(self, parameter: Any) -> None:
        """Copy what recipes still need of the parameter's present value."""
        box = parameter._data
        guard = box.subject if type(box) is VariableBox else None
        if guard is None:
            return
        if guard.versions:
            self._change(guard)
        else:
            guard.changed_at = self._next_op_id()

    def _change(self, guard: _Guard) -> None:
        next_op_id = self._next_op_id()
        for version in guard.alive():
            if version.until is None:
                version.until = next_op_id
                self._preserve(version)
        guard.changed_at = next_op_id

    def parameters(self) -> list[Any]:
        """Return the parameters that are watched and alive."""
        return [p for reference in list(self._watched.values()) if (p := reference()) is not None]

    def release(self) -> None:
        """Give every parameter its plain list back."""
        for parameter in self.parameters():
            unbox(parameter)
        self._watched.clear()


def unbox(variable: Any) -> None:
    """Give a variable its plain list back, unless its array is away."""
    box = variable.__dict__["_data"]
    if type(box) is not VariableBox or box.hole is not None:
        return
    plain = [box.peek()]
    if sys.getrefcount(box) > _OWN_REFERENCES:
        # Copies of the variable share its list: all get the same one back.
        for owner in gc.get_referrers(box):
            if type(owner) is dict and owner.get("_data") is box:
                owner["_data"] = plain
    variable.__dict__["_data"] = plain
