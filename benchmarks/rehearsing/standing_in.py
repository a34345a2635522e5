"""Put the stand-ins in Chainer's way, as if CuPy and cuDNN had been there when it was loaded.

Chainer's own classes run their own code for a GPU: what they retain and keep as attributes is right
without being written down again. Only names that its modules got from CuPy are changed.

1. After the context every name of Chainer's is what it was before.
"""

from __future__ import annotations

import contextlib
import importlib
import sys
import types
from collections.abc import Iterator
from typing import Any

from benchmarks.rehearsing import stand_in_cupy
from benchmarks.rehearsing.gpu import Gpu, in_force
from benchmarks.rehearsing.phantom import Device, Phantom
from benchmarks.rehearsing.stand_in_cudnn import VERSION, cudnn, libcudnn

_FUNCTIONS = "chainer.functions."
#: What modules of Chainer read of cuDNN when they are loaded, beside the two modules and the
#: version.
_CONSTANTS = {
    "activation.relu": {"_mode": libcudnn.CUDNN_ACTIVATION_RELU},
    "activation.clipped_relu": {"_mode": libcudnn.CUDNN_ACTIVATION_CLIPPED_RELU},
    "activation.sigmoid": {"_mode": libcudnn.CUDNN_ACTIVATION_SIGMOID},
    "activation.tanh": {"_mode": libcudnn.CUDNN_ACTIVATION_TANH},
    "activation.softmax": {"_algorithm": libcudnn.CUDNN_SOFTMAX_ACCURATE},
    "activation.log_softmax": {"_algorithm": libcudnn.CUDNN_SOFTMAX_LOG},
}
#: Modules that read the two modules or the version when they are loaded.
_USERS = (
    *("pooling.max_pooling_nd", "pooling.average_pooling_nd", "pooling.pooling_nd"),
    *("pooling.pooling_2d", "noise.dropout", "connection.convolution_2d"),
    *("connection.deconvolution_2d", "connection.convolution_nd", "connection.deconvolution_nd"),
    *("normalization.batch_normalization", "normalization.group_normalization"),
)
_MISSING = object()


class _Names:
    """Names that are changed, and what they were."""

    def __init__(self) -> None:
        self._former: list[tuple[Any, str, Any]] = []

    def put(self, owner: Any, **values: Any) -> None:
        for name, value in values.items():
            self._former.append((owner, name, owner.__dict__.get(name, _MISSING)))
            setattr(owner, name, value)

    def restore(self) -> None:
        while self._former:
            owner, name, value = self._former.pop()
            if value is _MISSING:
                delattr(owner, name)
            else:
                setattr(owner, name, value)


@contextlib.contextmanager
def standing_in(gpu: Gpu) -> Iterator[None]:
    """Let Chainer meet the rehearsed GPU for the time of the context.

    Parameters
    ----------
    gpu : Gpu
        Whose memory and clock it is.
    """
    names = _Names()
    try:
        _replace(names)
        with in_force(gpu):
            yield
    finally:
        names.restore()


def _replace(names: _Names) -> None:
    import chainer

    cuda = chainer.backends.cuda
    driver = types.SimpleNamespace(**vars(stand_in_cupy.cuda), cudnn=libcudnn)
    names.put(
        cuda,
        available=True,
        cudnn_enabled=True,
        cupy=stand_in_cupy.cupy,
        cupyx=stand_in_cupy.cupyx,
        cuda=driver,
        ndarray=Phantom,
        Device=Device,
        Event=driver.Event,
        Stream=driver.Stream,
        cudnn=cudnn,
        libcudnn=libcudnn,
        _cudnn_version=VERSION,
        _cudnn_disabled_by_user=False,
    )
    names.put(cuda.GpuDevice, xp=stand_in_cupy.cupy, supported_array_types=(Phantom,))
    names.put(chainer, _array_types=None, _cpu_array_types=None)
    names.put(chainer.initializers, generate_array=_array_without_values)
    for name in {*_CONSTANTS, *_USERS}:
        constants = _CONSTANTS.get(name, {})
        module = importlib.import_module(_FUNCTIONS + name)
        names.put(module, cudnn=cudnn, libcudnn=libcudnn, _cudnn_version=VERSION, **constants)
    relu = sys.modules[_FUNCTIONS + "activation.relu"]
    kernel = stand_in_cupy.ElementwiseKernel("T y, T gy", "T gx", "", "relu_bwd")
    names.put(relu, _relu_grad2_kernel=kernel)
    for rule in _update_rules(chainer):
        kernels = [name for name in vars(rule) if name.startswith("_") and name.endswith("kernel")]
        names.put(rule, **dict.fromkeys(kernels))


def _update_rules(chainer: Any) -> list[type]:
    """Return the classes that keep their kernel."""
    found = [chainer.optimizer.UpdateRule]
    for rule in found:
        found += rule.__subclasses__()
    return found[1:]


def _array_without_values(
    initializer: Any, shape: Any, xp: Any, dtype: Any = None, device: Any = None
) -> Any:
    """Make a parameter's array and let it be: nobody reads its values."""
    import chainer

    kind = chainer.get_dtype(getattr(initializer, "dtype", None) if dtype is None else dtype)
    return xp.empty(shape, dtype=kind)
