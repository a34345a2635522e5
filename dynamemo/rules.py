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

from typing import Any

from dynamemo.lazy import original_class

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
    return cls


def is_trusted(function: Any) -> bool:
    """Tell whether the function is known not to write into its inputs."""
    # An old-style function runs inside an adapter of Chainer's.
    cls = original_class(function.__dict__.get("_function", function))
    return cls in _registered or cls.__module__.startswith("chainer.")


def is_repeatable(function: Any) -> bool:
    """Tell whether the function may be applied again."""
    return is_trusted(function) and original_class(function).__name__ not in NOT_REPEATABLE


def is_noise(function: Any, attribute: str) -> bool:
    """Tell whether an attribute is noise that cannot be drawn again."""
    return attribute in NOISE.get(original_class(function).__name__, ())


def noise_attributes(function: Any) -> tuple[str, ...]:
    """Return the attributes that must be there before the function is applied again."""
    return NOISE.get(original_class(function).__name__, ())


def side_effect_attributes(function: Any) -> tuple[str, ...]:
    """Return the attributes to clear before the function is applied again."""
    return SIDE_EFFECTS.get(original_class(function).__name__, ())


def is_checkpoint(function: Any) -> bool:
    """Tell whether the seed's recompute strategies would keep the function's outputs."""
    return original_class(function).__name__ in CHECKPOINTS
