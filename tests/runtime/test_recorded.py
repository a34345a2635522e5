"""A trace of a real training can be planned: it has seconds, what can be copied or made again."""

import chainer
import chainer.functions as F
import chainer.links as L
import numpy
import pytest

import dynamemo
from dynamemo.cli import main
from dynamemo.graph import LinkRate, Phase, Planner, StorageKind, problem_of
from dynamemo.graph.trace_json import loads
from tests.runtime.training import PLENTY

ROWS, WIDTH, DEPTH = 128, 192, 4
LINK = LinkRate(1e9, 1e-5)


class Doubled(chainer.FunctionNode):
    """A user's own function: nobody said that it may be applied again."""

    def forward(self, inputs):
        return (inputs[0] * 2,)

    def backward(self, indexes, grad_outputs):
        return (grad_outputs[0] * 2,)


class Net(chainer.Chain):
    def __init__(self):
        super().__init__()
        with self.init_scope():
            self.layers = chainer.ChainList(*[L.Linear(WIDTH, WIDTH) for _ in range(DEPTH)])
            self.norms = chainer.ChainList(*[L.BatchNormalization(WIDTH) for _ in range(DEPTH)])

    def forward(self, x):
        for layer, norm in zip(self.layers, self.norms, strict=True):
            x = F.dropout(F.relu(norm(layer(x))), 0.2) + x
        return F.mean(F.square(Doubled().apply((x,))[0]))


def trained(budget=PLENTY, *, iterations=3):
    """Train within a budget; return the runtime after it was left."""
    numpy.random.seed(0)
    with dynamemo.Runtime(budget, device="cpu") as runtime:
        model = Net()
        optimizer = chainer.optimizers.SGD(1e-3).setup(model)
        for _ in range(iterations):
            optimizer.update(model, numpy.random.standard_normal((ROWS, WIDTH)).astype("f"))
    return runtime


@pytest.fixture(scope="module")
def runtime():
    return trained()


@pytest.mark.parametrize("iterations", [3, 12])  # the longer one looks away in the end
def test_every_operation_has_seconds(iterations):
    trace = trained(iterations=iterations).trace()
    trace.validate()
    forward = [o for o in trace.operations if o.phase is Phase.FORWARD]
    assert len(forward) == 5 * DEPTH + 3
    assert len(trace.operations) == 2 * len(forward)
    assert all(operation.elapsed_s > 0 for operation in trace.operations)


def test_what_may_be_made_again(runtime):
    trace = runtime.trace()
    by_label = {}
    for operation in trace.operations:
        if operation.phase is Phase.FORWARD:
            by_label.setdefault(operation.label, []).append(operation)
    assert all(o.is_repeatable for o in by_label["ReLU"] + by_label["BatchNormalization"])
    assert not by_label["Doubled"][0].is_repeatable
    # The first sum reads the batch, which nobody keeps for backward: who knows where it is?
    assert [o.is_repeatable for o in by_label["_ + _"]] == [False] + [True] * (DEPTH - 1)
    noise = {storage.id for storage in trace.storages if storage.is_noise}
    assert noise == {id for o in by_label["Dropout"] for id in o.attributes}
    # What a function read that its backward does not: the normalization's output.
    normalized = [id for o in by_label["BatchNormalization"] for id in o.outputs]
    assert [id for o in by_label["ReLU"] for id in o.inputs] == normalized
    problem = problem_of(trace, LINK, LINK)
    index_of = {tensor.key: index for index, tensor in enumerate(problem.tensors)}
    for relu, linear in zip(by_label["ReLU"], by_label["LinearFunction"], strict=True):
        rebuild = problem.tensors[index_of[relu.outputs[0]]].rebuild
        assert rebuild.sources == (index_of[linear.outputs[0]],)
        assert rebuild.elapsed_s > 0


def test_what_may_be_copied(runtime):
    storages = runtime.trace().storages
    assert {s.kind for s in storages if s.is_movable} == {
        StorageKind.ACTIVATION,
        StorageKind.ATTRIBUTE,
    }
    assert not any(s.is_movable for s in storages if s.nbytes < 4096)


def test_the_peak_is_foreseen(runtime):
    problem = problem_of(runtime.trace(), LINK, LINK)
    measured = runtime.statistics().peak_bytes
    assert Planner(problem).kept_peak_bytes() == pytest.approx(measured, rel=0.1)


def test_a_trace_of_a_training_that_was_short_is_one_too(runtime):
    short = trained(runtime.statistics().peak_bytes * 3 // 4)
    assert short.statistics().offloaded_bytes + short.statistics().dropped_bytes > 0
    whole, found = (problem_of(r.trace(), LINK, LINK) for r in (runtime, short))
    assert [step.label for step in found.steps] == [step.label for step in whole.steps]
    assert [t.nbytes for t in found.tensors] == [t.nbytes for t in whole.tensors]
    assert [t.uses for t in found.tensors] == [t.uses for t in whole.tensors]


def test_the_command_plans_what_was_saved(runtime, tmp_path, capsys):
    path = tmp_path / "trace.json"
    runtime.save_trace(path)
    recording = loads(path.read_bytes())
    assert recording.trace == runtime.trace()
    assert recording.outward.bytes_per_s > 0
    assert recording.inward.bytes_per_s > 0
    assert main(["plan", "--budget", "80%", "--most-loss", "0.2", str(path)]) == 0
    text = capsys.readouterr().out
    assert "smallest feasible" in text
    assert "the batch may be" in text
    assert main(["plan", "--budget", "4KiB", str(path)]) == 1


def test_there_is_no_trace_before_it_was_entered(tmp_path):
    with pytest.raises(dynamemo.DynamemoError, match="not entered"):
        dynamemo.Runtime(PLENTY, device="cpu").save_trace(tmp_path / "trace.json")
    assert not list(tmp_path.iterdir())
