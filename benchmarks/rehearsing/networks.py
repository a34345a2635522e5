"""Trainings to be rehearsed: Chainer's own networks, and some of shapes that it has none of."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy

CLASSES = 1000


@dataclass(frozen=True, slots=True)
class Options:
    """What a training is made from."""

    batch: int
    #: Pixels of a side of an image; tokens of a sequence for a transformer.
    size: int = 224


class Training:
    """A model on the device, its batch, its optimizer, and what one step does."""

    def __init__(
        self, model: Any, batch: tuple[Any, ...], loss: Callable[..., Any], optimizer: Any
    ) -> None:
        from benchmarks.rehearsing.stand_in_cupy import asarray

        model.to_device("@cupy:0")
        self.model = model
        self._batch = tuple(asarray(array) for array in batch)
        self._loss = loss
        self.optimizer = optimizer.setup(model)

    def step(self) -> None:
        """Train once."""
        loss = self._loss(self.model, *self._batch)
        self.model.cleargrads()
        loss.backward()
        self.optimizer.update()


def _classification(model: Any, options: Options, logits: Callable[..., Any]) -> Training:
    import chainer
    import chainer.functions as F

    x = numpy.empty((options.batch, 3, options.size, options.size), "f")
    t = numpy.empty(options.batch, "i")

    def loss(model: Any, x: Any, t: Any) -> Any:
        return F.softmax_cross_entropy(logits(model, x), t)

    return Training(model, (x, t), loss, chainer.optimizers.MomentumSGD(lr=0.001))


def _chainers_own(name: str, layer: str) -> Callable[[Options], Training]:
    def make(options: Options) -> Training:
        import chainer.links as L

        model = getattr(L, name)(pretrained_model=None)
        return _classification(model, options, lambda m, x: m(x, layers=[layer])[layer])

    return make


#: Makes a training, by the name that the command line knows.
NETWORKS: dict[str, Callable[[Options], Training]] = {
    "resnet50": _chainers_own("ResNet50Layers", "fc6"),
    "resnet101": _chainers_own("ResNet101Layers", "fc6"),
    "resnet152": _chainers_own("ResNet152Layers", "fc6"),
    "vgg16": _chainers_own("VGG16Layers", "fc8"),
}
