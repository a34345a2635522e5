"""Runtimes of several devices in one process, each in its own thread; threads beside training."""

import threading

import chainer
import chainer.functions as F
import chainer.links as L
import numpy
import pytest

import dynamemo
from dynamemo.device import HostDevice
from tests.runtime.training import train_layers

ROWS, WIDTH = 256, 64


class Device(HostDevice):
    """The CPU under another name: NumPy's memory is each thread's own matter."""

    def __init__(self, name):
        super().__init__()
        self.name = name


def train(seed):
    return train_layers(seed, layers=6, width=WIDTH, rows=ROWS)


SEAMS = (
    (chainer.FunctionNode, "apply"),
    (chainer.optimizer.UpdateRule, "update"),
    (chainer.optimizer.Optimizer, "call_hooks"),
)


def seams():
    return [cls.__dict__[name] for cls, name in SEAMS]


@pytest.mark.parametrize("leaves_first", [0, 1])
def test_two_runtimes_of_two_devices(leaves_first):
    """Each thread has its own budget; whoever leaves first takes nothing from the other."""
    expected = [train(seed) for seed in range(2)]
    before = seams()
    both_entered = threading.Barrier(2)
    first_left = threading.Event()
    results, statistics, errors = {}, {}, []

    def work(number):
        try:
            with dynamemo.Runtime("700KiB", device=Device(f"cpu:{number}")) as runtime:
                both_entered.wait(60)
                if number != leaves_first:
                    first_left.wait(60)
                results[number] = train(number)
            statistics[number] = runtime.statistics()
        except BaseException as error:
            errors.append(error)
        finally:
            if number == leaves_first:
                first_left.set()

    threads = [threading.Thread(target=work, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    assert [results[0], results[1]] == expected
    for figures in statistics.values():
        assert figures.dropped_bytes + figures.offloaded_bytes > 0
        assert figures.peak_bytes <= figures.budget_bytes
    assert seams() == before


def test_one_device_has_one_runtime():
    raised = []

    def enter():
        try:
            dynamemo.Runtime("1MiB", device="cpu").__enter__()
        except dynamemo.DynamemoError as error:
            raised.append(str(error))

    with dynamemo.Runtime("1MiB", device="cpu"):
        thread = threading.Thread(target=enter)
        thread.start()
        thread.join()
    assert "already active for cpu" in raised[0]


def test_one_thread_has_one_runtime():
    with (
        dynamemo.Runtime("1MiB", device="cpu"),
        pytest.raises(dynamemo.DynamemoError, match="in this thread"),
    ):
        dynamemo.Runtime("1MiB", device=Device("cpu:1")).__enter__()


def test_an_optimizer_in_another_thread_tells_the_runtime():
    """A parameter that changes elsewhere while a dropped tensor needs its old value."""

    def gradient(update):
        layer = L.Linear(WIDTH, WIDTH, initialW=numpy.eye(WIDTH, dtype="f"))
        optimizer = chainer.optimizers.SGD(0.5).setup(layer)
        x = chainer.Variable(numpy.full((ROWS, WIDTH), 0.5, "f"))
        layer.W.grad, layer.b.grad = numpy.ones_like(layer.W.array), numpy.ones_like(layer.b.array)
        loss = F.sum(F.exp(F.tanh(layer(x))))
        update(optimizer)
        loss.backward()
        return x.grad

    def elsewhere(optimizer):
        thread = threading.Thread(target=optimizer.update)
        thread.start()
        thread.join()

    expected = gradient(lambda optimizer: optimizer.update())
    with dynamemo.Runtime("64MiB", device="cpu", policy="torture"):
        result = gradient(elsewhere).copy()
    numpy.testing.assert_array_equal(result, expected)
