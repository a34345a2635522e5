"""Which functions may be applied a second time, and what has to be cut off when they are.

A recompute calls `forward` of a copy of the function again. That is right only where the result
depends on nothing but the inputs, the attributes set before the first call and Chainer's
configuration. Chainer's own functions are so, but for those named here; functions that a user
defined are not assumed to be (`register_recomputable` says so).

What was found in Chainer 7.8.1: Dropout, Gaussian, RReLU and SimplifiedDropconnect keep their
noise and use it again; Zoneout draws anew; BatchNormalization and its decorrelated kin move
their running statistics on every call.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

from dynamemo.lazy import class_behind

#: Functions whose result is not a function of their inputs, by class name.
NOT_REPEATABLE = frozenset(
    {
        "Zoneout",
        "Forget",
        "NegativeSamplingFunction",
        "StaticScheduleFunction",
        "MultiNodeBatchNormalizationFunction",
        "FunctionAdapter",
        "Copy",
        "ScatterAdd",
    }
)

#: Attributes that hold the noise a function drew: they are copied to a tier, never dropped, and
#: have to be there when the function is applied again.
NOISE = {
    "Dropout": ("mask", "states"),
    "Gaussian": ("eps",),
    "RReLU": ("r",),
    "SimplifiedDropconnect": ("mask",),
}

#: Attributes to clear in the copy so that the second call has no effect outside of it.
SIDE_EFFECTS = {
    "BatchNormalization": ("running_mean", "running_var"),
    "DecorrelatedBatchNormalization": ("running_mean", "running_projection"),
}

#: The seed's checkpoints (Wang et al. 2018, section 3.4): outputs that its recompute never drops.
CHECKPOINTS = frozenset(
    {
        "Convolution2DFunction",
        "ConvolutionND",
        "Deconvolution2DFunction",
        "DeconvolutionND",
        "LinearFunction",
        "MatMul",
        "BilinearFunction",
        "LocalConvolution2DFunction",
    }
)

_registered: set[type] = set()

#: Classes whose traits are remembered.
_MOST_CLASSES = 4096


@dataclass(frozen=True, slots=True)
class Traits:
    """What is known of a class of functions."""

    #: The class's own name, and what its backward is called in messages.
    label: str
    backward_label: str
    #: Known not to write into its inputs; of an adapter the function inside it decides.
    is_trusted: bool
    #: Chainer's adapter of an old-style function.
    is_adapter: bool
    #: Named among the functions that must not be applied again.
    is_barred: bool
    #: Applying it a second time right away gives what the first time would have given.
    has_second_try: bool
    noise: tuple[str, ...]
    side_effects: tuple[str, ...]
    is_checkpoint: bool
    #: May be applied again.
    is_repeatable: bool


def traits_of(function: Any) -> Traits:
    """Return what is known of the function's class."""
    cls: Any = type(function)
    return traits_of_class(cls)


@functools.lru_cache(_MOST_CLASSES)
def traits_of_class(cls: type) -> Traits:
    """Return what is known of a class of functions."""
    cls = class_behind(cls)
    name = cls.__name__
    is_trusted = cls in _registered or cls.__module__.startswith("chainer.")
    return Traits(
        label=name,
        backward_label=f"{name} (backward)",
        is_trusted=is_trusted,
        is_adapter=name == "FunctionAdapter",
        is_barred=name in NOT_REPEATABLE,
        has_second_try=name not in NOT_REPEATABLE and name not in NOISE,
        noise=NOISE.get(name, ()),
        side_effects=SIDE_EFFECTS.get(name, ()),
        is_checkpoint=name in CHECKPOINTS,
        is_repeatable=is_trusted and name not in NOT_REPEATABLE,
    )


def register_recomputable(cls: type) -> type:
    """Declare that a user-defined function may be applied again to rebuild its outputs.

    The result has to depend only on the inputs, on attributes set before the first call and on
    Chainer's own entries of `chainer.config` (`train`, `dtype`, the cuDNN flags), and `forward`
    must not write into its inputs.

    Parameters
    ----------
    cls : type
        A subclass of `chainer.FunctionNode`. Usable as a decorator.

    Returns
    -------
    type
        The class itself.
    """
    _registered.add(cls)
    traits_of_class.cache_clear()
    return cls


def is_trusted(function: Any) -> bool:
    """Tell whether the function is known not to write into its inputs."""
    # An old-style function runs inside an adapter of Chainer's.
    traits = traits_of(function)
    if traits.is_adapter:
        traits = traits_of(function.__dict__.get("_function", function))
    return traits.is_trusted


def is_repeatable(function: Any) -> bool:
    """Tell whether the function may be applied again."""
    # An old-style function's adapter is barred, whatever is inside.
    return traits_of(function).is_repeatable


def is_noise(function: Any, attribute: str) -> bool:
    """Tell whether an attribute is noise that cannot be drawn again."""
    return attribute in traits_of(function).noise


def noise_attributes(function: Any) -> tuple[str, ...]:
    """Return the attributes that must be there before the function is applied again."""
    return traits_of(function).noise


def side_effect_attributes(function: Any) -> tuple[str, ...]:
    """Return the attributes to clear before the function is applied again."""
    return traits_of(function).side_effects


def is_checkpoint(function: Any) -> bool:
    """Tell whether the seed's recompute strategies would keep the function's outputs."""
    return traits_of(function).is_checkpoint
