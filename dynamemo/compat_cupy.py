"""Mend what CuPy 14 breaks in Chainer 7.8.1.

Covers four things: kernels that add half-precision values atomically, ``F.clip`` with limits that
are NumPy scalars, the gradient of ``F.prelu`` with half precision, and a warning that asks for a
cuDNN which CuPy 14 cannot use. Reads no CuPy and no Chainer at import: each mend is handed the
module of Chainer that has just been loaded (`dynamemo.compat` does that), and each acts only when
Chainer itself has found CuPy 14 or later. Convolution without cuDNN is not a matter of this module.

1. Without CuPy, or with an older one, every module of Chainer is left as it was.
2. A mend changes no result that was right before: only what raised, had another type, or lost
   more precision than Chainer's own tests allow.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any

import numpy as np

#: The first major version of CuPy that follows NumPy 2 and has no cuDNN.
FIRST_MENDED_MAJOR = 14

#: CuPy 14's atomicAdd for half precision is a template of one type: it does not take the float that
#: a product of two halves is. This overload rounds it to half precision, as CuPy did before. It is
#: a template too, so that a kernel without half precision need not know the type.
HALF_ATOMIC_ADD = """
template <typename T, typename V, typename = typename cupy::type_traits::enable_if<
    cupy::type_traits::is_same<T, float16>::value &&
    !cupy::type_traits::is_same<T, V>::value>::type>
__device__ T atomicAdd(T* address, V value) {
    return atomicAdd(address, T(static_cast<float>(value)));
}
"""


def _mend_backend(module: ModuleType) -> None:
    """Let half-precision kernels with ``atomicAdd`` compile, and ask for no cuDNN.

    The kernels are those of negative sampling, hierarchical softmax and ``F.resize_images``.
    """
    cuda: Any = module
    if not _is_mended(cuda):
        return
    elementwise = cuda.elementwise

    @functools.wraps(elementwise)
    def elementwise_with_half_atomics(
        in_params: str, out_params: str, operation: str, name: str, **kwargs: Any
    ) -> Any:
        if "atomicAdd(" in operation:
            kwargs["preamble"] = HALF_ATOMIC_ADD + kwargs.get("preamble", "")
        return elementwise(in_params, out_params, operation, name, **kwargs)

    cuda.elementwise = elementwise_with_half_atomics
    cuda.check_cuda_available._already_warned = True


def _mend_clip(module: ModuleType) -> None:
    """Give ``F.clip`` the type of its input where a limit is a NumPy scalar of a wider type."""

    def mend(clip_class: Any) -> None:
        forward_gpu = clip_class.forward_gpu

        @functools.wraps(forward_gpu)
        def forward_in_type_of_input(self: Any, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
            (y,) = forward_gpu(self, inputs)
            return (y.astype(inputs[0].dtype, copy=False),)

        clip_class.forward_gpu = forward_in_type_of_input

    chainer_clip: Any = module
    if _is_mended(chainer_clip.cuda):
        mend(chainer_clip.Clip)


def _mend_prelu(module: ModuleType) -> None:
    """Sum the gradient of ``F.prelu``'s slope in single precision where arrays are in half.

    CuPy 14 adds half-precision values up in half precision where it reduces through CUB.
    """
    prelu: Any = module
    if not _is_mended(prelu.cuda):
        return
    gradient_class = prelu.PReLUFunctionGrad
    forward_gpu = gradient_class.forward_gpu

    @functools.wraps(forward_gpu)
    def forward_with_wide_sum(self: Any, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        x, slope, gy = inputs
        if self.reduce_axes is None or x.dtype != np.float16:
            return forward_gpu(self, inputs)  # type: ignore[no-any-return]
        self.retain_inputs((0, 1, 2))
        products = prelu.cuda.elementwise(
            "T x, T cond, T gy",
            "float32 product",
            "product = cond >= 0 ? 0.0f : static_cast<float>(x) * static_cast<float>(gy)",
            "prelu_slope_products",
        )(x, self.cond, gy)
        slope_gradient = products.sum(axis=self.reduce_axes).astype(x.dtype)
        gx = prelu._fwd_kern()(gy, self.cond, slope.reshape(self.extended_shape))
        return gx, slope_gradient

    gradient_class.forward_gpu = forward_with_wide_sum


def _is_mended(cuda: Any) -> bool:
    """Tell whether Chainer has found a CuPy that needs mending."""
    return bool(cuda.available) and cuda._cupy_major >= FIRST_MENDED_MAJOR


#: For each module of Chainer, what is done to it once it has been loaded.
MENDS: Mapping[str, Callable[[ModuleType], None]] = {
    "chainer.backends.cuda": _mend_backend,
    "chainer.functions.activation.prelu": _mend_prelu,
    "chainer.functions.math.clip": _mend_clip,
}
