"""What is foreseen: the same place of the same graph, and nothing of another one."""

import weakref

import numpy
import pytest

from dynamemo.foresight import MEMORY, Foresight, Plan
from dynamemo.graph import CostModel, Recorder, StorageKind
from dynamemo.policies import Technique
from dynamemo.storage import Producer, Storage, View


class Keeper:
    def restore(self, storage):
        raise NotImplementedError

    def expose(self, storage):
        raise NotImplementedError

    def forget(self, storage_id, ticket):
        pass


class Block:
    requested_bytes = 1 << 20


class Function:
    """Stands for a node of the graph."""


class Program:
    """Functions in a chain: each reads and retains the last one's output."""

    def __init__(self):
        self.recorder = Recorder()
        self.costs = CostModel()
        self.foresight = Foresight(self.recorder, self.costs)
        self.storages = weakref.WeakValueDictionary()

    def forward(self, signatures):
        """Run them; return the storages, and for each function those that were due after it."""
        made, due, function = [], [], Function()
        self._functions = [function]
        for signature in signatures:
            storage_id = self.recorder.storage(1 << 20, StorageKind.ACTIVATION)
            storage = Storage(storage_id, Block(), Keeper())
            self.storages[storage_id] = storage
            inputs = (made[-1].storage_id,) if made else ()
            op_id = self.recorder.forward(signature, inputs, (storage_id,), retained=inputs)
            view = View(0, (1,), numpy.dtype("f"), (4,))
            storage.producer = Producer(function, op_id, view, output_index=0)
            made.append(storage)
            due.append(self.foresight.ran(op_id, signature, [storage]))
            del storage
            self.last_op_id = op_id
        return made, due

    def backward(self, count):
        for op_id in range(self.last_op_id, self.last_op_id - count, -1):
            self.recorder.begin_backward(op_id)
            self.recorder.end_backward(op_id)

    def iterate(self, signatures, evicted=()):
        made, due = self.forward(signatures)
        for index in evicted:
            self.foresight.note_offloaded(made[index])
        self.backward(len(signatures))
        places = {id(storage): number for number, storage in enumerate(made)}
        self.techniques = [technique for entry in due for _, technique in entry]
        return [[places[id(storage)] for storage, _ in entry] for entry in due]


@pytest.fixture
def program():
    return Program()


def test_it_is_due_after_the_function_that_used_it_last(program):
    assert program.iterate("abcd", evicted=[1]) == [[], [], [], []]
    assert program.iterate("abcd") == [[], [], [1], []]


def test_another_graph_has_nothing_of_it(program):
    program.iterate("abcd", evicted=[1])
    assert program.iterate("abxd") == [[], [], [], []]
    assert program.iterate("xbcd") == [[], [], [], []]


def test_graphs_that_alternate_are_remembered_beside_each_other(program):
    program.iterate("abcd", evicted=[0])
    program.iterate("abx", evicted=[1])
    assert program.iterate("abcd") == [[], [0], [], []]
    # The two have a beginning in common, and what is due there is due in both.
    assert program.iterate("abx") == [[], [0], [1]]


def test_what_was_not_evicted_again_is_forgotten(program):
    program.iterate("abcd", evicted=[1])
    results = [program.iterate("abcd") for _ in range(MEMORY + 2)]
    assert results[0] == [[], [], [1], []]
    assert results[-1] == [[], [], [], []]


def test_no_storage_is_kept_alive(program):
    for _ in range(3):
        program.iterate("abcd", evicted=[0, 1])
    assert not program.storages


def plan_of(program, signatures, decisions):
    """File a plan: by number of the storage, where it is due and what becomes of it there."""
    ended = []
    program.foresight.end_iteration = lambda ran, keys: ended.append((dict(ran), dict(keys)))
    made = [storage.storage_id for storage in program.forward(signatures)[0]]
    first = program.last_op_id - len(signatures) + 1
    program.backward(len(signatures))
    program.forward("z")
    program.backward(1)
    ran, keys = ended[-1]
    plan = {}
    for number, (place, technique) in decisions.items():
        plan.setdefault(ran[first + place][0], {})[keys[made[number]]] = technique
    program.foresight.follow(ran[max(ran)][0], Plan(plan, {}), most=2)


def test_a_plan_says_what_becomes_of_a_storage_where_its_program_comes_by(program):
    plan_of(program, "abcd", {0: (1, Technique.RECOMPUTE), 1: (2, Technique.OFFLOAD)})
    assert program.iterate("abcd") == [[], [0], [1], []]
    assert program.techniques == [Technique.RECOMPUTE, Technique.OFFLOAD]
    assert program.iterate("axcd") == [[], [], [], []]


def test_what_a_plan_keeps_is_not_copied_out_because_it_once_was(program):
    program.iterate("abcd", evicted=[0, 1])
    plan_of(program, "abcd", {0: (1, None)})
    assert program.iterate("abcd") == [[], [], [1], []]


def test_the_newest_plan_of_a_program_counts_and_the_oldest_is_forgotten(program):
    plan_of(program, "abcd", {0: (1, Technique.RECOMPUTE)})
    plan_of(program, "abcd", {0: (3, Technique.OFFLOAD)})
    assert program.iterate("abcd") == [[], [], [], [0]]
    plan_of(program, "efgh", {0: (1, Technique.RECOMPUTE)})
    plan_of(program, "ijkl", {0: (1, Technique.RECOMPUTE)})
    assert program.iterate("abcd") == [[], [], [], []]
    assert program.iterate("efgh") == [[], [0], [], []]


def test_reads_come_in_the_order_of_backward_with_the_time_until_then(program):
    for _ in range(5):
        for signature in "abcd":
            program.costs.observe(signature, 0.25)
    made, _ = program.forward("abcd")
    for index in (0, 2):
        made[index].is_away = True
        program.foresight.note_away(made[index])
    upcoming = list(program.foresight.upcoming(program.last_op_id, program.storages))
    assert [storage for storage, _ in upcoming] == [made[2], made[0]]
    # A backward that was not measured counts as twice its forward.
    assert [seconds for _, seconds in upcoming] == pytest.approx([0.0, 1.0])
