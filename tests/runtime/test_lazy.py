"""Holes: whoever reads one gets the array, and nothing else about the object has changed."""

import copy
import pickle
import sys

import chainer
import chainer.functions as F
import chainer.links as L
import numpy
import pytest

from dynamemo import Runtime
from dynamemo.lazy import (
    PEEKERS,
    AttributeSlot,
    VariableBox,
    VariableSlot,
    can_have_holes,
    holes_of,
    names_with_holes,
    original_class,
)
from dynamemo.storage import Hole
from tests.runtime.test_recipe import OFFLOAD, RECOMPUTE, SIZE, Session, leaf, source
from tests.runtime.training import PLENTY, to_bytes


class Shelf:
    """A keeper with one storage, itself: its arrays are here while they are not in their slots."""

    def __init__(self):
        self.keeper = self
        self.arrays = []
        self.slots = []
        self.restored = 0
        self.is_full = False

    def take(self, *slots):
        """Move the arrays of the slots here."""
        for slot in slots:
            self.arrays.append(slot.get())
            self.slots.append(slot)
            slot.empty(Hole(self, len(self.arrays) - 1))
        return self

    def restore(self, storage):
        assert storage is self
        if self.is_full:
            raise MemoryError("no room")
        self.restored += 1
        for slot in self.slots:
            slot.fill(self, self.arrays)


class Holder:
    """An object with arrays in its attributes."""

    default = "class's own"

    def __init__(self, **attributes):
        self.__dict__.update(attributes)


class PickledHolder(Holder):
    """Found by its name when it is unpickled."""


def array(value=1):
    return numpy.full(4, value)


def take(owner, *places):
    """Put arrays of the owner on a shelf each; a place is a name or (name, index)."""
    places = [place if isinstance(place, tuple) else (place,) for place in places]
    return [Shelf().take(AttributeSlot(owner, *place)) for place in places]


class TestAttribute:
    def test_reading_brings_it_back(self):
        owner, value = Holder(), array()
        owner.a = value
        (shelf,) = take(owner, "a")
        assert "a" not in vars(owner)
        assert owner.a is value
        assert vars(owner) == {"a": value}
        assert shelf.restored == 1

    def test_the_class_comes_back_with_the_last_hole(self):
        owner = Holder(a=array(1), b=array(2))
        take(owner, "a", "b")
        assert owner.a[0] == 1
        assert type(owner) is not Holder
        assert names_with_holes(owner) == ["b"]
        assert owner.b[0] == 2
        assert type(owner) is Holder
        assert sorted(vars(owner)) == ["a", "b"]

    def test_the_class_looks_like_itself_meanwhile(self):
        owner = Holder(a=array())
        take(owner, "a")
        cls = type(owner)
        assert isinstance(owner, Holder)
        assert (cls.__name__, cls.__qualname__) == (Holder.__name__, Holder.__qualname__)
        assert (cls.__module__, cls.__doc__) == (Holder.__module__, Holder.__doc__)
        assert original_class(owner) is Holder

    def test_objects_of_a_class_share_no_holes(self):
        away, other, bare = Holder(a=array(1), c=3), Holder(b=array(2), a=5), Holder(b=array(2))
        take(away, "a")
        take(other, "b")
        take(bare, "b")
        assert other.a == 5
        with pytest.raises(AttributeError):
            bare.a  # noqa: B018  reading is what fails
        assert names_with_holes(away) == ["a"]

    def test_a_default_of_the_class_is_seen_again_after_deleting(self):
        owner = Holder(default=array())
        take(owner, "default")
        del owner.default
        assert owner.default == "class's own"
        assert type(owner) is Holder

    def test_writing_replaces_it_without_bringing_it_back(self):
        owner, value = Holder(a=array()), array(7)
        (shelf,) = take(owner, "a")
        owner.a = value
        assert owner.a is value
        assert shelf.restored == 0
        assert type(owner) is Holder
        shelf.restore(shelf)
        assert owner.a is value

    def test_deleting_forgets_it(self):
        owner = Holder(a=array())
        (shelf,) = take(owner, "a")
        del owner.a
        with pytest.raises(AttributeError):
            owner.a  # noqa: B018  reading is what fails
        shelf.restore(shelf)
        assert vars(owner) == {}

    def test_a_read_that_fails_leaves_the_hole(self):
        owner, value = Holder(), array()
        owner.a = value
        (shelf,) = take(owner, "a")
        shelf.is_full = True
        with pytest.raises(MemoryError, match="no room"):
            owner.a  # noqa: B018  reading is what fails
        assert names_with_holes(owner) == ["a"]
        shelf.is_full = False
        assert owner.a is value

    def test_a_slot_does_not_keep_its_owner(self):
        owner = Holder(a=array())
        slot = AttributeSlot(owner, "a")
        shelf = Shelf().take(slot)
        del owner
        assert slot.owner is None
        assert slot.get() is None
        shelf.restore(shelf)

    def test_a_slot_of_an_object_that_holds_something_else_now(self):
        owner = Holder(a=array(), b=(array(),))
        whole, item, key = (
            AttributeSlot(owner, "a"),
            AttributeSlot(owner, "b", 0),
            AttributeSlot(owner, "b", "key"),
        )
        owner.a, owner.b = None, ()
        assert (whole.get(), item.get(), key.get()) == (None, None, None)

    def test_what_cannot_have_holes(self):
        class Slotted:
            __slots__ = ("a",)

        assert can_have_holes(Holder())
        assert not can_have_holes(Slotted())
        assert not can_have_holes([])


class TestTupleItem:
    def test_comes_back_among_the_others(self):
        first, second = array(1), array(2)
        owner = Holder(pair=(first, "other", second))
        take(owner, ("pair", 2))
        assert len(owner.pair) == 3
        assert owner.pair[0] is first
        assert owner.pair[1] == "other"
        assert owner.pair[2] is second
        assert type(owner) is Holder

    def test_reading_brings_all_of_it_back(self):
        owner = Holder(pair=(array(1), array(2)))
        shelves = take(owner, ("pair", 0), ("pair", 1))
        assert len(holes_of(owner, "pair")) == 2
        assert [item[0] for item in owner.pair] == [1, 2]
        assert [shelf.restored for shelf in shelves] == [1, 1]

    def test_one_can_come_back_before_the_other(self):
        owner = Holder(pair=(array(1), array(2)))
        first, _ = take(owner, ("pair", 0), ("pair", 1))
        first.restore(first)
        assert names_with_holes(owner) == ["pair"]
        assert len(holes_of(owner, "pair")) == 1
        assert AttributeSlot(owner, "pair", 0).get()[0] == 1
        assert AttributeSlot(owner, "pair", 1).get() is None
        assert owner.pair[1][0] == 2
        assert names_with_holes(owner) == []

    def test_one_can_leave_after_the_other(self):
        owner = Holder(pair=(array(1), array(2)))
        take(owner, ("pair", 0))
        take(owner, ("pair", 1))
        assert [item[0] for item in owner.pair] == [1, 2]

    def test_of_one_storage_twice(self):
        owner = Holder(pair=(array(1), array(2)))
        shelf = Shelf().take(AttributeSlot(owner, "pair", 0), AttributeSlot(owner, "pair", 1))
        assert [item[0] for item in owner.pair] == [1, 2]
        assert shelf.restored == 1


class TestDictionaryItem:
    def test_the_dictionary_stays_the_same(self):
        state = {"m": array(1), "v": array(2), "t": 3}
        owner, identity, keys = Holder(state=state), id(state), list(state)
        del state
        take(owner, ("state", "v"))
        assert id(owner.state) == identity
        assert list(owner.state) == keys
        assert owner.state["v"][0] == 2

    def test_items_come_back_one_by_one(self):
        owner = Holder(state={"m": array(1), "v": array(2)})
        first, second = take(owner, ("state", "m"), ("state", "v"))
        first.restore(first)
        assert names_with_holes(owner) == ["state"]
        second.restore(second)
        assert names_with_holes(owner) == []
        assert {key: value[0] for key, value in vars(owner)["state"].items()} == {"m": 1, "v": 2}


class TestShared:
    """A container that somebody holds for a moment is not emptied, and not forgotten either."""

    @pytest.mark.parametrize(
        ("make", "index"), [(lambda: (array(),), 0), (lambda: {"m": array()}, "m")]
    )
    def test_a_held_container(self, make, index):
        owner = Holder(held=make())
        slot = AttributeSlot(owner, "held", index)
        assert not slot.is_shared()
        held = owner.held
        assert slot.is_shared()
        assert slot.get() is held[index]
        del held
        assert not slot.is_shared()
        assert slot.get() is not None

    def test_a_plain_attribute_is_the_arrays_own_matter(self):
        owner = Holder(a=array())
        held = owner.a
        assert not AttributeSlot(owner, "a").is_shared()
        assert sys.getrefcount(held) > 2

    def test_the_slot_of_a_held_tuple_is_used_later(self):
        with Runtime(PLENTY, device="cpu", policy="torture") as runtime:
            function = F.exp(leaf()).creator_node
            assert runtime.statistics().current_bytes < SIZE
            held = function._retained_output_data
            F.exp(chainer.Variable(numpy.ones(1, "f")))
            assert runtime.statistics().current_bytes >= SIZE
            assert held is function._retained_output_data
            del held
            F.exp(chainer.Variable(numpy.ones(1, "f")))
            assert runtime.statistics().current_bytes < SIZE
            assert (function._retained_output_data[0] == numpy.exp(leaf().array)).all()


class TestCopies:
    """Copying and pickling read by `__dict__`: everything has to be back before."""

    def holder(self):
        owner = PickledHolder(a=array(1), pair=(array(2), array(3)), state={"m": array(4)}, n=5)
        take(owner, "a", ("pair", 1), ("state", "m"))
        return owner

    @pytest.mark.parametrize(
        "duplicate",
        [copy.copy, copy.deepcopy, lambda owner: pickle.loads(pickle.dumps(owner))],
        ids=["copy", "deepcopy", "pickle"],
    )
    @pytest.mark.parametrize("which", ["copy", "original"])
    def test_are_whole(self, duplicate, which):
        owner = self.holder()
        duplicated = duplicate(owner)
        owner = duplicated if which == "copy" else owner
        assert type(owner) is PickledHolder
        assert sorted(vars(owner)) == ["a", "n", "pair", "state"]
        values = [owner.a, *owner.pair, owner.state["m"]]
        assert [int(value[0]) for value in values] == [1, 2, 3, 4]

    def test_of_an_object_whose_class_copies_itself(self):
        class Self(Holder):
            def __copy__(self):
                return Self(**self.__dict__)

            def __deepcopy__(self, memo):
                return Self(**copy.deepcopy(self.__dict__, memo))

        for duplicate in (copy.copy, copy.deepcopy):
            owner = Self(a=array(1), b=array(2))
            take(owner, "a", "b")
            duplicated = duplicate(owner)
            assert (duplicated.a[0], duplicated.b[0]) == (1, 2)
            assert (owner.a[0], owner.b[0]) == (1, 2)

    def test_of_a_variable_share_the_hole(self):
        with Runtime(PLENTY, device="cpu", policy="torture"):
            y = F.exp(leaf())
            twin = copy.copy(y)
            assert twin.array is y.array
            assert (twin.array == numpy.exp(leaf().array)).all()

    def test_of_a_variable_pickled_are_plain(self):
        with Runtime(PLENTY, device="cpu", policy="torture"):
            y = F.exp(leaf())
            twin = pickle.loads(pickle.dumps(y))
        assert type(twin._data) is list
        assert (twin.array == numpy.exp(leaf().array)).all()

    @pytest.mark.parametrize(
        "duplicate",
        [
            copy.deepcopy,
            lambda owner: pickle.loads(pickle.dumps(owner)),
            lambda owner: owner.copy("copy"),
        ],
        ids=["deepcopy", "pickle", "copy"],
    )
    def test_of_a_model_and_its_optimizer(self, duplicate):
        def train(model, optimizer):
            loss = F.sum(F.tanh(model(leaf())))
            model.cleargrads()
            loss.backward()
            optimizer.update()
            return loss

        with Runtime(PLENTY, device="cpu", policy="torture"):
            model = L.Linear(64, 64)
            optimizer = chainer.optimizers.Adam().setup(model)
            loss = train(model, optimizer)
            twin = duplicate(model)
            del loss
            for ours, theirs in zip(model.params(), twin.params(), strict=True):
                assert to_bytes(ours.array) == to_bytes(theirs.array)
                assert to_bytes(ours.grad) == to_bytes(theirs.grad)

    def test_of_a_function_with_room_for_all(self):
        with Session(OFFLOAD) as session:
            function = Pair().apply((leaf(),))[0].creator_node
            session.evict()
            assert sorted(names_with_holes(function)) == ["double", "triple"]
            twin = copy.copy(function)
            assert type(twin) is type(function) is Pair
            assert (twin.double == leaf().array * 2).all()
            assert (twin.triple == leaf().array * 3).all()

    def test_of_a_function_without_room_for_all_is_an_error(self):
        expected = [to_bytes(leaf().array * factor) for factor in (2, 3)]
        with Session(OFFLOAD, budget=8 * SIZE, verify=False) as session:
            function = Pair().apply((leaf(),))[0].creator_node
            session.evict()
            assert sorted(names_with_holes(function)) == ["double", "triple"]
            wall = numpy.empty(8 * SIZE - session.figures.current_bytes - SIZE * 3 // 2, "u1")
            with pytest.raises(MemoryError):
                copy.copy(function)
            assert session.figures.fetched_bytes <= 4 * SIZE
            del wall
            assert [to_bytes(function.double), to_bytes(function.triple)] == expected


class Pair(chainer.FunctionNode):
    """A user's function with two arrays of its own."""

    def forward(self, inputs):
        self.double, self.triple = inputs[0] * 2, inputs[0] * 3
        return (inputs[0] * 1,)

    def backward(self, indexes, grad_outputs):
        return (grad_outputs[0] * (self.double + self.triple),)


class Watching:
    """A user's base class that has to be told something by each class derived from it."""

    tags = ()

    def __init_subclass__(cls, *, tag):
        Watching.tags += (tag,)


class WatchedPair(Watching, Pair, tag="pair"):
    pass


class WatchedRule(Watching, chainer.optimizers.adam.AdamRule, tag="rule"):
    pass


class Final(Pair):
    """A user's class that nobody may derive from."""

    def __init_subclass__(cls):
        raise ValueError(f"{cls.__name__} must not derive from Final")


class Registered(Pair):
    """A user's class that keeps a list of those derived from it."""

    derived = ()

    def __init_subclass__(cls):
        Registered.derived += (cls,)


class TestUserClasses:
    """The class of an object with holes must not be news to the user's classes."""

    @pytest.mark.parametrize("cls", [WatchedPair, Final, Registered])
    def test_of_functions_that_watch_their_subclasses(self, cls):
        with Session(OFFLOAD) as session:
            function = cls().apply((leaf(),))[0].creator_node
            session.evict()
            assert (function.double == leaf().array * 2).all()
            assert (function.triple == leaf().array * 3).all()
        assert Watching.tags == ("pair", "rule")
        assert Registered.derived == ()

    def test_of_update_rules_that_watch_their_subclasses(self):
        class Watched(chainer.optimizers.Adam):
            def create_update_rule(self):
                return WatchedRule(self.hyperparam)

        def train(make):
            numpy.random.seed(0)
            model = L.Linear(64, 64)
            optimizer = make().setup(model)
            for _ in range(2):
                loss = F.sum(model(leaf()))
                model.cleargrads()
                loss.backward()
                del loss
                optimizer.update()
            return model.W.update_rule

        expected = [to_bytes(array) for array in train(chainer.optimizers.Adam).state.values()]
        with Session(OFFLOAD, budget=24 * SIZE, verify=False):
            rule = train(Watched)
            del fill_all_but(0)[:]
            assert [to_bytes(array) for array in rule.state.values()] == expected
        assert Watching.tags == ("pair", "rule")


def peek(owner):
    """A reader that only looks; a test adds its code to the peekers."""
    return owner.a, next(owner.a for _ in range(1))


def stare(owner):
    """A reader that is no peeker."""
    return owner.a


@pytest.fixture
def peeker():
    PEEKERS.add(peek.__code__)
    yield peek
    PEEKERS.discard(peek.__code__)


class TestPeekers:
    def test_see_none_and_bring_nothing_back(self, peeker):
        owner = Holder(a=array())
        (shelf,) = take(owner, "a")
        assert peeker(owner) == (None, None)
        assert shelf.restored == 0
        assert stare(owner)[0] == 1

    def test_see_what_is_there(self, peeker):
        owner, value = Holder(), array()
        owner.a = value
        first, second = peeker(owner)
        assert first is value
        assert second is value

    def test_a_backward_fetches_nothing_that_it_does_not_use(self):
        with Session(RECOMPUTE, OFFLOAD) as session:
            h = source() * 2
            product, total = h * h, F.sum(h)
            h.unchain_backward()
            del h
            session.evict()
            before = session.figures
            # The node of h has data, retained for the product; sum's backward needs only the shape.
            total.backward()
            after = session.figures
            assert after.fetched_bytes == before.fetched_bytes
            assert after.recomputed_bytes == before.recomputed_bytes
            product.grad = numpy.ones(product.shape, "f")
            product.backward()
            assert session.figures.fetched_bytes + session.figures.recomputed_bytes > 0


class TestBox:
    def box(self, subject="subject"):
        told = []
        variable = chainer.Variable(array())
        box = VariableBox(variable.array, subject, told.append, variable)
        variable.__dict__["_data"] = box
        return variable, box, told

    def test_reading_brings_the_array_back(self):
        variable, box, _ = self.box()
        value = box.peek()
        slot = VariableSlot(box)
        Shelf().take(slot)
        assert box.peek() is None
        assert slot.get() is None
        assert variable.array is value
        assert slot.get() is value

    def test_a_read_that_fails_leaves_the_hole(self):
        variable, box, _ = self.box()
        shelf = Shelf().take(VariableSlot(box))
        shelf.is_full = True
        with pytest.raises(MemoryError):
            len(variable.array)
        shelf.is_full = False
        assert variable.array[0] == 1

    def test_tells_of_a_reader_outside_of_chainer(self):
        variable, _, told = self.box()
        assert variable.array is not None
        assert told == ["subject"]

    @pytest.mark.parametrize(
        "look",
        [repr, len, lambda v: v.shape, lambda v: v.dtype, lambda v: v.size, lambda v: v.ndim],
    )
    def test_tells_nothing_of_who_only_looks(self, look):
        variable, _, told = self.box()
        look(variable)
        assert told == []

    def test_tells_of_nobody_while_there_is_nobody_to_tell_about(self):
        variable, _, told = self.box(subject=None)
        assert variable.array is not None
        assert told == []

    def test_an_array_that_replaces_the_old_is_its_own(self):
        variable, box, told = self.box()
        shelf = Shelf().take(VariableSlot(box))
        variable.array = array(9)
        assert variable.array[0] == 9
        assert told == []
        shelf.restore(shelf)
        assert variable.array[0] == 9
        assert box.hole is None

    def test_a_slot_does_not_keep_the_box(self):
        variable, box, _ = self.box()
        slot = VariableSlot(box)
        shelf = Shelf().take(slot)
        del variable, box
        assert slot.owner is None
        assert slot.get() is None
        shelf.restore(shelf)

    def test_pickles_as_a_list(self):
        _, box, _ = self.box()
        Shelf().take(VariableSlot(box))
        twin = pickle.loads(pickle.dumps(box))
        assert type(twin) is list
        assert twin[0][0] == 1


class TwoOutputs(chainer.FunctionNode):
    """A user's function that retains two outputs, in one tuple."""

    def forward(self, inputs):
        self.retain_outputs((0, 1))
        return inputs[0] * 2, inputs[0] * 3


class TestUnderPressure:
    """Bringing one part of a container back must not push the other out again."""

    def test_a_tuple_of_outputs(self):
        with Session(OFFLOAD, budget=8 * SIZE, verify=False) as session:
            function = TwoOutputs().apply((leaf(),))[0].creator_node
            session.evict()
            assert names_with_holes(function) == ["_retained_output_data"]
            others = [F.exp(leaf(seed)) for seed in (1, 2)]
            wall = numpy.empty(8 * SIZE - session.figures.current_bytes - SIZE // 2, "u1")
            first, second = function._retained_output_data
            assert session.figures.fetched_bytes == 2 * SIZE
            del wall
            assert (first == leaf().array * 2).all()
            assert (second == leaf().array * 3).all()
            del others

    def test_a_dictionary_of_optimizer_state(self):
        def train(model, optimizer):
            for _ in range(3):
                loss = F.sum(model(leaf()))
                model.cleargrads()
                loss.backward()
                del loss
                optimizer.update()

        def build():
            numpy.random.seed(0)
            model = L.Linear(64, 64)
            return model, chainer.optimizers.Adam().setup(model)

        expected_model, expected = build()
        train(expected_model, expected)
        with Session(OFFLOAD, budget=24 * SIZE, verify=False) as session:
            model, optimizer = build()
            train(model, optimizer)
            rule = model.W.update_rule
            wall = fill_all_but(4)
            assert names_with_holes(rule) == ["_state"]
            identity = id(rule._state)
            del wall[: 2 * 2 + 1]
            state = rule.state
            assert id(state) == identity
            assert type(rule) is type(expected_model.W.update_rule)
            for key, value in expected_model.W.update_rule.state.items():
                assert to_bytes(state[key]) == to_bytes(value)
            assert session.figures.tier_bytes["FileTier"] >= 2 * SIZE
            del wall


def fill_all_but(count):
    """Take memory in halves of `SIZE` until there is no more; give a few of them back."""
    wall = []
    with pytest.raises(MemoryError):
        while True:
            wall.append(numpy.empty(SIZE // 2, numpy.uint8))
    del wall[:count]
    return wall


class TestPlaces:
    """Every kind of place where Chainer keeps an array is emptied and filled."""

    @pytest.mark.parametrize(
        ("make", "places"),
        [
            (lambda x: F.tanh(x), {"_retained_output_data"}),
            (lambda x: F.dropout(x, 0.5), {"mask"}),
            (lambda x: F.max_pooling_2d(x, 2), {"indexes"}),
            (lambda x: F.local_response_normalization(x), {"unit_scale", "scale", "indexes"}),
            (
                lambda x: F.softmax_cross_entropy(
                    F.reshape(x, (64, 64)), numpy.zeros(64, numpy.int32)
                ),
                {"y"},
            ),
        ],
        ids=["tanh", "dropout", "max_pooling", "lrn", "cross_entropy"],
    )
    def test_of_a_function(self, make, places):
        def run():
            numpy.random.seed(0)
            x = F.reshape(source(), (1, 4, 32, 32))
            y = make(x)
            yield y.creator_node
            F.sum(y).backward()
            yield to_bytes(y.array)
            yield x.grad

        _, expected, _ = run()
        with Runtime(PLENTY, device="cpu", policy="torture", verify=True):
            training = run()
            function = next(training)
            F.exp(chainer.Variable(numpy.ones(1, "f")))
            assert set(names_with_holes(function)) & places
            assert next(training) == expected

    def test_of_a_node_and_its_variable(self):
        with Runtime(PLENTY, device="cpu", policy="torture"):
            y = F.exp(leaf())
            assert names_with_holes(y.node) == ["_data"]
            assert y.node.data is y.array
            assert names_with_holes(y.node) == []
            assert type(y.node) is chainer.variable.VariableNode
