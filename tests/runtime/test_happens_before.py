"""No copy races with anything (Invariants 1, 3): vector clocks see it, whatever the bytes.

And the checker sees what it is for: each way to forget an order in the runtime is caught.
"""

import random

import chainer
import chainer.functions as F
import chainer.links as L
import hypothesis
import numpy
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dynamemo.allocator import DONE, Tier
from dynamemo.allocator.host_tier import HostTier
from dynamemo.transfers import Transfers
from tests.runtime.happens_before import CheckedDevice, CheckedMark, Checker, Lane
from tests.runtime.programs import programs, run
from tests.runtime.training import (
    PLENTY,
    fingerprint,
    run_from,
    run_within,
    seed_everything,
    to_bytes,
)

SLOW = [hypothesis.HealthCheck.too_slow]
KIB = 1 << 10


def checked_device(seed):
    return CheckedDevice(None if seed is None else random.Random(seed))


def run_or_reject(program):
    """Run without a runtime. Chainer itself cannot differentiate some `maximum` twice."""
    try:
        return run(program)
    except AttributeError:
        hypothesis.reject()


def run_watched(training, device, budget, **options):
    def watched():
        with device.watching():
            return training()

    return run_from(watched, budget, step=0.25, device=device, **options)


# -- no races ------------------------------------------------------------------------------------


@settings(max_examples=20, suppress_health_check=SLOW)
@given(
    program=programs(),
    policy=st.sampled_from(("offload", "lru", "cost-aware")),
    share=st.floats(0, 1),
    seed=st.none() | st.integers(0, 1000),
)
def test_no_race_within_a_budget(program, policy, share, seed):
    reference = run_or_reject(program)
    _, figures = run_within(lambda: run(program), PLENTY, policy="none")
    budget = int(figures.peak_bytes * (0.4 + 0.4 * share))
    device = checked_device(seed)
    result, _ = run_watched(lambda: run(program), device, budget, policy=policy)
    assert not device.checker.races
    assert result == reference


@settings(max_examples=40, suppress_health_check=SLOW)
@given(program=programs(), seed=st.none() | st.integers(0, 1000))
def test_no_race_when_everything_moves(program, seed):
    reference = run_or_reject(program)
    device = checked_device(seed)
    result, figures = run_watched(
        lambda: run(program), device, PLENTY, policy="torture", verify=True
    )
    assert not device.checker.races
    assert result == reference
    assert figures.offloaded_bytes > 0


@settings(max_examples=15, suppress_health_check=SLOW)
@given(program=programs(), seed=st.integers(0, 1000))
def test_no_race_where_the_host_is_short(program, seed):
    """Places and slabs are used again and given back; the tier is full at times."""
    reference = run_or_reject(program)
    device = CheckedDevice(random.Random(seed), slab_bytes=16 * KIB)
    result, _ = run_watched(
        lambda: run(program), device, PLENTY, policy="torture", host_budget=96 * KIB
    )
    assert not device.checker.races
    assert result == reference


# -- what the checker sees -----------------------------------------------------------------------

ROWS, WIDTH, DEPTH = 64, 256, 8


class BrokenOffError(Exception):
    """A user's own error, in the middle of backward."""


class Interrupting(chainer.FunctionNode):
    """The identity, until somebody interrupts its backward."""

    is_armed = False

    def forward(self, inputs):
        return (inputs[0].copy(),)

    def backward(self, indexes, grad_outputs):
        if self.is_armed:
            raise BrokenOffError
        return grad_outputs


def train(iterations=4):
    """Train; every other backward is given up half way, while values are on their way back."""
    seed_everything(0, "@numpy")
    layers = [L.Linear(WIDTH, WIDTH) for _ in range(DEPTH)]
    model = chainer.Sequential(*layers)
    optimizer = chainer.optimizers.MomentumSGD(0.01).setup(model)
    losses = []
    for iteration in range(iterations):
        h = chainer.Variable(numpy.random.standard_normal((ROWS, WIDTH)).astype("f"))
        for number, layer in enumerate(layers):
            h = F.tanh(layer(h))
            if number == DEPTH // 2:
                interrupting = Interrupting()
                (h,) = interrupting.apply((h,))
        interrupting.is_armed = iteration % 2 == 1
        loss = F.sum(h * h)
        del h, interrupting
        model.cleargrads()
        try:
            loss.backward()
        except BrokenOffError as error:
            error.__traceback__ = None
        else:
            optimizer.update()
        losses.append(to_bytes(loss.array))
        del loss
    return fingerprint([model], [optimizer], losses)


#: Parts of the peak that are there: values leave early, come back ahead of need, and are given up;
#: which of it happens depends on how blocks lie.
SHARES = (0.8, 0.65, 0.5)


def races_of(policy="offload", seed=None):
    _, figures = run_within(train, PLENTY, policy="none")
    races = []
    for share in SHARES:
        device = checked_device(seed)
        run_watched(train, device, int(figures.peak_bytes * share), policy=policy)
        races += device.checker.races
    return races


@pytest.mark.parametrize("seed", [None, 0, 1])
@pytest.mark.parametrize("policy", ["offload", "lru", "cost-aware", "torture"])
def test_the_fixed_training_has_no_race(policy, seed):
    assert races_of(policy, seed) == []


@pytest.mark.parametrize(
    ("name", "story"),
    [
        ("let_go", "is of a value"),
        ("fetch", "the reader of what came back"),
        ("cancel", "the new owner"),
    ],
)
def test_a_forgotten_hold_is_seen(name, story, monkeypatch):
    original = getattr(Transfers, name)

    def without_hold(*arguments):
        with monkeypatch.context() as inside:
            inside.setattr(CheckedMark, "hold_compute", lambda mark: None)
            return original(*arguments)

    monkeypatch.setattr(Transfers, name, without_hold)
    races = races_of()
    assert any(story in race for race in races), races


def places_free_at_once(monkeypatch):
    def discard(tier, ticket):
        ticket.tier = None
        tier._tickets -= 1
        tier._drop(ticket.place)

    monkeypatch.setattr(Tier, "discard", discard)


def dead_targets_not_kept(monkeypatch):
    original = Transfers.prefetch

    def prefetch(transfers, storage, make_room, leaves_room):
        begun = original(transfers, storage, make_room, leaves_room)
        transfers._coming.clear()
        return begun

    monkeypatch.setattr(Transfers, "prefetch", prefetch)


@pytest.mark.parametrize(
    ("forget", "story"),
    [(places_free_at_once, "may write"), (dead_targets_not_kept, "the new owner")],
)
def test_what_dies_under_a_copy_is_seen(forget, story, monkeypatch):
    forget(monkeypatch)
    races = races_of()
    assert any(story in race for race in races), races


# -- the tier by itself: here nothing but the ticket orders the copies -----------------------------


@pytest.fixture
def checked():
    device = CheckedDevice()
    return device, device.make_pool(1 << 20), device.make_host_tier(1 << 20)


def test_a_load_comes_behind_its_store(checked):
    device, pool, tier = checked
    block, other = pool.allocate(4096), pool.allocate(4096)
    ticket = tier.store(block.address, 4096)
    tier.load(ticket, other.address)
    assert not device.checker.races


def test_a_load_that_does_not_wait_for_its_store_is_seen(checked, monkeypatch):
    original = HostTier._get
    monkeypatch.setattr(
        HostTier,
        "_get",
        lambda tier, place, address, nbytes, *, after: original(
            tier, place, address, nbytes, after=DONE
        ),
    )
    device, pool, tier = checked
    block, other = pool.allocate(4096), pool.allocate(4096)
    ticket = tier.store(block.address, 4096)
    tier.load(ticket, other.address)
    assert "before copy 1" in device.checker.races[0]


def test_a_place_is_given_to_others_only_behind_its_last_copy(checked):
    device, pool, tier = checked
    block, other = pool.allocate(4096), pool.allocate(4096)
    ticket = tier.store(block.address, 4096)
    tier.load(ticket, other.address)
    tier.discard(ticket)
    tier.discard(tier.store(block.address, 4096))
    tier.close()
    assert not device.checker.races


def test_a_slab_that_is_given_back_under_a_copy_is_seen(checked):
    device, pool, tier = checked
    tier.store(pool.allocate(4096).address, 4096)
    tier._slabs[0].memory.close()
    assert "the end of a slab" in device.checker.races[0]


# -- the clocks ----------------------------------------------------------------------------------


def access(checker, lane, *behind):
    return checker.begin(lane, lane.name, *(checker.clocks[other] for other in behind))


def test_accesses_of_different_lanes_are_ordered_by_a_clock_alone():
    checker = Checker()
    checker.writes(checker.device, 0, 100, access(checker, Lane.COMPUTE))
    checker.reads(checker.device, 50, 10, access(checker, Lane.IN, Lane.COMPUTE))
    assert not checker.races
    checker.reads(checker.device, 90, 20, access(checker, Lane.OUT))
    assert checker.races == ["OUT (out 1) may come to 0x5a before COMPUTE (compute 1) has written"]


def test_only_bytes_that_both_touch_count():
    checker = Checker()
    checker.writes(checker.device, 0, 100, access(checker, Lane.IN))
    checker.writes(checker.device, 100, 50, access(checker, Lane.COMPUTE))
    checker.reads(checker.device, 200, 50, access(checker, Lane.COMPUTE))
    assert not checker.races
    checker.writes(checker.device, 99, 1, access(checker, Lane.COMPUTE))
    assert checker.count == 1


def test_what_the_host_waited_for_is_known_to_all():
    checker = Checker()
    checker.writes(checker.device, 0, 100, access(checker, Lane.IN))
    checker.join(Lane.HOST, checker.clocks[Lane.IN])
    checker.writes(checker.device, 0, 100, access(checker, Lane.COMPUTE))
    assert not checker.races


@pytest.mark.parametrize("is_read_first", [False, True])
def test_a_torn_copy_harms_only_its_reader(is_read_first):
    device = CheckedDevice()
    pool, tier = device.make_pool(1 << 20), device.make_host_tier(1 << 20)
    source, target = pool.allocate(4096), pool.allocate(4096)
    ticket = tier.store(source.address, 4096)
    if is_read_first:
        tier.load(ticket, target.address)
    pool.free(source)
    pool.allocate(4096)  # into the same place, and nothing was held
    if not is_read_first:
        assert not device.checker.races
        tier.load(ticket, target.address)
    assert "torn" in device.checker.races[0]


def test_the_end_of_a_copy_stays_seen():
    device = CheckedDevice(random.Random(0))
    pool, tier = device.make_pool(1 << 20), device.make_host_tier(1 << 20)
    source = pool.allocate(4096)
    first = tier.store(source.address, 4096).written
    last = tier.store(source.address, 4096).written
    seen = [last.is_done for _ in range(40)]
    assert seen == sorted(seen)
    assert {False, True} == set(seen)
    assert first.is_done
    pool.free(source)
    pool.allocate(4096)
    assert not device.checker.races
