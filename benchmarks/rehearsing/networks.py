"""Trainings to be rehearsed: Chainer's own networks, and some of shapes that it has none of."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy

CLASSES = 1000
VOCABULARY = 32_000


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


def alexnet(options: Options) -> Training:
    """Make AlexNet with both of its normalisations, as SuperNeurons measured it."""
    import chainer
    import chainer.functions as F
    import chainer.links as L

    def stage(*parts: Any) -> Any:
        return chainer.Sequential(*parts)

    model = stage(
        *(L.Convolution2D(3, 96, 11, 4, 2), F.relu, F.local_response_normalization),
        lambda h: F.max_pooling_2d(h, 3, 2),
        *(L.Convolution2D(96, 256, 5, pad=2), F.relu, F.local_response_normalization),
        lambda h: F.max_pooling_2d(h, 3, 2),
        *(L.Convolution2D(256, 384, 3, pad=1), F.relu),
        *(L.Convolution2D(384, 384, 3, pad=1), F.relu),
        *(L.Convolution2D(384, 256, 3, pad=1), F.relu),
        lambda h: F.max_pooling_2d(h, 3, 2),
        *(L.Linear(None, 4096), F.relu, F.dropout),
        *(L.Linear(4096, 4096), F.relu, F.dropout),
        L.Linear(4096, CLASSES),
    )
    return _classification(model, options, lambda model, x: model(x))


def densenet121(options: Options) -> Training:
    """Make DenseNet: a layer reads all earlier ones of its stage, by concatenation."""
    import chainer
    import chainer.functions as F
    import chainer.links as L

    class Layer(chainer.Chain):
        def __init__(self, channels: int, growth: int) -> None:
            super().__init__()
            with self.init_scope():
                self.norm1 = L.BatchNormalization(channels)
                self.conv1 = L.Convolution2D(channels, 4 * growth, 1, nobias=True)
                self.norm2 = L.BatchNormalization(4 * growth)
                self.conv2 = L.Convolution2D(4 * growth, growth, 3, pad=1, nobias=True)

        def forward(self, x: Any) -> Any:
            h = self.conv1(F.relu(self.norm1(x)))
            return F.concat((x, self.conv2(F.relu(self.norm2(h)))))

    growth, channels = 32, 64
    parts: list[Any] = [
        *(L.Convolution2D(3, channels, 7, 2, 3, nobias=True), L.BatchNormalization(channels)),
        *(F.relu, lambda h: F.max_pooling_2d(h, 3, 2, 1)),
    ]
    for number, layers in enumerate((6, 12, 24, 16)):
        if number:
            parts += [L.BatchNormalization(channels), F.relu]
            parts += [L.Convolution2D(channels, channels // 2, 1, nobias=True)]
            parts += [lambda h: F.average_pooling_2d(h, 2)]
            channels //= 2
        for _ in range(layers):
            parts.append(Layer(channels, growth))
            channels += growth
    parts += [L.BatchNormalization(channels), F.relu]
    parts += [lambda h: F.average_pooling_2d(h, h.shape[2:]), L.Linear(channels, CLASSES)]
    return _classification(chainer.Sequential(*parts), options, lambda model, x: model(x))


def transformer(options: Options) -> Training:
    """Make a decoder of twelve layers, 768 wide, over `size` tokens, trained with Adam."""
    import chainer
    import chainer.functions as F
    import chainer.links as L

    width, heads, depth, tokens = 768, 12, 12, options.size

    def gelu(x: Any) -> Any:
        return 0.5 * x * (1 + F.erf(x * 0.7071067811865476))

    class Block(chainer.Chain):
        def __init__(self) -> None:
            super().__init__()
            with self.init_scope():
                self.norm1, self.norm2 = L.LayerNormalization(width), L.LayerNormalization(width)
                self.joint, self.out = L.Linear(width, 3 * width), L.Linear(width, width)
                self.wide, self.narrow = L.Linear(width, 4 * width), L.Linear(4 * width, width)

        def forward(self, x: Any) -> Any:
            x = x + F.dropout(self.out(self.attend(self.norm1(x))), 0.1)
            return x + F.dropout(self.narrow(gelu(self.wide(self.norm2(x)))), 0.1)

        def attend(self, x: Any) -> Any:
            shape = (-1, tokens, 3, heads, width // heads)
            joint = F.transpose(F.reshape(self.joint(x), shape), (2, 0, 3, 1, 4))
            query, key, value = (joint[number] for number in range(3))
            scores = F.matmul(query, key, transb=True) * (width // heads) ** -0.5
            weights = F.dropout(F.softmax(scores, axis=3), 0.1)
            mixed = F.transpose(F.matmul(weights, value), (0, 2, 1, 3))
            return F.reshape(mixed, (-1, width))

    class Decoder(chainer.Chain):
        def __init__(self) -> None:
            super().__init__()
            with self.init_scope():
                self.embed = L.EmbedID(VOCABULARY, width)
                self.blocks = chainer.ChainList(*(Block() for _ in range(depth)))
                self.norm = L.LayerNormalization(width)
                self.head = L.Linear(width, VOCABULARY)

        def forward(self, ids: Any) -> Any:
            x = F.reshape(self.embed(ids), (-1, width))
            for block in self.blocks:
                x = block(x)
            return self.head(self.norm(x))

    def loss(model: Any, ids: Any, t: Any) -> Any:
        return F.softmax_cross_entropy(model(ids), t)

    ids = numpy.empty((options.batch, tokens), "i")
    t = numpy.empty(options.batch * tokens, "i")
    return Training(Decoder(), (ids, t), loss, chainer.optimizers.Adam())


#: Makes a training, by the name that the command line knows.
NETWORKS: dict[str, Callable[[Options], Training]] = {
    "alexnet": alexnet,
    "densenet121": densenet121,
    "googlenet": _chainers_own("GoogLeNet", "loss3_fc"),
    "resnet50": _chainers_own("ResNet50Layers", "fc6"),
    "resnet101": _chainers_own("ResNet101Layers", "fc6"),
    "resnet152": _chainers_own("ResNet152Layers", "fc6"),
    "transformer": transformer,
    "vgg16": _chainers_own("VGG16Layers", "fc8"),
}
