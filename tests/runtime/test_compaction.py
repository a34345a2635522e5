"""What stays long is moved together: the holes that cleared gradients leave become one run."""

import itertools

import chainer
import chainer.functions as F
import chainer.links as L
import numpy
import pytest

import dynamemo

WIDTH, DEPTH = 256, 8
WEIGHT_BYTES = 4 * WIDTH * WIDTH


def train(iterations=4, each=lambda model: None):
    """Train parameters that lie beside the gradients that they began with."""
    numpy.random.seed(0)
    layers = [part for _ in range(DEPTH) for part in (L.Linear(WIDTH, WIDTH), F.tanh)]
    model = chainer.Sequential(*layers)
    optimizer = chainer.optimizers.MomentumSGD(1e-3).setup(model)
    x = numpy.random.default_rng(0).standard_normal((2048, WIDTH), "f")
    for _ in range(iterations):
        loss = F.mean(F.square(model(x)))
        model.cleargrads()
        each(model)
        loss.backward()
        optimizer.update()
        del loss
    return [param.array.tobytes() for _, param in sorted(model.namedparams())]


def peak_bytes():
    with dynamemo.Runtime("1GiB", device="cpu", policy="none") as runtime:
        train(1)
    return runtime.statistics().peak_bytes


def weights_of(runtime):
    """Return the offsets of the weights' blocks, without gradients and momentum, highest first."""
    blocks = [
        storage.block
        for storage in runtime._manager.storages()
        if storage.is_leaf and storage.block and storage.nbytes == WEIGHT_BYTES
    ]
    return sorted((block.offset for block in blocks), reverse=True)


@pytest.mark.parametrize(
    ("policy", "share"), [("cost-aware", 0.6), ("offload", 0.6), ("recompute", 0.8)]
)
def test_parameters_move_together_where_memory_is_short(policy, share):
    expected = train()
    budget = int(share * peak_bytes())
    with dynamemo.Runtime(budget, device="cpu", policy=policy) as runtime:
        assert train() == expected
        offsets = weights_of(runtime)
    assert runtime.statistics().moved_bytes >= DEPTH * WEIGHT_BYTES // 2
    # One behind the other; they were made with a gradient of the same length behind each.
    top = offsets[: DEPTH // 2 + 1]
    assert max(high - low for high, low in itertools.pairwise(top)) < 1.1 * WEIGHT_BYTES


def test_nothing_moves_where_memory_is_not_short():
    with dynamemo.Runtime("1GiB", device="cpu") as runtime:
        train()
    assert runtime.statistics().moved_bytes == 0


def test_an_array_that_somebody_holds_stays_where_it_is():
    """Invariant 3, and 1: whoever holds it sees every update."""
    held = []

    def hold(model):
        held[:] = [param.array for param in model.params()]

    with dynamemo.Runtime(int(0.6 * peak_bytes()), device="cpu") as runtime:
        after = train(each=hold)
        addresses = {array.__array_interface__["data"][0] for array in held}
    assert sorted(array.tobytes() for array in held) == sorted(after)
    assert len(addresses) == 2 * DEPTH
    assert runtime.statistics().moved_bytes < runtime.statistics().peak_bytes
