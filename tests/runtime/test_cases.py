"""What people ran into with such tools (`cases.md`), scaled down: the same bits as the stock run.

Each training runs without dynamemo, with everything evicted after every function, and within a
tight budget. The numbers are those of the cases.
"""

import gc
import re

import chainer
import chainer.functions as F
import chainer.links as L
import numpy
import pytest
from chainer import training
from chainer.training import extensions

import dynamemo
from dynamemo import Runtime
from tests.runtime.training import (
    PLENTY,
    fingerprint,
    no_collector,
    random_state,
    run_from,
    run_within,
    to_bytes,
)


def check(train, *, share=0.4, **options):
    """Assert that the training leaves the same bits behind, whatever is evicted.

    The budget is a share of what the training takes, or the least that can be met above it.
    """
    expected = train()
    result, figures = run_within(train, PLENTY, policy="torture", verify=True)
    assert result == expected
    assert figures.dropped_bytes + figures.offloaded_bytes > 0
    _, accounted = run_within(train, PLENTY, policy="none")
    peak_bytes = accounted.peak_bytes
    result, figures = run_from(train, int(peak_bytes * share), step=0.12, **options)
    assert result == expected
    assert figures.peak_bytes <= figures.budget_bytes < peak_bytes
    assert figures.dropped_bytes + figures.offloaded_bytes > 0


def seed():
    numpy.random.seed(5)
    return chainer.get_device("@numpy")


def normal(*shape):
    return numpy.random.standard_normal(shape).astype("f")


def live_nodes():
    return sum(isinstance(thing, chainer.FunctionNode) for thing in gc.get_objects())


class ConvNet(chainer.Chain):
    """Three times convolution, BatchNormalization, ReLU."""

    def __init__(self, classes=None):
        super().__init__()
        with self.init_scope():
            self.c1 = L.Convolution2D(3, 8, 3, pad=1)
            self.c2 = L.Convolution2D(8, 8, 3, pad=1)
            self.c3 = L.Convolution2D(8, 8, 3, pad=1)
            self.n1, self.n2, self.n3 = (L.BatchNormalization(8) for _ in range(3))
            self.out = L.Linear(8, 5)

    def forward(self, x):
        for conv, norm in ((self.c1, self.n1), (self.c2, self.n2), (self.c3, self.n3)):
            x = F.relu(norm(conv(x)))
        return self.out(F.average(x, axis=(2, 3)))


class TestA04ReportedLossAndEvaluation:
    """The graph of training is gone while the evaluator runs, and is drawn as it is."""

    @staticmethod
    def train(folder, counts):
        seed()
        model = L.Classifier(ConvNet())
        optimizer = chainer.optimizers.MomentumSGD(0.01).setup(model)
        data = chainer.datasets.TupleDataset(normal(24, 3, 8, 8), numpy.arange(24) % 5)
        iterator = chainer.iterators.SerialIterator(data, 8)
        evaluation = chainer.iterators.SerialIterator(data, 8, repeat=False, shuffle=False)
        updater = training.updaters.StandardUpdater(iterator, optimizer)
        trainer = training.Trainer(updater, (6, "iteration"), out=folder)

        class Counting(extensions.Evaluator):
            def evaluate(self):
                counts.append(live_nodes())
                result = super().evaluate()
                counts.append(live_nodes())
                return result

        trainer.extend(Counting(evaluation, model), trigger=(2, "iteration"))
        trainer.extend(extensions.DumpGraph("main/loss", filename="graph.dot"))
        trainer.extend(extensions.LogReport(trigger=(2, "iteration")))
        trainer.extend(
            lambda _: counts.append(live_nodes()), name="count", trigger=(1, "iteration")
        )
        trainer.run()
        log = [
            {key: value for key, value in entry.items() if key != "elapsed_time"}
            for entry in trainer.get_extension("LogReport").log
        ]
        return fingerprint([model], [optimizer], [repr(log).encode()])

    @staticmethod
    def drawing(folder):
        """The labels of the graph that was drawn, and the number of its arrows."""
        text = (folder / "graph.dot").read_text()
        return sorted(re.findall(r'label="[^"]*"', text)), text.count("->")

    @pytest.mark.parametrize("policy", ["torture", "cost-aware"])
    def test_same_nodes_log_and_drawing(self, tmp_path, policy):
        self.train(tmp_path / "warm", [])  # caches of Chainer and NumPy
        with no_collector():
            expected_counts, counts = [], []
            base = live_nodes()
            expected = self.train(tmp_path / "stock", expected_counts)
            assert min(expected_counts) == base
            base = live_nodes()
            result, _ = run_within(
                lambda: self.train(tmp_path / "ours", counts), PLENTY, policy=policy
            )
            assert live_nodes() == base
        assert result == expected
        assert counts == expected_counts
        assert self.drawing(tmp_path / "ours") == self.drawing(tmp_path / "stock")


class TestA05NoGrowth:
    def test_nodes_and_bytes_are_flat_without_the_collector(self):
        def steps(runtime):
            seed()
            block = chainer.Sequential(L.Linear(64, 64), L.BatchNormalization(64), F.relu)
            model = block.repeat(4)
            optimizer = chainer.optimizers.Adam().setup(model)
            figures = []
            for _ in range(30):
                x = chainer.Variable(normal(256, 64))
                loss = F.sum(model(x) ** 2)
                model.cleargrads()
                loss.backward()
                optimizer.update()
                del x, loss
                statistics = runtime.statistics()
                figures.append(
                    (live_nodes(), statistics.current_bytes, statistics.pool.live_blocks)
                )
            return figures

        with no_collector(), Runtime("700KiB", device="cpu") as runtime:
            figures = steps(runtime)
            assert runtime.statistics().dropped_bytes + runtime.statistics().offloaded_bytes > 0
        nodes = {n for n, _, _ in figures[10:]}
        assert len(nodes) == 1
        # Which parameters are away just then depends on measured times: the highest of some steps.
        early, late = figures[5:15], figures[-10:]
        assert max(n for _, n, _ in late) <= max(n for _, n, _ in early) * 1.01
        assert max(n for _, _, n in late) <= max(n for _, _, n in early) * 1.01

    @pytest.mark.parametrize("policy", ["torture", "cost-aware"])
    def test_an_array_that_nobody_retains_dies_with_its_variable(self, policy):
        with no_collector(), Runtime(PLENTY, device="cpu", policy=policy):
            x = chainer.Variable(normal(64, 64))
            h = x + 1
            y = h + 1
            node = h.node
            del h
            assert node.data is None
            h = x * 2
            y = h * h
            node = h.node
            expected = h.array.copy()
            del h
            assert (node.data == expected).all()
            del y

    def test_memory_of_a_dead_graph_is_free_at_once(self):
        with no_collector(), Runtime(PLENTY, device="cpu", policy="torture") as runtime:
            before = runtime.statistics()
            loss = F.sum(F.tanh(F.exp(chainer.Variable(normal(64, 64))) * 2))
            del loss
            after = runtime.statistics()
        assert after.current_bytes == before.current_bytes
        assert set(after.tier_bytes.values()) == {0}


class TestA11ParametersInsideTheRecomputedPart:
    def test_first_block_gets_a_raw_array(self):
        def train():
            seed()
            model = chainer.Sequential(L.Linear(64, 64), F.tanh, L.Linear(64, 64), F.tanh)
            optimizer = chainer.optimizers.SGD(0.1).setup(model)
            losses = []
            for _ in range(4):
                loss = F.sum(model(normal(256, 64)) ** 2)
                model.cleargrads()
                loss.backward()
                assert all(param.grad is not None for param in model.params())
                optimizer.update()
                losses.append(to_bytes(loss.array))
            return fingerprint([model], [optimizer], losses)

        check(train)

    def test_block_without_any_variable(self):
        class OnlyWeights(chainer.Chain):
            def __init__(self):
                super().__init__()
                with self.init_scope():
                    self.W = chainer.Parameter(normal(128, 128))

            def forward(self):
                return F.tanh(F.exp(self.W * 0.1) * 2)

        def train():
            seed()
            model = OnlyWeights()
            optimizer = chainer.optimizers.Adam(0.1).setup(model)
            for _ in range(4):
                loss = F.sum(model() * model())
                model.cleargrads()
                loss.backward()
                optimizer.update()
            return fingerprint([model], [optimizer], [to_bytes(loss.array)])

        check(train, share=0.5)

    def test_shared_weights_used_64_times(self):
        def train():
            seed()
            model = L.Linear(16, 16)
            optimizer = chainer.optimizers.SGD(0.1).setup(model)
            for _ in range(2):
                h = chainer.Variable(normal(256, 16))
                for _ in range(64):
                    h = F.tanh(model(h))
                loss = F.sum(h)
                model.cleargrads()
                loss.backward()
                optimizer.update()
            return fingerprint([model], [optimizer], [to_bytes(loss.array)])

        check(train, share=0.2)


class TestA12StatisticsOfBatchNormalization:
    def test_move_once_and_evaluation_is_the_same(self):
        def train():
            seed()
            model = ConvNet()
            optimizer = chainer.optimizers.MomentumSGD(0.01).setup(model)
            losses = []
            for _ in range(5):
                loss = F.sum(model(normal(8, 3, 16, 16)) ** 2)
                model.cleargrads()
                loss.backward()
                optimizer.update()
                losses.append(to_bytes(loss.array))
            with chainer.using_config("train", False), chainer.no_backprop_mode():
                losses.append(to_bytes(model(normal(8, 3, 16, 16)).array))
            losses.append(repr([norm.N for norm in (model.n1, model.n2, model.n3)]).encode())
            return fingerprint([model], [optimizer], losses)

        check(train)


NOISY = {
    "dropout": lambda x, w: F.dropout(x, 0.5),
    "gaussian": lambda x, w: F.gaussian(x, F.tanh(x)),
    "zoneout": lambda x, w: F.zoneout(x, F.tanh(x), 0.5),
    "rrelu": lambda x, w: F.rrelu(x),
    "gumbel_softmax": lambda x, w: F.gumbel_softmax(F.log_softmax(x)) * 4,
    "simplified_dropconnect": lambda x, w: F.simplified_dropconnect(x, w),
}


class TestA13Noise:
    @pytest.mark.parametrize("draw", NOISY.values(), ids=NOISY)
    @pytest.mark.parametrize("share", [0.3, 0.7])
    def test_same_losses_and_random_state(self, draw, share):
        def train():
            place = seed()
            model = chainer.Sequential(L.Linear(32, 32), L.Linear(32, 32))
            optimizer = chainer.optimizers.SGD(0.01).setup(model)
            losses = []
            for _ in range(3):
                h = F.tanh(model[0](normal(128, 32)))
                h = draw(h, model[1].W)
                h = draw(F.tanh(model[1](h)), model[1].W)
                loss = F.sum(F.tanh(h))
                model.cleargrads()
                loss.backward()
                optimizer.update()
                losses += [to_bytes(loss.array), random_state(place)]
            return fingerprint([model], [optimizer], losses)

        check(train, share=share)

    def test_negative_sampling(self):
        def train():
            place = seed()
            model = L.NegativeSampling(64, [10] * 200, 5)
            optimizer = chainer.optimizers.SGD(0.1).setup(model)
            losses = []
            for _ in range(3):
                h = F.tanh(chainer.Variable(normal(200, 64)) * 2)
                for _ in range(20):
                    h = F.sigmoid(F.tanh(h) * 2)
                loss = model(h, numpy.arange(200, dtype="i"))
                model.cleargrads()
                loss.backward()
                optimizer.update()
                losses += [to_bytes(loss.array), random_state(place)]
            return fingerprint([model], [optimizer], losses)

        check(train, share=0.6)


class TwoOutputs(chainer.FunctionNode):
    """Retains both outputs and uses both in backward."""

    def forward(self, inputs):
        x, y = inputs
        self.retain_outputs((0, 1))
        return numpy.exp(x), numpy.tanh(y)

    def backward(self, indexes, grad_outputs):
        z, w = self.get_retained_outputs()
        gz, gw = grad_outputs
        gx = None if gz is None else gz * z * F.sum(w)
        gy = None if gw is None else gw * (1 - w * w)
        return gx, F.broadcast_to(F.sum(z), w.shape) if gy is None else gy


dynamemo.register_recomputable(TwoOutputs)


class TestA14RetainedOutputWhoseVariableIsGone:
    @pytest.mark.parametrize("kept", ["first", "second used and gone", "both"])
    @pytest.mark.parametrize("registered", [True, False])
    def test_same_gradients(self, kept, registered):
        cls = TwoOutputs if registered else type("Unknown", (TwoOutputs,), {})

        def train():
            seed()
            x, y = chainer.Variable(normal(64, 64)), chainer.Variable(normal(64, 64))
            z, w = cls().apply((x * 1, y * 1))
            u = None
            if kept == "first":
                del w
            elif kept == "second used and gone":
                u = F.exp(w)
                del w, u
            z.grad = normal(64, 64)
            z.backward()
            assert z.creator is not None
            return [to_bytes(a) for a in (x.grad, y.grad, z.array)]

        expected = train()
        for policy in ("torture", "offload"):
            assert run_within(train, PLENTY, policy=policy)[0] == expected
        result, figures = run_from(train, 120_000)
        assert result == expected
        assert figures.peak_bytes <= figures.budget_bytes


class TestA15BackwardTwice:
    @staticmethod
    def forward(model, x):
        h = F.tanh(model[0](x))
        a, b = F.sum(F.sigmoid(model[1](h))), F.sum(F.tanh(model[2](h * 2)))
        return h, a, b

    def build(self):
        seed()
        model = chainer.ChainList(*[L.Linear(64, 64) for _ in range(3)])
        model.cleargrads()
        return model, normal(256, 64)

    def test_two_losses_over_one_graph(self):
        def train():
            model, x = self.build()
            h, a, b = self.forward(model, x)
            a.backward()
            b.backward()
            return fingerprint([model], [], [to_bytes(h.array)])

        check(train)

    def test_two_losses_are_their_sum(self):
        model, x = self.build()
        _, a, b = self.forward(model, x)
        (a + b).backward()
        expected = [param.grad for param in model.params()]
        with Runtime(PLENTY, device="cpu", policy="torture"):
            model, x = self.build()
            _, a, b = self.forward(model, x)
            a.backward()
            b.backward()
            for param, gradient in zip(model.params(), expected, strict=True):
                numpy.testing.assert_allclose(param.grad, gradient, rtol=1e-4, atol=1e-4)

    def test_one_loss_twice(self):
        def train():
            model, x = self.build()
            h, a, _ = self.forward(model, x)
            a.backward()
            a.cleargrad()
            a.backward()
            return fingerprint([model], [], [to_bytes(h.array)])

        check(train)


class TestA21TruncatedBackpropagationThroughTime:
    class Network(chainer.Chain):
        def __init__(self):
            super().__init__()
            with self.init_scope():
                self.lstm = L.LSTM(32, 64)
                self.out = L.Linear(64, 8)

        def forward(self, x):
            return self.out(F.dropout(self.lstm(x), 0.2))

    def run(self, *, unchains, steps=15, after=lambda: None):
        seed()
        model = self.Network()
        optimizer = chainer.optimizers.Adam().setup(model)
        loss, losses = 0, []
        for step in range(steps):
            loss += F.sum(model(normal(64, 32)) ** 2)
            if step % 5 == 4:
                model.cleargrads()
                loss.backward()
                if unchains:
                    loss.unchain_backward()
                optimizer.update()
                losses.append(to_bytes(loss.array))
                loss = 0
                after()
        return fingerprint([model], [optimizer], losses)

    def test_same_with_unchaining(self):
        check(lambda: self.run(unchains=True), share=0.5)

    def test_same_without_unchaining(self):
        check(lambda: self.run(unchains=False), share=0.5)

    def test_unchaining_frees_nodes_and_copies_at_once(self):
        self.run(unchains=True)
        with no_collector():
            stock, ours, bytes_away = [], [], []
            self.run(unchains=True, after=lambda: stock.append(live_nodes()))
            with Runtime(PLENTY, device="cpu", policy="torture") as runtime:

                def look():
                    ours.append(live_nodes())
                    bytes_away.append(sum(runtime.statistics().tier_bytes.values()))

                self.run(unchains=True, after=look)
        assert len(set(stock)) == 1
        # A state that is away may still know how it was made; it is read in the next step. Some
        # are copied and some dropped, so figures differ, but they do not grow.
        assert ours[-1] <= max(ours[:-1]) <= 5
        assert bytes_away[-1] <= max(bytes_away[:-1])

    def count(self, *, unchains):
        """Count the live nodes every 5 of 30 steps of two functions."""
        seed()
        base, counts = live_nodes(), []
        h = chainer.Variable(normal(1, 64))
        for step in range(30):
            h = F.tanh(h * 2)
            if step % 5 == 4:
                loss = F.sum(h)
                loss.backward()
                if unchains:
                    loss.unchain_backward()
                counts.append(live_nodes() - base)
        return counts

    @pytest.mark.parametrize("policy", ["torture", "cost-aware"])
    def test_a_loop_of_small_nodes(self, policy):
        with no_collector(), Runtime(PLENTY, device="cpu", policy=policy):
            counts = self.count(unchains=True)
            assert max(counts[3:]) <= max(counts[:3])
            assert max(counts) <= 11  # one stretch: five times two functions, and the sum
            assert self.count(unchains=False) == [11, 21, 31, 41, 51, 61]


class Push(chainer.Function):
    """Writes into its first input and returns the same buffer."""

    def forward(self, inputs):
        stack, value = inputs
        stack[1:] = stack[:-1].copy()
        stack[0] = value
        return (stack,)

    def backward(self, inputs, grad_outputs):
        (gradient,) = grad_outputs
        below = numpy.zeros_like(gradient)
        below[:-1] = gradient[1:]
        return below, gradient[0].copy()


class Pop(chainer.Function):
    """Gives the top, and the stack itself as a second output, as thin stacks do."""

    def forward(self, inputs):
        (stack,) = inputs
        return stack[0].copy(), stack

    def backward(self, inputs, grad_outputs):
        top, rest = grad_outputs
        if rest is None:
            rest = numpy.zeros_like(inputs[0])
        if top is not None:
            rest[0] += top  # in place: as the original does
        return (rest,)


class TestA22StackThatIsWrittenInPlace:
    def test_input_is_output(self):
        def train():
            seed()
            model = L.Linear(64, 64)
            x = chainer.Variable(normal(8, 16, 64))
            stack = F.tanh(x) * 2
            for _ in range(4):
                top, stack = Pop()(stack)
                stack = Push()(stack, F.tanh(model(top)) * 3)
            loss = F.sum(stack * stack)
            model.cleargrads()
            loss.backward()
            return [to_bytes(a) for a in (x.grad, model.W.grad, loss.array, stack.array)]

        expected = train()
        result, _ = run_within(train, PLENTY, policy="torture", verify=True)
        assert result == expected
        for policy in ("cost-aware", "recompute", "offload"):
            result, figures = run_from(train, 150_000, policy=policy)
            assert result == expected
            assert figures.peak_bytes <= figures.budget_bytes

    def test_three_variables_of_one_buffer(self):
        with Runtime(PLENTY, device="cpu", policy="torture"):
            x = F.tanh(chainer.Variable(normal(8, 16, 64)))
            top, y = Pop()(x)
            z = Push()(y, top * 0 + 5)
            F.exp(chainer.Variable(numpy.ones(1, "f")))
            assert (z.array[0] == 5).all()
            assert x.array.ctypes.data == y.array.ctypes.data == z.array.ctypes.data
            z.array[1] = 7
            assert (x.array[1] == 7).all()


class TestA23UpdateThenBackwardOverTheSameGraph:
    def train(self):
        seed()

        class Generator(chainer.Chain):
            def __init__(self):
                super().__init__()
                with self.init_scope():
                    self.a, self.norm = L.Linear(16, 64), L.BatchNormalization(64)
                    self.b = L.Linear(64, 32)

            def forward(self, z):
                return F.tanh(self.b(F.relu(self.norm(self.a(z)))))

        class Discriminator(chainer.Chain):
            def __init__(self):
                super().__init__()
                with self.init_scope():
                    self.a, self.norm = L.Linear(32, 64), L.BatchNormalization(64)
                    self.b = L.Linear(64, 1)

            def forward(self, x):
                # Two functions of the weights that retain other things than their inputs.
                h = F.leaky_relu(self.norm(self.a(x + 0.1 * normal(*x.shape))))
                return self.b(F.sigmoid(h) * 2)

        generator, discriminator = Generator(), Discriminator()
        first = chainer.optimizers.Adam(0.05, beta1=0.5).setup(generator)
        second = chainer.optimizers.Adam(0.05, beta1=0.5).setup(discriminator)
        losses = []
        for _ in range(4):
            fake = generator(normal(128, 16))
            on_real, on_fake = discriminator(normal(128, 32)), discriminator(fake)
            loss = F.average(F.softplus(-on_real)) + F.average(F.softplus(on_fake))
            discriminator.cleargrads()
            loss.backward()
            second.update()
            generator.cleargrads()
            other = F.average(F.softplus(-on_fake))
            other.backward()
            first.update()
            losses += [to_bytes(loss.array), to_bytes(other.array)]
        return fingerprint([generator, discriminator], [first, second], losses)

    def test_same_bits(self):
        check(self.train, share=0.6)

    @pytest.mark.parametrize("policy", ["recompute", "offload", "memory-centric", "lru"])
    def test_same_bits_by_each_policy(self, policy):
        expected = self.train()
        result, _ = run_from(self.train, 300_000, policy=policy, verify=True)
        assert result == expected


class TestA24GradientPenalty:
    @pytest.mark.parametrize("activation", [F.tanh, F.sigmoid, F.softplus, F.leaky_relu])
    def test_same_bits(self, activation):
        def train():
            seed()
            model = chainer.Sequential(L.Linear(3, 64), activation, L.Linear(64, 1))
            optimizer = chainer.optimizers.Adam(0.01).setup(model)
            losses = []
            for _ in range(3):
                x = chainer.Variable(normal(256, 3))
                y = model(x)
                (gradient,) = chainer.grad([y], [x], enable_double_backprop=True)
                penalty = F.sum((F.sqrt(F.sum(gradient * gradient, axis=1) + 1e-6) - 1) ** 2)
                loss = F.sum(y * y) + 10 * penalty
                model.cleargrads()
                loss.backward()
                optimizer.update()
                losses += [to_bytes(loss.array), to_bytes(gradient.array)]
                loss.unchain_backward()
            return fingerprint([model], [optimizer], losses)

        check(train, share=0.5)

    def test_a_gradient_has_its_graph(self):
        with Runtime(PLENTY, device="cpu", policy="torture"):
            x = chainer.Variable(normal(64, 64))
            y = F.sum(F.tanh(F.exp(x * 0.1)))
            (gradient,) = chainer.grad([y], [x], enable_double_backprop=True)
            assert gradient.creator is not None
            (second,) = chainer.grad([F.sum(gradient)], [x])
            assert numpy.isfinite(second.array).all()


@pytest.mark.filterwarnings("ignore:Non finite number found:UserWarning")
class TestA25MixedPrecision:
    @pytest.mark.parametrize("scale", [128, "dynamic"])
    def test_loss_scale_is_set_on_every_leaf(self, scale):
        def train():
            seed()
            with chainer.using_config("dtype", chainer.mixed16):
                block = chainer.Sequential(
                    L.Linear(64, 64), F.tanh, L.BatchNormalization(64), F.relu
                )
                model = block.repeat(4)
                model.append(L.Linear(64, 64))
                optimizer = chainer.optimizers.SGD(0.1).setup(model)
                optimizer.use_fp32_update()
                if scale == "dynamic":
                    optimizer.loss_scaling()
                seen = []
                for step in range(5):
                    x = normal(256, 64).astype("e")
                    if step == 2:
                        x[0] = numpy.inf  # overflows: the update is skipped
                    with numpy.errstate(all="ignore"):
                        loss = F.average(model(x) ** 2)
                        model.cleargrads()
                        if scale == "dynamic":
                            loss.backward(loss_scale=optimizer._loss_scale)
                        else:
                            loss.backward(loss_scale=scale)
                        scales = [param._loss_scale for param in model.params()]
                        optimizer.update()
                    seen.append(
                        repr((scales, optimizer.t, optimizer._loss_scale)).encode()
                        + to_bytes(loss.array)
                    )
                    assert None not in scales
                return fingerprint([model], [optimizer], seen)

        check(train, share=0.6)
