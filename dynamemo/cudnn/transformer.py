"""The spatial transformer's grid and sampler, as Chainer calls them: by addresses."""

from __future__ import annotations

from typing import Any

from dynamemo.cudnn import context
from dynamemo.cudnn.library import Descriptor

__all__ = [
    "create_spatial_transformer_descriptor",
    "spatialTfGridGeneratorBackward",
    "spatialTfGridGeneratorForward",
    "spatialTfSamplerBackward",
    "spatialTfSamplerForward",
]


def create_spatial_transformer_descriptor(
    sampler_type: int,
    dtype: Any,
    nb_dims: int,
    dim_A: int,  # noqa: N803
) -> Descriptor:
    """Return a new descriptor; `dim_A` is the host address of the output's shape, int32."""
    descriptor: Descriptor = context.library.create("SpatialTransformer")
    context.library.SetSpatialTransformerNdDescriptor(
        descriptor.value, sampler_type, context.get_data_type(dtype), nb_dims, dim_A
    )
    return descriptor


def spatialTfGridGeneratorForward(*arguments: int) -> None:  # noqa: N802
    """Compute the grid: handle, descriptor, theta, grid."""
    context.library.SpatialTfGridGeneratorForward(*arguments)


def spatialTfGridGeneratorBackward(*arguments: int) -> None:  # noqa: N802
    """Compute the gradient of theta: handle, descriptor, gradient of the grid, of theta."""
    context.library.SpatialTfGridGeneratorBackward(*arguments)


def spatialTfSamplerForward(*arguments: int) -> None:  # noqa: N802
    """Sample: handle, descriptor, 1, x and its descriptor, grid, 0, y's descriptor and y."""
    context.library.SpatialTfSamplerForward(*arguments)


def spatialTfSamplerBackward(*arguments: int) -> None:  # noqa: N802
    """Compute the gradients of the input and of the grid, in cuDNN's order of arguments."""
    context.library.SpatialTfSamplerBackward(*arguments)
