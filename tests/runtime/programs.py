"""Random Chainer programs: drawn by Hypothesis, run the same way with and without a budget."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import chainer
import chainer.functions as F
import chainer.links as L
import numpy
from hypothesis import strategies as st

from tests.runtime.training import Fingerprint, fingerprint, seed_everything, to_bytes

ROWS, WIDTH = 12, 128


class Scale(chainer.FunctionNode):
    """A user's own function: new style, keeps an attribute of its own."""

    def forward(self, inputs):
        self.double = inputs[0] * 2
        self.retain_outputs((0,))
        return (self.double + 1,)

    def backward(self, indexes, grad_outputs):
        return (grad_outputs[0] * 2 * float(self.double.size > 0),)


class OverwriteInPlace(chainer.Function):
    """An old-style function that writes into its input and returns it, as thin stacks do."""

    def forward(self, inputs):
        (x,) = inputs
        x *= 0.5
        return (x,)

    def backward(self, inputs, grad_outputs):
        return (
            grad_outputs[0]
            * numpy.float32(0.5)
            * chainer.backend.get_array_module(inputs[0]).sign(inputs[0]) ** 2,
        )


class Net(chainer.Chain):
    """The layers that programs share between their steps."""

    def __init__(self):
        super().__init__()
        with self.init_scope():
            self.a = L.Linear(WIDTH, WIDTH)
            self.b = L.Linear(WIDTH, WIDTH)
            self.norm = L.BatchNormalization(WIDTH)
            self.conv = L.Convolution2D(2, 2, 3, pad=1)
            self.scale = L.Scale(axis=1, W_shape=(WIDTH,), bias_term=True)


def _image(x):
    return F.reshape(x, (ROWS, 2, 8, WIDTH // 16))


UNARY = {
    "linear_a": lambda net, x: net.a(x),
    "linear_b": lambda net, x: net.b(x),
    "relu": lambda net, x: F.relu(x),
    "tanh": lambda net, x: F.tanh(x),
    "sigmoid": lambda net, x: F.sigmoid(x),
    "dropout": lambda net, x: F.dropout(x, 0.3),
    "zoneout": lambda net, x: F.zoneout(x, x * 0.5, 0.3),
    "gaussian": lambda net, x: F.gaussian(x, F.tanh(x) * 0.1),
    "rrelu": lambda net, x: F.rrelu(x),
    "norm": lambda net, x: net.norm(x),
    "softmax": lambda net, x: F.softmax(x) * 3,
    "log_softmax": lambda net, x: F.log_softmax(x),
    "layer_norm": lambda net, x: F.layer_normalization(x, net.scale.W, net.scale.bias.b),
    "scale": lambda net, x: net.scale(x),
    "convolution": lambda net, x: F.reshape(net.conv(_image(x)), (ROWS, WIDTH)),
    "pooling": lambda net, x: F.reshape(F.max_pooling_2d(_image(x), 3, 1, 1), (ROWS, WIDTH)),
    "unpool": lambda net, x: F.reshape(
        F.unpooling_2d(F.average_pooling_2d(_image(x), 2), 2, outsize=(8, WIDTH // 16)),
        (ROWS, WIDTH),
    ),
    "transpose": lambda net, x: F.transpose(F.reshape(x, (WIDTH, ROWS))),
    "halves": lambda net, x: F.concat(F.split_axis(x, 2, axis=1)[::-1], axis=1),
    "slice": lambda net, x: F.concat((x[:, WIDTH // 2 :], x[:, : WIDTH // 2] * 2), axis=1),
    "user_function": lambda net, x: Scale().apply((x,))[0],
    "in_place": lambda net, x: OverwriteInPlace()(x + 0),
    "written_by_user": lambda net, x: _written(F.tanh(x)),
    "weight_times": lambda net, x: F.matmul(x, F.transpose(net.a.W)),
}

BINARY = {
    "add": lambda net, x, y: x + y,
    "multiply": lambda net, x, y: x * F.sigmoid(y),
    "maximum": lambda net, x, y: F.maximum(x, y),
    "fork_join": lambda net, x, y: net.a(x) + net.a(y),
}


def _written(h):
    """What a user may do: change an output's array by hand."""
    h.array[:, 0] = 0.25
    return h


@dataclass(frozen=True)
class Program:
    """Steps over a growing list of values, and what is done with the results."""

    #: (name, operand, operand), operands counted back from the newest value.
    steps: tuple[tuple[str, int, int], ...]
    #: How losses are made and run backward.
    ending: str
    iterations: int
    #: Values that the user keeps in variables, by index.
    kept: tuple[int, ...]
    seed: int


ENDINGS = (
    "one_loss",
    "two_losses",
    "update_between",
    "backward_twice",
    "gradient_penalty",
    "grad_then_backward",
    "clip_between",
    "truncated",
)


def programs() -> st.SearchStrategy[Program]:
    """Draw programs; they shrink to short ones with one loss."""
    operand = st.integers(0, 5)
    step = st.tuples(st.sampled_from(sorted(UNARY) + sorted(BINARY)), operand, operand)
    return st.builds(
        Program,
        steps=st.lists(step, min_size=2, max_size=12).map(tuple),
        ending=st.sampled_from(ENDINGS),
        iterations=st.integers(1, 3),
        kept=st.lists(st.integers(0, 11), max_size=2, unique=True).map(tuple),
        seed=st.integers(0, 3),
    )


def _forward(program: Program, net: Any, x: Any) -> tuple[list[Any], list[Any]]:
    values, kept = [net.a(x)], []
    for number, (name, first, second) in enumerate(program.steps):
        a = values[-1 - first % len(values)]
        if name in UNARY:
            value = UNARY[name](net, a)
        else:
            value = BINARY[name](net, a, values[-1 - second % len(values)])
        values.append(value)
        if number in program.kept:
            kept.append(value)
    return values, kept


def _loss(value: Any) -> Any:
    return F.mean_squared_error(value, value.xp.zeros(value.shape, value.dtype))


def run(program: Program, device: str = "@numpy") -> Fingerprint:
    """Run the program from its seed on a Chainer device; return what it leaves behind."""
    place = seed_everything(program.seed, device)
    net = Net()
    net.to_device(place)
    optimizer = chainer.optimizers.Adam(0.01).setup(net)
    batch = place.xp.empty((ROWS, WIDTH), numpy.float32)
    losses: list[Any] = []
    state = None
    for _ in range(program.iterations):
        # The same buffer every time, as a loader with a reused buffer does.
        batch[...] = place.send(numpy.random.standard_normal(batch.shape).astype("f"))
        x = chainer.Variable(batch)
        values, kept = _forward(program, net, x if state is None else x + state)
        last, other = values[-1], values[len(values) // 2]
        del values
        state = _finish(program.ending, net, optimizer, last, other, losses)
        losses.extend(to_bytes(value.array) for value in kept)
        if program.ending != "truncated":
            state = None
        del last, other
        optimizer.update()
    return fingerprint([net], [optimizer], losses)


def _finish(ending: str, net: Any, optimizer: Any, last: Any, other: Any, losses: list[Any]) -> Any:
    net.cleargrads()
    if ending == "one_loss":
        loss = _loss(last)
        loss.backward()
    elif ending == "two_losses":
        loss, second = _loss(last), _loss(other)
        second.backward()
        loss.backward()
    elif ending == "update_between":
        loss, second = _loss(last), _loss(other)
        loss.backward()
        optimizer.update()
        second.backward()
    elif ending == "clip_between":
        loss, second = _loss(last), _loss(other)
        loss.backward()
        for param in net.params():
            param.array[...] = param.xp.clip(param.array, -0.01, 0.01)
        second.backward()
    elif ending == "backward_twice":
        loss = _loss(last)
        loss.backward()
        loss.cleargrad()
        loss.backward()
    elif ending in ("gradient_penalty", "grad_then_backward"):
        loss = _loss(last)
        double = ending == "gradient_penalty"
        try:
            (gradient,) = chainer.grad([loss], [net.a.W], enable_double_backprop=double)
        except RuntimeError:
            gradient = None  # an old-style function is on the way
        if gradient is not None and double:
            loss = loss + F.sum(gradient * gradient)
        _backward_if_possible(loss, losses)
    else:
        loss = _loss(last)
        loss.backward()
        loss.unchain_backward()
        losses.append(to_bytes(loss.array))
        return F.tanh(last)
    losses.append(to_bytes(loss.array))
    return None


def _backward_if_possible(loss: Any, losses: list[Any]) -> None:
    try:
        loss.backward()
    except (AttributeError, RuntimeError) as error:
        # Chainer's own refusal for old-style functions, and its own fault in the second gradient of
        # a maximum; equal in both runs.
        losses.append(str(error).splitlines()[0].encode())
