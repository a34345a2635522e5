"""What may be recomputed, from what, and that it comes back with the forward's bits."""

import gc
import math

import chainer
import chainer.functions as F
import chainer.links as L
import numpy
import pytest

import dynamemo
from dynamemo import Runtime, Suggestion, Technique
from dynamemo.recipe import MAX_STEPS
from tests.runtime.training import PLENTY, random_state, to_bytes

RECOMPUTE, OFFLOAD = Technique.RECOMPUTE, Technique.OFFLOAD
SHAPE = (64, 64)
#: Bytes of an array of that shape in single precision.
SIZE = 64 * 64 * 4


class OnDemand:
    """A policy that evicts all it can when the test says so.

    Under pressure it takes what was used last: what was just brought back goes first.
    """

    name = "on-demand"
    is_eager = False
    can_sleep = False
    follows_plans = False
    avoids_chains = False
    frees_expired = False

    def __init__(self, *techniques, keeps_rebuilt_sources=True):
        self.techniques = techniques
        self.keeps_rebuilt_sources = keeps_rebuilt_sources

    def suggest(self, candidate):
        for technique in self.techniques:
            is_drop = technique is RECOMPUTE
            if not math.isinf(candidate.recompute_s if is_drop else candidate.offload_s):
                return Suggestion(technique, float(candidate.staleness))
        return None

    def evict(self):
        """Evict after one function more, of one number."""
        self.is_eager = True
        chainer.Variable(numpy.zeros(1, "f")) + 0
        self.is_eager = False


class Session:
    """A runtime with such a policy; counts what happened since it was asked last."""

    def __init__(self, *techniques, budget=PLENTY, verify=True, **options):
        self.policy = OnDemand(*(techniques or (RECOMPUTE,)), **options)
        self._runtime = Runtime(budget, device="cpu", policy=self.policy, verify=verify)

    def __enter__(self):
        self._runtime.__enter__()
        return self

    def __exit__(self, *error):
        return self._runtime.__exit__(*error)

    def evict(self):
        """Evict; return how many arrays of `SIZE` bytes were dropped by that."""
        before = self.figures.dropped_bytes
        self.policy.evict()
        return (self.figures.dropped_bytes - before) / SIZE

    @property
    def figures(self):
        return self._runtime.statistics()


def leaf(seed=0):
    return chainer.Variable(numpy.random.RandomState(seed).standard_normal(SHAPE).astype("f"))


def source(seed=0):
    """A value that is kept (exp retains it) and cannot be dropped: its input is gone."""
    return F.exp(leaf(seed))


class TestRefused:
    def test_nothing_in_the_plain_case(self):
        with Session() as session:
            h = source()
            y = F.tanh(h)
            assert session.evict() == 1
            assert (y.array == numpy.tanh(h.array)).all()

    def test_a_source_that_the_user_has_read(self):
        with Session() as session:
            h = source()
            y = F.tanh(h)
            h.array.sum()
            assert session.evict() == 0
            assert (y.array == numpy.tanh(h.array)).all()

    @pytest.mark.parametrize(
        "read",
        [
            lambda v: v.array,
            lambda v: v.data,
            lambda v: chainer.as_array(v),
            lambda v: v.raw_array,
            lambda v: v[:1].array.base,
            lambda v: v.T.array.base,
        ],
    )
    def test_a_source_that_the_user_has_read_by_any_way(self, read):
        with Session() as session:
            h = source()
            y = F.tanh(h)
            expected = numpy.tanh(numpy.exp(leaf().array))
            read(h)[...] = 0
            session.evict()
            assert (y.array == expected).all()

    @pytest.mark.parametrize(
        "look",
        [
            lambda v: v.shape,
            lambda v: v.dtype,
            lambda v: v.size,
            lambda v: len(v),
            lambda v: v.ndim,
            lambda v: v.xp,
            lambda v: repr(v),
            lambda v: v.device,
            lambda v: F.sum(v),
        ],
    )
    def test_looking_at_a_source_is_no_reading(self, look):
        with Session() as session:
            h = source()
            y = F.tanh(h)
            look(h)
            assert session.evict() == 1
            del y

    def test_a_leaf_that_the_user_still_holds(self):
        with Session() as session:
            x = leaf()
            array = x.array
            y = F.square(x)
            del x
            assert session.evict() == 0
            array[...] = 0
            assert (y.array == leaf().array ** 2).all()

    def test_a_leaf_that_only_a_view_of_the_user_holds(self):
        with Session() as session:
            x = leaf()
            view = x.array[:, 1:]
            y = F.square(x)
            del x
            assert session.evict() == 0
            view[...] = 0
            assert (y.array == leaf().array ** 2).all()

    def test_a_leaf_that_only_the_graph_holds(self):
        """Whoever made it may have written to it before letting go of it."""
        with Session() as session:
            y = F.square(leaf())
            assert session.evict() == 0
            assert (y.array == leaf().array ** 2).all()

    def test_a_leaf_from_before_the_runtime_that_the_user_holds(self):
        x = leaf()
        with Session() as session:
            y = F.square(x)
            assert session.evict() == 0
            x.array[...] = 0
            assert (y.array == leaf().array ** 2).all()

    @pytest.mark.parametrize(
        ("draw", "dropped"),
        [
            (lambda h: F.dropout(h, 0.5), ["y"]),
            (lambda h: F.rrelu(h - 1), ["y"]),
            (lambda h: F.gaussian(h, h), ["y", "noise scaled by the deviation"]),
        ],
        ids=["dropout", "rrelu", "gaussian"],
    )
    def test_noise(self, draw, dropped):
        def run():
            numpy.random.seed(0)
            return draw(source())

        expected = to_bytes(run().array)
        with Session() as session:
            y = run()
            assert session.evict() == len(dropped)
            assert to_bytes(y.array) == expected

    def test_zoneout(self):
        with Session() as session:
            h = source()
            y = F.zoneout(h, h, 0.5)
            assert session.evict() == 0
            del y

    def test_what_a_function_that_is_not_repeated_has_given(self):
        with Session() as session:
            h = source()
            y = F.zoneout(h, h, 0.5) * 2
            assert session.evict() == 0
            del y


class Scaled(chainer.FunctionNode):
    """A user's function that depends on what `register_recomputable` allows."""

    def forward(self, inputs):
        config = chainer.config
        factor = 3 if config.train else 5
        return ((inputs[0] * factor).astype(chainer.get_dtype()).astype(inputs[0].dtype),)

    def backward(self, indexes, grad_outputs):
        return (grad_outputs[0],)


@dynamemo.register_recomputable
class RegisteredScaled(Scaled):
    pass


class TestUserFunctions:
    def test_are_not_applied_again(self):
        with Session() as session:
            y = Scaled().apply((source(),))[0]
            assert session.evict() == 0
            del y

    def test_are_applied_again_where_registered(self):
        with Session() as session:
            y = RegisteredScaled().apply((source(),))[0]
            assert session.evict() == 1
            assert (y.array == source().array * 3).all()

    def test_what_they_got_is_no_source(self):
        """They may have written into it."""
        with Session() as session:
            h = source()
            y = F.tanh(h)
            Scaled().apply((h,))
            assert session.evict() == 0
            del y

    def test_what_they_get_is_rebuilt_around_first(self):
        class Overwrite(chainer.FunctionNode):
            def forward(self, inputs):
                inputs[0][...] = 0
                return (inputs[0] + 1,)

        with Session() as session:
            h = source()
            expected = numpy.tanh(numpy.exp(leaf().array))
            y = F.tanh(h)
            assert session.evict() == 1
            Overwrite().apply((h,))
            assert (y.array == expected).all()


class TestConfiguration:
    def test_the_forwards_is_used(self):
        with Session() as session:
            h = source()
            with chainer.using_config("train", False), chainer.using_config("dtype", "float16"):
                y = RegisteredScaled().apply((h,))[0]
            z = RegisteredScaled().apply((h,))[0]
            assert session.evict() == 2
            kept = h.array
            assert (y.array == (kept * 5).astype("e").astype("f")).all()
            assert (z.array == kept * 3).all()

    def test_the_readers_is_put_back(self):
        with Session() as session:
            y = RegisteredScaled().apply((source(),))[0]
            session.evict()
            with chainer.using_config("train", False), chainer.using_config("dtype", "float16"):
                assert (y.array == source().array * 3).all()
                assert chainer.config.train is False
                assert chainer.config.dtype == "float16"

    def test_hooks_of_the_user_do_not_see_it(self):
        class Seen(chainer.FunctionHook):
            name = "seen"

            def __init__(self):
                self.labels = []

            def forward_postprocess(self, function, in_data):
                self.labels.append(function.label)

        with Session() as session, Seen() as seen:
            y = F.tanh(source())
            session.evict()
            assert session.figures.recomputed_functions == 0
            labels = list(seen.labels)
            assert y.array is not None
            assert session.figures.recomputed_functions == 1
            assert seen.labels == labels


class TestChain:
    def test_takes_the_functions_back_to_what_is_there(self):
        with Session() as session:
            h = source()
            y = (h * 2 + 1) * 3
            assert session.evict() == 1
            assert (y.array == (numpy.exp(leaf().array) * 2 + 1) * 3).all()
            assert session.figures.recomputed_functions == 3

    def test_stops_at_what_is_there_and_rebuilds_it_once(self):
        with Session() as session:
            middle = F.tanh(source() * 2)
            y, z = middle * 3 + 1, middle * 5
            assert session.evict() == 3
            assert y.array is not None
            assert session.figures.recomputed_functions == 2 + 2
            assert z.array is not None
            assert session.figures.recomputed_functions == 2 + 2 + 1
            del middle

    def test_drops_what_it_rebuilt_on_the_way_where_the_policy_says_so(self):
        with Session(keeps_rebuilt_sources=False) as session:
            middle = F.tanh(source() * 2)
            y, z = middle * 3 + 1, middle * 5
            assert session.evict() == 3
            assert y.array is not None
            assert z.array is not None
            assert session.figures.recomputed_functions == (2 + 2) + (2 + 1)
            del middle

    def test_applies_a_shared_function_once(self):
        with Session() as session:
            a = source() * 2
            y = (a + 1) + (a * 3)
            del a
            assert session.evict() == 1
            a = numpy.exp(leaf().array) * 2
            assert (y.array == (a + 1) + (a * 3)).all()
            assert session.figures.recomputed_functions == 4

    @pytest.mark.parametrize(("length", "dropped"), [(MAX_STEPS, 1), (MAX_STEPS + 1, 0)])
    def test_is_no_longer_than_the_limit(self, length, dropped):
        with Session() as session:
            y = source()
            for _ in range(length):
                y = y + 1
            assert session.evict() == dropped
            expected = numpy.exp(leaf().array)
            for _ in range(length):
                expected = expected + 1
            assert (y.array == expected).all()

    def test_of_thousands_restores_without_recursion(self):
        with Session(verify=False) as session:
            h = source()
            for _ in range(5000):
                h = F.tanh(h)
            assert session.evict() == 5000
            expected = numpy.exp(leaf().array)
            for _ in range(5000):
                expected = numpy.tanh(expected)
            assert (h.array == expected).all()
            assert session.figures.recomputed_functions == 5000

    def test_of_thousands_dies_without_recursion(self):
        with Session(verify=False) as session:
            before = session.figures.current_bytes
            h = source()
            for _ in range(5000):
                h = F.tanh(h)
            assert session.evict() == 5000
            del h
            assert session.figures.current_bytes == before

    def test_an_attribute_comes_back(self):
        def gradient():
            x = chainer.Variable(numpy.random.RandomState(0).rand(1, 4, 64, 64).astype("f"))
            h = F.exp(x)
            y = F.max_pooling_2d(h, 3, 1, 1)
            yield y.creator_node
            F.sum(y * y).backward()
            yield to_bytes(x.grad)

        _, expected = gradient()
        with Session() as session:
            run = gradient()
            function = next(run)
            indexes = to_bytes(function.indexes)
            session.evict()
            assert session.figures.dropped_bytes >= 2 * 4 * SIZE
            assert to_bytes(function.indexes) == indexes
            session.evict()
            assert next(run) == expected


class TestLifetime:
    def test_survives_unchain_backward(self):
        with Session() as session:
            h = source()
            kept = F.tanh(h * 2)
            y = (kept + 1) * 3
            assert session.evict() == 2
            y.unchain_backward()
            del h, kept
            assert y.creator_node is None
            assert (y.array == (numpy.tanh(numpy.exp(leaf().array) * 2) + 1) * 3).all()

    def test_survives_the_model(self):
        def forward(model):
            return model(source())

        numpy.random.seed(0)
        expected = to_bytes(forward(L.Linear(64, 64)).array)
        with Session() as session:
            numpy.random.seed(0)
            model = L.Linear(64, 64)
            y = forward(model)
            assert session.evict() == 1
            del model
            gc.collect()
            assert to_bytes(y.array) == expected

    def test_survives_the_model_and_the_graph_in_backward(self):
        def run(session):
            numpy.random.seed(0)
            x, model = leaf(), chainer.Sequential(L.Linear(64, 64), F.tanh, L.Linear(64, 64))
            loss = F.sum(F.tanh(model(F.exp(x))))
            if session is not None:
                assert session.evict() == 2
            del model
            loss.backward()
            return to_bytes(x.grad)

        expected = run(None)
        with Session() as session:
            assert run(session) == expected

    def test_ends_with_the_last_variable(self):
        with Session() as session:
            before = session.figures.current_bytes
            h = source()
            y = F.tanh(h)
            session.evict()
            del h, y
            assert session.figures.current_bytes == before

    def test_a_failed_recompute_can_be_done_later(self):
        budget = 12 * SIZE
        with Session(budget=budget, verify=False) as session:
            h = source()
            y = F.tanh(h)
            assert session.evict() == 1
            wall = []
            with pytest.raises(MemoryError):
                while True:
                    wall.append(numpy.empty(SIZE // 2, numpy.uint8))
            with pytest.raises(MemoryError):
                len(y.array)
            del wall
            assert (y.array == numpy.tanh(numpy.exp(leaf().array))).all()


class TestReplayHasNoEffect:
    def test_on_the_statistics_of_batch_normalization(self):
        def run(session):
            numpy.random.seed(0)
            link, h = L.BatchNormalization(64), source()
            y = F.tanh(link(h))
            if session is not None:
                assert session.evict() == 1
            values = [to_bytes(y.array)]
            F.sum(y).backward()
            values += [to_bytes(a) for a in (link.avg_mean, link.avg_var, link.gamma.grad)]
            return values, link.N

        expected = run(None)
        with Session() as session:
            assert run(session) == expected
            assert session.figures.recomputed_functions == 2

    def test_on_the_state_of_random_numbers(self):
        place = chainer.get_device("@numpy")
        with Session() as session:
            numpy.random.seed(3)
            h = source()
            y = F.tanh(F.rrelu(F.dropout(h, 0.5)) * 2)
            assert session.evict() >= 1
            before = random_state(place)
            functions = session.figures.recomputed_functions
            assert y.array is not None
            assert session.figures.recomputed_functions > functions
            assert random_state(place) == before

    def test_on_the_function(self):
        with Session() as session:
            y = F.max_pooling_2d(F.reshape(source(), (1, 4, 32, 32)), 3, 1, 1)
            function = y.creator_node
            before = {
                name: value
                for name, value in vars(function).items()
                if name != "indexes" and not name.startswith("_dynamemo")
            }
            session.evict()
            assert y.array is not None
            after = vars(function)
            assert {name: after[name] for name in before} == before


class TestWrittenUnnoticed:
    """Writes that nobody announces: a recompute must not use what they left (Invariant 1)."""

    def test_the_index_array_of_a_slice(self):
        indexes = numpy.arange(64)
        with Session() as session:
            h = source()
            y = F.get_item(h, (indexes,))
            session.evict()
            indexes[...] = 0
            assert (y.array == h.array).all()

    def test_an_array_given_to_a_function(self):
        indexes = numpy.arange(64) % 5
        with Session() as session:
            h = source()
            y = F.select_item(h, indexes)
            z = F.embed_id(indexes, h)
            session.evict()
            indexes[...] = 0
            kept = h.array
            assert (y.array == kept[numpy.arange(64), numpy.arange(64) % 5]).all()
            assert (z.array == kept[numpy.arange(64) % 5]).all()

    def test_a_batch_written_and_let_go_before_the_drop(self):
        weight = numpy.random.RandomState(1).standard_normal(SHAPE).astype("f")
        with Session(verify=False) as session:
            batch = leaf().array
            y = F.linear(batch, chainer.Variable(weight))
            z = F.square(chainer.Variable(batch))
            batch *= 2
            del batch
            session.evict()
            assert (z.array == leaf().array ** 2).all()
            assert (y.array == leaf().array.dot(weight.T)).all()

    def test_an_output_before_it_is_used(self):
        with Session() as session:
            h = source()
            h.array[0] = 0.25
            y = F.tanh(h)
            session.evict()
            h.array[0] = 0.75
            assert (y.array[0] == numpy.tanh(numpy.float32(0.25))).all()

    def test_an_output_that_could_be_rebuilt(self):
        with Session() as session:
            y = F.tanh(source())
            y.array[0] = 0.25
            assert session.evict() == 0
            assert (y.array[0] == 0.25).all()

    def test_an_output_after_the_drop(self):
        with Session() as session:
            h = source()
            y, z = F.tanh(h), F.tanh(h * 2)
            assert session.evict() == 2
            h.array[...] = 0
            assert (y.array == numpy.tanh(numpy.exp(leaf().array))).all()
            assert (z.array == numpy.tanh(numpy.exp(leaf().array) * 2)).all()
