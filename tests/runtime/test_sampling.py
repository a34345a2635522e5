"""What is measured, and what is only noted weakly while functions run."""

import chainer
import chainer.functions as F
import numpy
import pytest

from dynamemo import Runtime
from dynamemo.chainer_binding.sampling import BURST, PERIOD, Sampler
from dynamemo.graph import CostModel
from dynamemo.recipe import Signature
from tests.runtime.training import PLENTY, no_collector


class Clock:
    """A device whose work takes a second and is known `lag` later."""

    def __init__(self):
        self.is_behind = False
        self.started = 0

    def start_timer(self):
        self.started += 1
        return self.started

    def stop_timer(self, start):
        return self

    def elapsed_s(self):
        return None if self.is_behind else 1.0


class Meter:
    def start_meter(self):
        return (0, 0)

    def stop_meter(self, started):
        return 64


class Kind:
    """A class of functions."""


@pytest.fixture
def clock():
    return Clock()


def run(sampler, signature, times):
    """Apply functions; return how many were measured."""
    measured = 0
    for _ in range(times):
        measurement = sampler.start(Kind)
        if measurement is not None:
            measured += 1
            sampler.stop_timer(measurement)
            sampler.stop_meter(measurement)
        sampler.file(Kind, signature, measurement)
    return measured


class TestSampler:
    def test_measures_all_until_the_cost_is_settled_and_then_few(self, clock):
        sampler, signature = Sampler(clock, Meter(), CostModel()), Signature((Kind,), 0)
        assert run(sampler, signature, BURST) == BURST
        assert signature.is_settled
        assert signature.transient_bytes == 64
        run(sampler, signature, BURST)
        assert run(sampler, signature, 10 * PERIOD) == 10

    def test_a_new_signature_of_the_class_is_measured_the_next_time(self, clock):
        costs = CostModel()
        sampler = Sampler(clock, Meter(), costs)
        run(sampler, Signature((Kind,), 0), 2 * BURST)
        other = Signature((Kind, 1), 0)
        run(sampler, other, 2)
        assert costs.is_measured(other)

    def test_seconds_that_the_device_does_not_know_yet_are_filed_later(self, clock):
        costs, signature = CostModel(), Signature((Kind,), 0)
        sampler = Sampler(clock, Meter(), costs)
        clock.is_behind = True
        run(sampler, signature, 3)
        assert not costs.is_measured(signature)
        clock.is_behind = False
        sampler.settle()
        assert costs.estimate(signature, nbytes=0) == 1.0


def test_what_is_noted_of_functions_is_bounded_by_what_is_alive():
    with no_collector(), Runtime(PLENTY, device="cpu") as runtime:
        places = runtime._manager.look_around.__self__._recording
        x = chainer.Variable(numpy.ones((16, 64), "f"))
        sizes = []
        for _ in range(3):
            for _ in range(1500):
                F.relu(x * 2)
            with chainer.no_backprop_mode():
                for _ in range(1500):
                    F.relu(x)
            sizes.append((len(places._boxes), len(places._functions), len(places._loose)))
        assert max(map(max, sizes)) <= 2 * 1024 + 2
