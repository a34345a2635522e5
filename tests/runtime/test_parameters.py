"""A recompute sees the value that a parameter had in forward, however it was changed since."""

import copy
import gc

import chainer
import chainer.functions as F
import chainer.links as L
import numpy
import pytest

from dynamemo import Runtime
from dynamemo.lazy import names_with_holes
from tests.runtime.test_recipe import OFFLOAD, RECOMPUTE, SHAPE, SIZE, Session, leaf, source
from tests.runtime.training import PLENTY, to_bytes


def linear():
    numpy.random.seed(0)
    link = L.Linear(*SHAPE)
    link.cleargrads()
    return link


def expected_output():
    """What `linear` gives for `source`, before anything changed."""
    return to_bytes(linear()(source()).array)


def with_gradient(link):
    """Give every parameter a gradient, by a graph of its own."""
    F.sum(link(source(9))).backward()


def _optimize(link, make=chainer.optimizers.SGD):
    with_gradient(link)
    make().setup(link).update()


def _weight_decay(link):
    with_gradient(link)
    optimizer = chainer.optimizers.SGD().setup(link)
    optimizer.add_hook(chainer.optimizer_hooks.WeightDecay(0.5))
    optimizer.update()


class _Halve:
    """A user's optimizer hook that changes parameters after the update."""

    name, call_for_each_param, timing = "halve", True, "post"

    def __call__(self, rule, param):
        param.array *= 0.5


def _user_hook(link):
    with_gradient(link)
    optimizer = chainer.optimizers.SGD(0.0).setup(link)
    optimizer.add_hook(_Halve())
    optimizer.update()


class _UserRule(chainer.UpdateRule):
    def update_core(self, param):
        param.data -= 0.5 * param.grad


def _user_rule(link):
    with_gradient(link)
    for param in link.params():
        param.update_rule = _UserRule()
        param.update()


def _write(link):
    link.W.array[...] = 0


def _multiply(link):
    link.W.array *= 2


def _rebind(link):
    link.W.array = numpy.zeros(SHAPE, "f")


def _copy_data(link):
    link.W.copydata(chainer.Parameter(numpy.zeros(SHAPE, "f")))


def _copy_params(link):
    link.copyparams(L.Linear(*SHAPE))


def _serialize(link):
    zeros = {name: numpy.zeros_like(param.array) for name, param in link.namedparams()}
    stored = {name.removeprefix("/"): array for name, array in zeros.items()}
    chainer.serializers.NpzDeserializer(stored).load(link)


def _initialize(link):
    chainer.initializers.Constant(3)(link.W.array)


def _through_a_view(link):
    link.W.array.ravel()[...] = 0


def _through_a_copy(link):
    copy.copy(link.W).array[...] = 0


CHANGES = [
    _optimize,
    lambda link: _optimize(link, chainer.optimizers.Adam),
    lambda link: _optimize(link, chainer.optimizers.MomentumSGD),
    _weight_decay,
    _user_hook,
    _user_rule,
    _write,
    _multiply,
    _rebind,
    _copy_data,
    _copy_params,
    _serialize,
    _initialize,
    _through_a_view,
    _through_a_copy,
]
IDS = [change.__name__.strip("_") for change in CHANGES]


class TestChanged:
    @pytest.mark.parametrize("change", CHANGES, ids=IDS)
    def test_between_the_drop_and_the_recompute(self, change):
        expected = expected_output()
        with Session() as session:
            link = linear()
            y = link(source())
            assert session.evict() == 1
            change(link)
            assert not (link.W.array == linear().W.array).all()
            assert to_bytes(y.array) == expected
            assert session.figures.recomputed_functions == 1

    @pytest.mark.parametrize("change", CHANGES, ids=IDS)
    def test_between_the_forward_and_the_drop(self, change):
        expected = expected_output()
        with Session() as session:
            link = linear()
            y = link(source())
            change(link)
            session.evict()
            assert to_bytes(y.array) == expected

    @pytest.mark.parametrize("change", CHANGES, ids=IDS)
    def test_between_two_forwards(self, change):
        """Each output comes back with the value of its own forward."""
        link = linear()
        first = to_bytes(link(source()).array)
        change(link)
        second = to_bytes(link(source()).array)
        with Session() as session:
            link = linear()
            y = link(source())
            session.evict()
            change(link)
            z = link(source())
            session.evict()
            change(link)
            session.evict()
            assert (to_bytes(y.array), to_bytes(z.array)) == (first, second)

    def test_while_its_value_is_away(self):
        expected = expected_output()
        link = linear()
        _optimize(link)
        updated = to_bytes(link.W.array)
        with Session(RECOMPUTE, OFFLOAD) as session:
            link = linear()
            y = link(source())
            session.evict()
            _optimize(link)
            session.evict()
            assert to_bytes(link.W.array) == updated
            assert to_bytes(y.array) == expected


class TestLookedAt:
    """What looks at parameters without writing costs no copy and stops no recompute."""

    LOOKS = (
        ("cleargrads", lambda link: link.cleargrads()),
        ("set_grad", lambda link: setattr(link.W, "grad", numpy.zeros(SHAPE, "f"))),
        ("grad", lambda link: link.W.grad),
        ("grad_var", lambda link: link.W.grad_var),
        ("is_initialized", lambda link: link.W.is_initialized),
        ("params", lambda link: list(link.params(include_uninit=False))),
        ("count_params", lambda link: link.count_params()),
        ("setup", lambda link: chainer.optimizers.Adam().setup(link)),
        (
            "reallocate",
            lambda link: chainer.optimizers.SGD().setup(link).reallocate_cleared_grads(),
        ),
        ("shape", lambda link: (link.W.shape, link.W.dtype, link.W.size, len(link.W))),
        ("repr", lambda link: repr(link)),
    )

    @pytest.mark.parametrize("look", [look for _, look in LOOKS], ids=[name for name, _ in LOOKS])
    def test_after_the_drop(self, look):
        with Session() as session:
            link = linear()
            y = link(source())
            assert session.evict() == 1
            look(link)
            assert session.figures.preserved_bytes == 0
            del y

    @pytest.mark.parametrize("look", [look for _, look in LOOKS], ids=[name for name, _ in LOOKS])
    def test_before_the_drop(self, look):
        with Session() as session:
            link = linear()
            y = link(source())
            look(link)
            assert session.evict() == 1
            del y

    def test_in_the_usual_loop(self):
        """The gradients are cleared between forward and backward."""
        with Session() as session:
            link = linear()
            loss = F.sum(F.tanh(link(source())))
            link.cleargrads()
            assert session.evict() == 1
            loss.backward()
            assert session.figures.preserved_bytes == 0


class TestHeldByTheUser:
    def test_before_the_drop_means_no_recompute(self):
        expected = expected_output()
        with Session() as session:
            link = linear()
            held = link.W.array
            y = link(source())
            assert session.evict() == 0
            held[...] = 0
            assert to_bytes(y.array) == expected

    def test_after_the_drop_means_a_copy(self):
        expected = expected_output()
        with Session() as session:
            link = linear()
            y = link(source())
            assert session.evict() == 1
            held = link.W.array
            held[...] = 0
            assert session.figures.preserved_bytes == SIZE
            assert to_bytes(y.array) == expected

    def test_in_forward_and_written_and_let_go_before_the_drop(self):
        expected = expected_output()
        with Session(verify=False) as session:
            link = linear()
            held = link.W.array
            y = link(source())
            held *= 2
            del held
            session.evict()
            assert to_bytes(y.array) == expected

    def test_from_before_the_runtime(self):
        expected = expected_output()
        link = linear()
        held = link.W.array
        with Session(verify=False) as session:
            y = link(source())
            session.evict()
            held *= 2
            assert to_bytes(y.array) == expected


class TestCopies:
    def test_are_made_only_where_a_recipe_needs_them(self):
        with Session() as session:
            link = linear()
            y = link(source())
            _optimize(link)
            assert session.figures.preserved_bytes == 0
            del y

    def test_are_made_once_for_all_that_need_one_value(self):
        with Session() as session:
            link = linear()
            outputs = [link(source(seed)) for seed in range(3)]
            assert session.evict() == 3
            for _ in range(3):
                _write(link)
            assert session.figures.preserved_bytes == SIZE
            del outputs

    def test_die_with_what_needed_them(self):
        with Session() as session:
            link = linear()
            y = link(source())
            session.evict()
            _write(link)
            assert session.figures.preserved_bytes == SIZE
            taken = session.figures.current_bytes
            del y
            # The copy and the kept input.
            assert session.figures.current_bytes == taken - 2 * SIZE

    def test_survive_the_parameter(self):
        expected = expected_output()
        with Session() as session:
            link = linear()
            y = link(source())
            session.evict()
            _write(link)
            del link
            gc.collect()
            assert to_bytes(y.array) == expected

    def test_can_be_away_themselves(self):
        expected = expected_output()
        with Session(RECOMPUTE, OFFLOAD) as session:
            link = linear()
            y = link(source())
            session.evict()
            _write(link)
            link.cleargrads()
            session.evict()
            assert session.figures.current_bytes < SIZE
            assert to_bytes(y.array) == expected


class TestGradients:
    def test_two_backwards_with_an_update_between(self):
        def run(session):
            first, second = linear(), linear()
            x = leaf()
            h = F.tanh(first(F.exp(x)))
            one, two = F.sum(F.sigmoid(second(h))), F.sum(F.tanh(second(h * 2)))
            optimizer = chainer.optimizers.Adam(0.1).setup(second)
            for loss in (one, two):
                if session is not None:
                    session.evict()
                second.cleargrads()
                loss.backward()
                optimizer.update()
            links = (first, second)
            return [to_bytes(a) for link in links for p in link.params() for a in (p.array, p.grad)]

        expected = run(None)
        with Session() as session:
            assert run(session) == expected
            assert session.figures.preserved_bytes > 0

    def test_a_gradient_that_is_away_is_in_a_copy_of_the_parameter(self):
        """Chainer's copy of a variable shares its arrays."""
        with Session(OFFLOAD, budget=20 * SIZE):
            link, _loss, expected = link_whose_gradient_is_away()
            twin = copy.copy(link.W)
            assert twin.grad is not None
            assert (twin.grad == expected).all()
            assert (link.W.grad == expected).all()

    def test_a_gradient_that_is_away_is_not_mixed_up_with_that_of_a_copy(self):
        with Session(OFFLOAD, budget=20 * SIZE):
            link, y, expected = link_whose_gradient_is_away()
            twin = link.copy("share")
            z = F.sum(twin(source())) * 2
            twin.cleargrads()
            z.backward()
            expected_twin = twin.W.grad.copy()
            del y, z
            fill_up()
            assert (link.W.grad == expected).all()
            assert (twin.W.grad == expected_twin).all()


def link_whose_gradient_is_away():
    """Return a link, the loss it was differentiated from, and a copy of the gradient of its W."""
    link = linear()
    y = F.sum(link(source()))
    link.cleargrads()
    y.backward()
    expected = link.W.grad.copy()
    fill_up()
    assert names_with_holes(link.W) == ["_grad"]
    return link, y, expected


def fill_up():
    """Take all the memory there is, in small pieces, and give it back."""
    pieces = []
    with pytest.raises(MemoryError):
        while True:
            pieces.append(numpy.empty(SIZE // 2, numpy.uint8))


class TestLeaving:
    def test_a_parameter_has_its_plain_list_again(self):
        with Runtime(PLENTY, device="cpu"):
            link = linear()
            F.sum(link(source())).backward()
        assert [type(p._data) for p in link.params()] == [list, list]

    def test_so_has_a_copy_of_it(self):
        with Runtime(PLENTY, device="cpu"):
            link = linear()
            F.sum(link(source())).backward()
            twin = link.copy("share")
        assert [type(p._data) for p in twin.params()] == [list, list]
