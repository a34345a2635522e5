"""Run a training the same way with and without a budget, and take its fingerprint."""

from __future__ import annotations

import contextlib
import gc
import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import chainer
import numpy

import dynamemo

#: Large enough for every test program; mapped, not touched.
PLENTY = 1 << 30


@dataclass(frozen=True)
class Fingerprint:
    """Everything that must be bit-equal between two runs."""

    losses: tuple[bytes, ...]
    gradients: tuple[bytes, ...]
    parameters: tuple[bytes, ...]
    persistents: tuple[bytes, ...]
    optimizer: tuple[bytes, ...]
    random_state: bytes


def to_bytes(value: Any) -> bytes:
    """Hash an array of any device, a number or None."""
    array = numpy.ascontiguousarray(chainer.backends.cuda.to_cpu(value))
    return hashlib.blake2b(array.tobytes() + repr((array.shape, array.dtype)).encode()).digest()


def seed_everything(seed: int, device: str) -> Any:
    """Seed the device's and NumPy's random numbers; return the Chainer device."""
    numpy.random.seed(seed)
    place = chainer.get_device(device)
    place.use()
    if place.xp is not numpy:
        place.xp.random.seed(seed)
    return place


def random_state(place: Any) -> bytes:
    """Hash NumPy's random state and, on a GPU, the numbers that CuPy would draw next."""
    name, keys, *rest = numpy.random.get_state()
    hashed = hashlib.blake2b(keys.tobytes() + repr((name, rest)).encode())
    if place.xp is not numpy:
        hashed.update(to_bytes(place.xp.random.random_sample(4)))
    return hashed.digest()


def fingerprint(models: list[Any], optimizers: list[Any], losses: list[Any]) -> Fingerprint:
    """Take everything that a training step leaves behind."""
    gradients, parameters, persistents, states = [], [], [], []
    for model in models:
        for _, param in sorted(model.namedparams()):
            parameters.append(to_bytes(param.array))
            gradients.append(b"" if param.grad is None else to_bytes(param.grad))
        for path, link in sorted(model.namedlinks()):
            for name in sorted(link._persistent):
                persistents.append(path.encode() + to_bytes(getattr(link, name)))
    for optimizer in optimizers:
        for path, param in sorted(optimizer.target.namedparams()):
            state = param.update_rule.state or {}
            states.append(path.encode() + b"".join(to_bytes(state[k]) for k in sorted(state)))
    return Fingerprint(
        tuple(losses),
        tuple(gradients),
        tuple(parameters),
        tuple(persistents),
        tuple(states),
        random_state(models[0].device),
    )


#: A training: takes nothing, gives its fingerprint. Builds its model from a fixed seed.
Training = Callable[[], Fingerprint]


def run_within(
    training: Training, budget: int, *, device: str = "cpu", **options: Any
) -> tuple[Fingerprint, Any]:
    """Run the training in a runtime; return its fingerprint and the statistics."""
    with dynamemo.Runtime(budget, device=device, **options) as runtime:
        result = training()
    return result, runtime.statistics()


def run_from(
    training: Training, budget: int, *, step: float = 0.05, **options: Any
) -> tuple[Fingerprint, Any]:
    """Run within `budget`, or where that is not feasible within what the errors lead to.

    Each try is at least `step` above the last. The statistics hold the budget that did.
    """
    while True:
        try:
            return run_within(training, budget, **options)
        except dynamemo.OutOfMemoryError as error:
            assert error.budget_bytes == budget
            assert error.feasible_bytes > budget
            budget = max(error.feasible_bytes, int(budget * (1 + step)))


def train_layers(seed: int, *, layers: int, width: int, rows: int, steps: int = 3) -> list[float]:
    """Train linear layers with tanh between them on noise, all from the seed; return the losses."""
    generator = numpy.random.RandomState(seed)
    parts = [(chainer.links.Linear(width, width), chainer.functions.tanh) for _ in range(layers)]
    model = chainer.Sequential(*[part for pair in parts for part in pair])
    for param in model.params():
        param.array = generator.standard_normal(param.shape).astype("f") * numpy.float32(0.1)
    optimizer = chainer.optimizers.MomentumSGD(0.1).setup(model)
    x = generator.standard_normal((rows, width)).astype("f")
    losses = []
    for _ in range(steps):
        loss = chainer.functions.mean(chainer.functions.square(model(x)))
        model.cleargrads()
        loss.backward()
        optimizer.update()
        losses.append(float(loss.array))
        del loss
    return losses


@contextlib.contextmanager
def no_collector() -> Iterator[None]:
    """Switch the cycle collector off, so that only reference counts free things."""
    gc.collect()
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
