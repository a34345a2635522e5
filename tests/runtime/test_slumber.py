"""Where everything fits the runtime looks away; when memory becomes short it makes up for it."""

import gc

import chainer
import chainer.functions as F
import chainer.links as L
import numpy
import pytest

import dynamemo
from dynamemo.chainer_binding.slumber import LEAST_ITERATIONS

CALM = LEAST_ITERATIONS + 4
WIDTH = 256


class Net(chainer.Chain):
    def __init__(self):
        super().__init__()
        with self.init_scope():
            self.layers = chainer.ChainList(*[L.Linear(WIDTH, WIDTH) for _ in range(6)])
            self.norms = chainer.ChainList(*[L.BatchNormalization(WIDTH) for _ in range(6)])

    def forward(self, x):
        for layer, norm in zip(self.layers, self.norms, strict=True):
            x = F.dropout(F.relu(norm(layer(x))), 0.2) + x
        return F.mean(F.square(x))


def train(rows, *, each=lambda step: None):
    """Train on batches of so many rows; return the losses and the parameters' sums."""
    numpy.random.seed(0)
    model = Net()
    optimizer = chainer.optimizers.Adam(1e-3).setup(model)
    draw = numpy.random.RandomState(1)
    losses = []
    for step, count in enumerate(rows):
        loss = model(draw.standard_normal((count, WIDTH)).astype("f"))
        model.cleargrads()
        loss.backward()
        optimizer.update()
        losses.append(float(loss.array))
        each(step)
        del loss
    return losses, [param.array.tobytes() for _, param in sorted(model.namedparams())]


def runtime_of(budget, **options):
    return dynamemo.Runtime(budget, device="cpu", **options)


def peak_of(rows):
    with runtime_of("1GiB", policy="none") as runtime:
        train([rows] * 2)
    return runtime.statistics().peak_bytes


def test_it_sleeps_where_everything_fits_and_counts_on():
    asleep = []

    def each(step):
        asleep.append(runtime._binding.slumber.is_asleep)

    expected = train([64] * CALM)
    with runtime_of("1GiB") as runtime:
        assert train([64] * CALM, each=each) == expected
        assert runtime.statistics().iterations == CALM
    assert asleep[0] is False
    assert asleep[-3:] == [True] * 3
    assert "dynamemo" not in chainer.get_function_hooks()


@pytest.mark.parametrize("policy", ["cost-aware", "offload", "lru"])
def test_a_batch_that_no_longer_fits_wakes_it(policy):
    """Invariants 1, 2 and 5: in that very iteration, and all that come after."""
    rows = [64] * CALM + [4096] * 4 + [64] * CALM + [4096] * 2
    expected = train(rows)
    budget = int(0.75 * peak_of(4096))
    woken = []
    with runtime_of(budget, policy=policy) as runtime:

        def each(step):
            woken.append(not runtime._binding.slumber.is_asleep)

        assert train(rows, each=each) == expected
        figures = runtime.statistics()
    assert not woken[CALM - 1]
    assert woken[CALM]
    assert not all(woken[CALM + 4 : 2 * CALM + 4]), "it sleeps again when it is calm"
    assert woken[-1]
    assert figures.offloaded_bytes > 0
    assert figures.peak_bytes <= budget


def test_what_was_written_into_meanwhile_is_never_computed_again():
    """Invariant 1: the array that backward reads is the one that was changed."""

    def run():
        numpy.random.seed(0)
        x = chainer.Variable(numpy.random.standard_normal((512, 1024)).astype("f"))
        for _ in range(CALM):
            F.sum(F.square(F.sin(x))).backward()
        kept, h = [], x
        for number in range(12):
            h = F.tanh(h * 0.9)
            if number == 3:
                h.array[...] = 0.5
            kept.append(h)
        x.cleargrad()
        h = F.sum(F.square(h))
        del kept
        h.backward()
        return x.grad.tobytes()

    expected = run()
    with runtime_of("16MiB") as runtime:
        assert run() == expected
    figures = runtime.statistics()
    assert figures.offloaded_bytes + figures.dropped_bytes > 0


def test_the_graph_dies_without_the_collector_while_it_sleeps():
    """Invariant 6."""
    seen = []
    gc.disable()
    try:
        with runtime_of("1GiB") as runtime:

            def each(step):
                seen.append(runtime.statistics().current_bytes)

            train([64] * (CALM + 20), each=each)
            assert len(runtime._binding.slumber._functions) < 2000
    finally:
        gc.enable()
    assert len(set(seen[-15:])) == 1


def test_out_of_memory_while_it_sleeps_names_the_function():
    x = None
    with pytest.raises(dynamemo.OutOfMemoryError) as caught, runtime_of("64MiB") as runtime:
        train([64] * CALM)
        assert runtime._binding.slumber.is_asleep
        x = numpy.zeros((40_000, WIDTH), "f")
        F.relu(x)
    assert caught.value.function == "ReLU"
    assert x.nbytes == 40_960_000


def test_a_policy_that_cannot_copy_does_not_sleep():
    with runtime_of("1GiB", policy="recompute") as runtime:
        train([64] * CALM)
        assert not runtime._binding.slumber.is_asleep
