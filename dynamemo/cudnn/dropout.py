"""The states that Chainer keeps for dropout, of its own function and inside recurrent layers.

`F.dropout` draws from `cupy.random`, not from cuDNN's generator: the same numbers that Chainer
draws where it uses no cuDNN, so `cupy.random.seed` makes a run repeatable, and the state of
`cupy.random` after it is the same with and without cuDNN. It keeps one byte an element. Recurrent
layers drop between their own steps, inside cuDNN, from its generator and Chainer's seed.
"""

from __future__ import annotations

from typing import Any

from dynamemo.cudnn import context
from dynamemo.cudnn.library import Descriptor

__all__ = ["DropoutStates", "create_dropout_descriptor", "set_dropout_descriptor"]


class DropoutStates:
    """What draws, for one thread and device.

    Parameters
    ----------
    handle : int or None
        Means nothing any more.
    seed : int
        Of cuDNN's generator.
    """

    def __init__(self, handle: int | None, seed: int) -> None:
        self._seed = int(seed) & (2**64 - 1)
        self._memory: Any = None
        self._made: Descriptor | None = None

    @property
    def _desc(self) -> Descriptor:
        """The descriptor, which Chainer's recurrent functions read; its states are made here."""
        if self._made is None:
            handle = context.get_handle()
            nbytes = context.byte_count(context.library.DropoutGetStatesSize, handle)
            self._memory = context.allocate(nbytes)
            self._made = create_dropout_descriptor(
                handle, 0.0, context.address(self._memory), nbytes, self._seed
            )
        return self._made

    @property
    def _states(self) -> Any:
        return self._memory

    def set_dropout_ratio(self, dropout_ratio: float) -> None:
        """Set the ratio of recurrent layers."""
        set_dropout_descriptor(self._desc, context.get_handle(), dropout_ratio)

    def forward(self, handle: int | None, x: Any, dropout_ratio: float) -> tuple[Any, Any]:
        """Drop elements at random.

        Returns
        -------
        tuple of cupy.ndarray
            Which elements stayed, bool, and the output, of the shape of `x`.
        """
        cupy = context.cupy
        random = cupy.random.rand(*x.shape, dtype=cupy.float32)
        is_kept = cupy.empty(x.shape, cupy.bool_)
        y = cupy.empty(x.shape, x.dtype)
        scale = x.dtype.type(1.0 / (1 - dropout_ratio))
        _forward_kernel()(x, random, scale, dropout_ratio, is_kept, y)
        return is_kept, y

    def backward(self, handle: int | None, dy: Any, dropout_ratio: float, states: Any) -> Any:
        """Return the gradient of the input; applied to the input itself, it is the output again."""
        dx = context.cupy.empty(dy.shape, dy.dtype)
        scale = dy.dtype.type(1.0 / (1 - dropout_ratio))
        _backward_kernel()(dy, states, scale, dx)
        return dx


def create_dropout_descriptor(
    handle: int, dropout: float, states: int, state_size_in_bytes: int, seed: int
) -> Descriptor:
    """Return a new descriptor of cuDNN's dropout, over memory for its generator."""
    descriptor: Descriptor = context.library.create("Dropout")
    context.library.SetDropoutDescriptor(
        descriptor.value, handle, dropout, states, state_size_in_bytes, int(seed)
    )
    return descriptor


def set_dropout_descriptor(desc: Descriptor, handle: int, dropout: float) -> None:
    """Change the ratio only: without memory for them, the states of the generator stay."""
    context.library.SetDropoutDescriptor(desc.value, handle, dropout, 0, 0, 0)


_kernels: dict[str, Any] = {}


def _forward_kernel() -> Any:
    if "forward" not in _kernels:
        # The product is of two factors, as in Chainer's kernel, so that it rounds alike.
        _kernels["forward"] = context.cupy.ElementwiseKernel(
            "T x, R r, T scale, T ratio",
            "bool is_kept, T y",
            "is_kept = r >= ratio; T mask = is_kept * scale; y = x * mask;",
            "dynamemo_dropout_forward",
        )
    return _kernels["forward"]


def _backward_kernel() -> Any:
    if "backward" not in _kernels:
        _kernels["backward"] = context.cupy.ElementwiseKernel(
            "T gy, bool is_kept, T scale",
            "T gx",
            "T mask = is_kept * scale; gx = gy * mask;",
            "dynamemo_dropout_backward",
        )
    return _kernels["backward"]
