"""Apply functions a second time, with the same result and without effects outside.

Invariant kept here: 1. A replay runs under the configuration of the forward, without hooks, on a
copy of the function whose side effects are cut off (`dynamemo.rules`).
"""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Callable
from typing import Any

import chainer
from chainer import configuration
from chainer.functions.normalization import batch_normalization

from dynamemo import rules
from dynamemo.lazy import names_with_holes, original_class
from dynamemo.recipe import Application
from dynamemo.storage import Array

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

_NAMES = frozenset(CONFIGURATION)
_global_values = operator.itemgetter(*CONFIGURATION)

#: Attributes of a function that its copy must not share.
_NOT_COPIED = frozenset({"inputs", "outputs", "_retained_output_data", "_local_function_hooks"})


class Replayer:
    """Apply copies of functions.

    Parameters
    ----------
    enter, leave : callable
        Told the label of the function that begins to run, and that it has ended.
    """

    def __init__(self, enter: Callable[[str], None], leave: Callable[[], None]) -> None:
        self._enter = enter
        self._leave = leave
        self._configurations: dict[tuple[Any, ...], tuple[Any, ...]] = {}
        self._newest: tuple[Any, ...] = ()

    def configuration(self) -> tuple[Any, ...]:
        """Return the values of `chainer.config` now; equal ones are one object."""
        try:
            values = _global_values(chainer.global_config.__dict__)
        except KeyError:  # an entry that was deleted: then the class's own value holds
            values = tuple([getattr(chainer.global_config, name) for name in CONFIGURATION])
        local = configuration.config._local.__dict__
        if not _NAMES.isdisjoint(local):
            values = tuple(map(local.get, CONFIGURATION, values))
        if values == self._newest:
            return self._newest
        self._newest = self._configurations.setdefault(values, values)
        return self._newest

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
        copy = _bare_copy(function, application)
        self._enter(f"{type(copy).__name__} (recompute)")
        try:
            configuration = application.configuration
            if configuration is None or self.configuration() == configuration:
                return _forward(copy, inputs, attribute)
            with _configured(configuration):
                return _forward(copy, inputs, attribute)
        finally:
            self._leave()


def _bare_copy(function: Any, application: Application) -> Any:
    needed = (*application.given, *rules.noise_attributes(function))
    held = [getattr(function, name) for name in names_with_holes(function) if name in needed]
    copy: Any = object.__new__(original_class(function))
    copy.__dict__.update(
        (name, value)
        for name, value in function.__dict__.items()
        if name not in _NOT_COPIED and not name.startswith("_dynamemo")
    )
    del held
    for name in rules.side_effect_attributes(function):
        copy.__dict__[name] = None
    return copy


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


def has_cuda() -> bool:
    """Tell whether Chainer can use CuPy. Creates no context."""
    return bool(chainer.backends.cuda.available)
