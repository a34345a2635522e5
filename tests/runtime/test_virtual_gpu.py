"""What a GPU would lose to the copies, by a clock that is worked out: nothing is timed.

A chain of matrix products takes its virtual seconds, the link its own. Where the link is fast
enough, copies are hidden behind the work from the second iteration on; where it is not, the loss is
near what it allows.
"""

import functools
import itertools

import chainer
import chainer.functions as F
import chainer.links as L
import numpy
import pytest

import dynamemo
from dynamemo.allocator import numpy_records
from tests.runtime.training import PLENTY
from tests.runtime.virtual_gpu import Seconds, VirtualCopier, VirtualDevice

ROWS, WIDTH, DEPTH = 1024, 128, 12
#: Seconds of a matrix product, with 4096 rows of 32768 on an H200.
PRODUCT_S, OTHER_S = 22e-3, 0.3e-3
#: Our arrays are so many times shorter, and so is what the link moves in a second.
SCALE = 4096 * 32768 / (ROWS * WIDTH)
#: PCIe 5 as measured on an H200, and links that are too slow for these products.
FAST, SLOW, SLOWER = (rate / SCALE for rate in (55e9, 12e9, 5e9))


@pytest.fixture(autouse=True)
def frees_are_seen_at_once(monkeypatch):
    """As on a GPU. NumPy's are found by looking at a few flags at a time, where tests before this
    one have left many.
    """
    monkeypatch.setattr(numpy_records, "_PAGES_PER_LOOK", 1 << 20)


def seconds_of(function):
    return PRODUCT_S if "Linear" in type(function).__name__ else OTHER_S


def train(clock, iterations, begin=lambda iteration: None):
    """Train; return the losses, and the virtual seconds of each iteration."""
    numpy.random.seed(0)
    # First, and without temporaries: on a GPU the batch does not lie in the middle of the arena.
    x = numpy.random.default_rng(0).standard_normal((ROWS, WIDTH), "f")
    layers = [part for _ in range(DEPTH) for part in (L.Linear(WIDTH, WIDTH), F.relu)]
    model = chainer.Sequential(*layers)
    optimizer = chainer.optimizers.SGD(1e-4).setup(model)
    losses, marks_s = [], [clock.now_s]
    with Seconds(clock, seconds_of):
        for iteration in range(iterations):
            begin(iteration)
            loss = F.mean(F.square(model(x)))
            model.cleargrads()
            loss.backward()
            optimizer.update()
            losses.append(float(loss.array))
            del loss
            marks_s.append(clock.now_s)
    return losses, [later - earlier for earlier, later in itertools.pairwise(marks_s)]


@functools.cache
def stock(iterations):
    """Return the losses without a runtime, the seconds of an iteration, and the peak."""
    losses, seconds = train(VirtualCopier(FAST), iterations)
    with dynamemo.Runtime(PLENTY, device="cpu", policy="none") as runtime:
        train(VirtualCopier(FAST), 1)
    return losses, seconds[-1], runtime.statistics().peak_bytes


class Run:
    """A training within a share of its peak on a virtual GPU."""

    def __init__(self, bytes_per_s, share, *, iterations=5, at=None, policy="offload"):
        losses, self.stock_s, peak_bytes = stock(iterations)
        self.device = VirtualDevice(bytes_per_s)
        #: Statistics at the beginning of each iteration and at the end.
        self.statistics = []

        def begin(iteration):
            self.statistics.append(self.runtime.statistics())
            if at is not None:
                at(self.device.clock, iteration)

        self.runtime = dynamemo.Runtime(int(peak_bytes * share), device=self.device, policy=policy)
        with self.runtime:
            result, seconds = train(self.device.clock, iterations, begin)
            self.statistics.append(self.runtime.statistics())
        assert result == losses
        #: What each iteration took more than without a runtime, as a part of that.
        self.loss = [taken_s / self.stock_s - 1 for taken_s in seconds]
        #: What the copies of all that is over the budget take, one way.
        self.missing_s = (1 - share) * peak_bytes / bytes_per_s

    def each(self, name):
        """Return a statistic's growth in each iteration."""
        values = [getattr(figures, name) for figures in self.statistics]
        return [later - earlier for earlier, later in itertools.pairwise(values)]


@pytest.mark.parametrize("share", [0.8, 0.6, 0.5])
def test_copies_are_hidden_from_the_second_iteration_on(share):
    run = Run(FAST, share)
    assert max(run.loss[1:]) <= 0.03
    # A parameter now and then is not foreseen.
    assert sum(run.each("late_bytes")) <= 0.03 * sum(run.each("fetched_bytes"))
    assert run.statistics[-1].recomputed_functions == 0
    assert all(run.each("offloaded_bytes"))


def test_nothing_that_was_prefetched_is_given_up_again():
    assert Run(FAST, 0.6).statistics[-1].cancelled_bytes == 0


@pytest.mark.parametrize(("share", "most"), [(0.45, 0.03), (0.43, 0.05), (0.41, 0.065)])
@pytest.mark.parametrize("policy", ["offload", "cost-aware"])
def test_prefetch_goes_on_where_memory_is_tight(share, most, policy):
    """At 0.41, a backward and one more value just fit until the gradients take that value's room.

    A loss of 0.093 would mean that the device waits for each copy in.
    """
    run = Run(FAST, share, iterations=8, policy=policy)
    assert max(run.loss[1:]) <= most + 0.02  # while plans are still being made
    assert max(run.loss[5:]) <= most
    assert sum(run.each("late_bytes")[1:]) <= 0.02 * sum(run.each("fetched_bytes")[1:])
    assert sum(run.each("cancelled_bytes")[1:]) <= 0.03 * sum(run.each("prefetched_bytes")[1:])


@pytest.mark.parametrize("rate", [SLOW, SLOWER])
@pytest.mark.parametrize("share", [0.8, 0.6])
def test_a_slow_link_costs_no_more_than_waiting_once_for_each_byte(rate, share):
    run = Run(rate, share)
    moved_bytes = run.each("offloaded_bytes")[-1] + run.each("fetched_bytes")[-1]
    assert max(run.loss[2:]) <= moved_bytes / rate / run.stock_s + 0.1


@pytest.mark.parametrize("rate", [SLOW, SLOWER])
@pytest.mark.parametrize("share", [0.8, 0.6])
def test_on_a_slow_link_the_loss_is_near_what_the_link_allows(rate, share):
    """What is over the budget has to leave during forward and to come back during backward."""
    run = Run(rate, share)
    forward_s = DEPTH * (PRODUCT_S + OTHER_S)
    backward_s = run.stock_s - forward_s
    allowed_s = max(0.0, run.missing_s - forward_s) + max(0.0, run.missing_s - backward_s)
    assert max(run.loss[2:]) <= allowed_s / run.stock_s + 0.1


def test_estimates_follow_a_link_that_is_shared_from_now_on():
    def share_it(clock, iteration):
        if iteration == 3:
            clock.bytes_per_s = FAST / 2

    run = Run(FAST, 0.6, iterations=7, at=share_it)
    before, after = run.statistics[3], run.statistics[-1]
    assert before.out_bytes_per_s == pytest.approx(FAST, rel=0.05)
    assert before.in_bytes_per_s == pytest.approx(FAST, rel=0.05)
    assert after.out_bytes_per_s == pytest.approx(FAST / 2, rel=0.1)
    assert after.in_bytes_per_s == pytest.approx(FAST / 2, rel=0.1)
    assert run.loss[-1] <= 0.03
