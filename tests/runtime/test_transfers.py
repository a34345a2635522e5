"""The timeline of copies stays with the device, however little of its work is measured."""

import chainer
import chainer.functions as F
import chainer.links as L
import numpy

from dynamemo import Runtime
from dynamemo.allocator import HostTier
from dynamemo.device import HostDevice
from dynamemo.transfers import Timeline

WIDTH = 256


def test_a_copy_waits_for_the_one_before_it():
    timeline = Timeline()
    assert timeline.begin_out(2.0) == 2.0
    assert timeline.begin_out(1.0) == 3.0
    assert timeline.begin_in(1.0, after_s=3.0) == 4.0
    assert timeline.wait(3.0)
    assert not timeline.wait(2.5)
    assert timeline.now_s == 3.0


def test_what_has_ended_is_no_longer_ahead():
    timeline = Timeline()
    timeline.begin_out(2.0)
    timeline.begin_in(5.0)
    timeline.now_s = 1.0
    timeline.end_out()
    timeline.end_in()
    assert timeline.begin_out(1.0) == timeline.begin_in(1.0) == 2.0


def test_it_does_not_fall_behind_more_with_every_iteration():
    class Prompt(HostDevice):
        """Functions and copies take no time, so only the figures of the copies move."""

        name = "prompt"
        has_host_tier = True

        def make_host_tier(self, limit_bytes):
            return HostTier(self.copier, limit_bytes)

        def stop_timer(self, start):
            return super().stop_timer(self.start_timer())

    numpy.random.seed(0)
    parts = [part for _ in range(8) for part in (L.Linear(WIDTH, WIDTH), F.tanh)]
    model = chainer.Sequential(*parts)
    optimizer = chainer.optimizers.SGD(0.1).setup(model)
    x = numpy.random.RandomState(1).standard_normal((512, WIDTH)).astype("f")

    def step():
        loss = F.mean(F.square(model(x)))
        model.cleargrads()
        loss.backward()
        optimizer.update()

    with Runtime("256MiB", device="cpu", policy="none") as accounting:
        step()
    budget = int(0.6 * accounting.statistics().peak_bytes)
    with Runtime(budget, device=Prompt(), policy="offload") as runtime:
        timeline = runtime._manager.transfers.timeline
        ahead_s = []
        for _ in range(8):
            step()
            runtime._manager.transfers.reap()
            ahead_s.append(timeline.out_free_s - timeline.now_s)
    assert max(ahead_s[4:]) <= max(ahead_s[:4]) + 1e-9
    assert runtime.statistics().offloaded_bytes > 0
