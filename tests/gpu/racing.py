"""A small network with everything that moves, trained step by step for the race tests."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import Any

import chainer
import chainer.functions as F
import chainer.links as L
import numpy

#: What a step left behind: the hash of each array, by its name.
Step = dict[str, bytes]


class Net(chainer.Chain):
    """Convolutions, normalisation, a shortcut, a shared layer, dropout."""

    def __init__(self) -> None:
        super().__init__()
        with self.init_scope():
            self.first = L.Convolution2D(3, 32, 3, pad=1)
            self.norm = L.BatchNormalization(32)
            self.shared = L.Convolution2D(32, 32, 3, pad=1, nobias=True)
            self.norm2 = L.BatchNormalization(32)
            self.last = L.Linear(None, 10)

    def forward(self, x: Any) -> Any:
        h = F.relu(self.norm(self.first(x)))
        for _ in range(3):
            h = h + F.relu(self.norm2(self.shared(h)))
        h = F.dropout(F.max_pooling_2d(h, 2), 0.3)
        return self.last(h)


class _Images(chainer.dataset.DatasetMixin):
    """Random images, worked out when they are asked for: in the loader's threads."""

    def __len__(self) -> int:
        return 1 << 20

    def get_example(self, i: int) -> tuple[Any, Any]:
        draw = numpy.random.RandomState(i)
        return draw.standard_normal((3, 32, 32)).astype("f"), numpy.int32(draw.randint(10))


def steps(count: int, batch: int = 64, place: str = "@cupy:0") -> Iterator[Step]:
    """Train with data from other threads; yield what each step leaves behind."""
    device = chainer.get_device(place)
    device.use()
    numpy.random.seed(0)
    if device.xp is not numpy:
        device.xp.random.seed(0)
    model = Net()
    model.to_device(device)
    optimizer = chainer.optimizers.MomentumSGD(0.01).setup(model)
    batches = chainer.iterators.MultithreadIterator(_Images(), batch, shuffle=False, n_threads=2)
    try:
        with chainer.using_config("cudnn_deterministic", True):
            for _ in range(count):
                x, t = chainer.dataset.concat_examples(next(batches), device)
                loss = F.softmax_cross_entropy(model(x), t)
                model.cleargrads()
                loss.backward()
                optimizer.update()
                yield _left_behind(model, loss)
                del x, t, loss
    finally:
        batches.finalize()


def first_difference(step: Step, expected: Step) -> str | None:
    """Return the name of an array that differs; losses come first, then gradients."""
    assert step.keys() == expected.keys()
    return next((name for name in expected if step[name] != expected[name]), None)


def _left_behind(model: Any, loss: Any) -> Step:
    params = sorted(model.namedparams())
    arrays = {"loss": loss.array}
    arrays |= {f"gradient of {name}": param.grad for name, param in params}
    arrays |= {name: param.array for name, param in params}
    for name, link in sorted(model.namedlinks()):
        arrays |= {f"{name}/{key}": link.__dict__[key] for key in sorted(link._persistent)}
    hashes = {}
    for name, array in arrays.items():
        array = numpy.ascontiguousarray(chainer.backends.cuda.to_cpu(array))
        hashes[name] = hashlib.blake2b(array.tobytes(), digest_size=16).digest()
    return hashes
