"""Whole models at a size that a test can train on a CPU, each with its own optimizer."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import chainer
import chainer.functions as F
import chainer.links as L
import numpy

from tests.runtime.training import Fingerprint, fingerprint, seed_everything, to_bytes


class LeNet(chainer.Chain):
    """Two convolutions, two poolings, two linear layers (LeCun et al. 1998)."""

    def __init__(self):
        super().__init__()
        with self.init_scope():
            self.c1 = L.Convolution2D(1, 6, 5, pad=2)
            self.c2 = L.Convolution2D(6, 16, 5)
            self.f1 = L.Linear(None, 84)
            self.f2 = L.Linear(84, 10)

    def forward(self, x):
        h = F.max_pooling_2d(F.sigmoid(self.c1(x)), 2)
        h = F.max_pooling_2d(F.sigmoid(self.c2(h)), 2)
        return self.f2(F.tanh(self.f1(h)))


class VGG(chainer.Chain):
    """A short VGG with BatchNormalization and dropout in every block, as in Chainer's example."""

    def __init__(self):
        super().__init__()
        widths = (3, 16, 16, 32, 32)
        with self.init_scope():
            self.convs = chainer.ChainList(
                *[
                    L.Convolution2D(i, o, 3, pad=1, nobias=True)
                    for i, o in itertools.pairwise(widths)
                ]
            )
            self.norms = chainer.ChainList(*[L.BatchNormalization(o) for o in widths[1:]])
            self.fc = L.Linear(None, 64)
            self.norm = L.BatchNormalization(64)
            self.out = L.Linear(64, 10)

    def forward(self, x):
        h = x
        for number, (conv, norm) in enumerate(zip(self.convs, self.norms, strict=True)):
            h = F.dropout(F.relu(norm(conv(h))), 0.3)
            if number % 2:
                h = F.max_pooling_2d(h, 2, 2)
        return self.out(F.dropout(F.relu(self.norm(self.fc(h))), 0.5))


class ResNet50(chainer.Chain):
    """Chainer's own ResNet-50."""

    def __init__(self):
        super().__init__()
        with self.init_scope():
            self.base = L.ResNet50Layers(pretrained_model=None)

    def forward(self, x):
        return self.base(x, layers=["fc6"])["fc6"]


class Embedding(chainer.Chain):
    """An embedding whose gradient is the same in every run.

    On a GPU Chainer sums the gradient of EmbedID with atomic additions, in any order: two runs of
    the same program differ without dynamemo. A product with one-hot rows does not.
    """

    def __init__(self, count, width):
        super().__init__()
        self.count = count
        with self.init_scope():
            self.W = chainer.Parameter(chainer.initializers.Normal(1), (count, width))

    def forward(self, x):
        if self.xp is numpy:
            return F.embed_id(x, self.W)
        rows = self.xp.eye(self.count, dtype="f")[x.ravel()]
        return F.reshape(F.matmul(rows, self.W), (*x.shape, -1))


class StackedLSTM(chainer.Chain):
    """Two stateful LSTM layers over a sequence, one class at the end."""

    def __init__(self):
        super().__init__()
        with self.init_scope():
            self.embed = Embedding(50, 64)
            self.l1 = L.LSTM(64, 96)
            self.l2 = L.LSTM(96, 96)
            self.out = L.Linear(96, 10)

    def forward(self, x):
        self.l1.reset_state()
        self.l2.reset_state()
        for step in range(x.shape[1]):
            h = self.l2(F.dropout(self.l1(self.embed(x[:, step])), 0.2))
        return self.out(h)


class TransformerBlock(chainer.Chain):
    """Self-attention with a mask, layer normalization and a feed-forward part."""

    def __init__(self, width=64, heads=4):
        super().__init__()
        self.heads = heads
        with self.init_scope():
            self.embed = Embedding(50, width)
            self.query = L.Linear(width, width, nobias=True)
            self.key = L.Linear(width, width, nobias=True)
            self.value = L.Linear(width, width, nobias=True)
            self.mix = L.Linear(width, width)
            self.norm1 = L.LayerNormalization(width)
            self.norm2 = L.LayerNormalization(width)
            self.up = L.Linear(width, 4 * width)
            self.down = L.Linear(4 * width, width)
            self.out = L.Linear(width, 10)

    def _split(self, h, n, t):
        h = F.reshape(h, (n, t, self.heads, -1))
        return F.reshape(F.transpose(h, (0, 2, 1, 3)), (n * self.heads, t, -1))

    def forward(self, x):
        n, t = x.shape
        h = F.reshape(self.embed(x), (n * t, -1))
        q, k, v = (self._split(f(h), n, t) for f in (self.query, self.key, self.value))
        scores = F.matmul(q, k, transb=True) * 0.25
        mask = numpy.broadcast_to(numpy.tri(t, dtype=bool), scores.shape)
        mask = self.device.send(numpy.ascontiguousarray(mask))
        scores = F.where(mask, scores, scores.xp.full(scores.shape, -1e9, numpy.float32))
        mixed = F.matmul(F.dropout(F.softmax(scores, axis=2), 0.1), v)
        mixed = F.transpose(F.reshape(mixed, (n, self.heads, t, -1)), (0, 2, 1, 3))
        h = self.norm1(h + F.dropout(self.mix(F.reshape(mixed, (n * t, -1))), 0.1))
        h = self.norm2(h + self.down(F.relu(self.up(h))))
        return self.out(F.mean(F.reshape(h, (n, t, -1)), axis=1))


def _images(channels, size, batch):
    return lambda: numpy.random.standard_normal((batch, channels, size, size)).astype("f")


def _tokens(length, batch):
    return lambda: numpy.random.randint(0, 50, (batch, length)).astype("i")


#: name -> (model, batch maker, optimizer)
MODELS: dict[str, tuple[Callable[[], Any], Callable[[], Any], Callable[[], Any]]] = {
    "lenet": (LeNet, _images(1, 28, 32), lambda: chainer.optimizers.MomentumSGD(0.05)),
    "vgg": (VGG, _images(3, 32, 16), lambda: chainer.optimizers.Adam(0.01)),
    "resnet50": (ResNet50, _images(3, 64, 4), lambda: chainer.optimizers.MomentumSGD(0.01)),
    "lstm": (StackedLSTM, _tokens(12, 64), lambda: chainer.optimizers.AdaGrad(0.05)),
    "transformer": (TransformerBlock, _tokens(24, 16), lambda: chainer.optimizers.Adam(0.001)),
}


def train(name: str, steps: int = 5, device: str = "@numpy") -> Fingerprint:
    """Train a model from a fixed seed with labels at random; return what it leaves behind."""
    make_model, make_batch, make_optimizer = MODELS[name]
    place = seed_everything(1, device)
    model = make_model()
    model.to_device(place)
    optimizer = make_optimizer().setup(model)
    losses = []
    for _ in range(steps):
        x = place.send(make_batch())
        t = place.send(numpy.random.randint(0, 10, len(x)).astype("i"))
        loss = F.softmax_cross_entropy(model(x), t)
        model.cleargrads()
        loss.backward()
        optimizer.update()
        losses.append(to_bytes(loss.array))
    return fingerprint([model], [optimizer], losses)
