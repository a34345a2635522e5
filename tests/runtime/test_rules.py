"""Which functions may be applied again: Chainer's own but for those named, and registered ones."""

import importlib
import inspect
import pkgutil
import re

import chainer
import chainer.functions
import chainer.functions as F
import numpy
import pytest

import dynamemo
from dynamemo import Runtime, rules
from tests.runtime.training import PLENTY


def node_of(variable):
    return variable.creator_node


def ones(*shape):
    return chainer.Variable(numpy.ones(shape, "f"))


class Doubled(chainer.FunctionNode):
    def forward(self, inputs):
        return (inputs[0] * 2,)


class OldDoubled(chainer.Function):
    def forward(self, inputs):
        return (inputs[0] * 2,)


class PatchedReLU(chainer.functions.activation.relu.ReLU):
    """A user's change of one of Chainer's functions."""


def chainer_functions():
    """All function classes of Chainer's own function folders."""
    folder = chainer.functions
    for module in pkgutil.walk_packages(folder.__path__, "chainer.functions."):
        importlib.import_module(module.name)
    found, pending = [], [chainer.FunctionNode, chainer.Function]
    while pending:
        derived = [cls for cls in pending.pop().__subclasses__() if cls not in found]
        found.extend(derived)
        pending.extend(derived)
    return [cls for cls in found if cls.__module__.startswith("chainer.")]


class TestTrust:
    def test_chainers_own_function(self):
        assert rules.is_repeatable(node_of(F.tanh(ones(2))))

    def test_a_users_function(self):
        function = node_of(Doubled().apply((ones(2),))[0])
        assert not rules.is_trusted(function)
        assert not rules.is_repeatable(function)

    def test_a_users_subclass_of_chainers(self):
        assert not rules.is_trusted(node_of(PatchedReLU().apply((ones(2),))[0]))

    def test_a_users_old_style_function_inside_chainers_adapter(self):
        function = node_of(OldDoubled()(ones(2)))
        assert type(function).__module__.startswith("chainer.")
        assert not rules.is_trusted(function)

    def test_chainers_old_style_function_is_trusted_and_not_repeated(self):
        x, gamma, mean = ones(4, 3), ones(3), numpy.zeros(3, "f")
        y = F.batch_renormalization(
            x, gamma, gamma, 2.0, 1.0, running_mean=mean, running_var=numpy.ones(3, "f")
        )
        assert rules.is_trusted(node_of(y))
        assert not rules.is_repeatable(node_of(y))

    def test_a_package_whose_name_begins_like_chainer(self):
        cls = type("Upsample", (Doubled,), {"__module__": "chainercv.functions"})
        assert not rules.is_trusted(node_of(cls().apply((ones(2),))[0]))

    def test_the_answer_is_the_same_while_an_array_is_away(self):
        with Runtime(PLENTY, device="cpu", policy="torture"):
            function = node_of(F.tanh(ones(64, 64)))
            assert type(function) is not chainer.functions.activation.tanh.Tanh
            assert rules.is_repeatable(function)


class TestRegister:
    def test_gives_the_class_back_and_trusts_exactly_it(self):
        class Mine(Doubled):
            pass

        class Derived(Mine):
            pass

        assert dynamemo.register_recomputable(Mine) is Mine
        assert rules.is_repeatable(node_of(Mine().apply((ones(2),))[0]))
        assert not rules.is_repeatable(node_of(Derived().apply((ones(2),))[0]))
        assert not rules.is_repeatable(node_of(Doubled().apply((ones(2),))[0]))


class TestNoise:
    @pytest.mark.parametrize(
        ("make", "attribute"),
        [
            (lambda x: F.dropout(x, 0.5), "mask"),
            (lambda x: F.gaussian(x, x), "eps"),
            (lambda x: F.rrelu(x), "r"),
            (lambda x: F.simplified_dropconnect(x, ones(4, 4)), "mask"),
        ],
    )
    def test_the_attribute_is_there_after_forward(self, make, attribute):
        function = node_of(make(ones(4, 4)))
        assert rules.is_noise(function, attribute)
        assert attribute in rules.noise_attributes(function)
        assert isinstance(function.__dict__[attribute], numpy.ndarray)

    def test_of_other_functions_nothing_is_noise(self):
        function = node_of(F.max_pooling_2d(ones(1, 1, 4, 4), 2))
        assert not rules.is_noise(function, "indexes")
        assert rules.noise_attributes(function) == ()

    def test_zoneout_is_not_repeated(self):
        assert not rules.is_repeatable(node_of(F.zoneout(ones(2, 2), ones(2, 2))))


def test_batch_normalization_is_cut_off_from_its_statistics():
    function = node_of(F.batch_normalization(ones(4, 3), ones(3), ones(3)))
    for attribute in rules.side_effect_attributes(function):
        assert attribute in function.__dict__
    assert set(rules.side_effect_attributes(function)) == {"running_mean", "running_var"}


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (lambda: F.linear(ones(2, 2), ones(2, 2)), True),
        (lambda: F.convolution_2d(ones(1, 1, 4, 4), ones(1, 1, 3, 3)), True),
        (lambda: F.matmul(ones(2, 2), ones(2, 2)), True),
        (lambda: F.relu(ones(2, 2)), False),
        (lambda: F.batch_normalization(ones(4, 3), ones(3), ones(3)), False),
    ],
)
def test_checkpoints(make, expected):
    assert rules.is_checkpoint(node_of(make())) is expected


class TestTablesMatchChainer:
    """What the tables name exists, and nothing in Chainer that they are about is missing."""

    def test_every_name_is_a_class_of_chainer(self):
        names = {cls.__name__ for cls in chainer_functions()}
        # Applied by ChainerMN and by static graphs, which need what tests do not have.
        elsewhere = {"MultiNodeBatchNormalizationFunction", "StaticScheduleFunction"}
        named = {*rules.NOISE, *rules.SIDE_EFFECTS, *rules.CHECKPOINTS, *rules.NOT_REPEATABLE}
        assert named - names <= elsewhere

    def test_every_function_that_draws_random_numbers_is_named(self):
        drawing = {
            cls.__name__
            for cls in chainer_functions()
            if re.search(r"\brandom\.", inspect.getsource(cls))
        }
        assert len(drawing) >= 5
        assert drawing <= {*rules.NOISE, *rules.NOT_REPEATABLE}
