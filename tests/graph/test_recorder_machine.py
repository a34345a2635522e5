"""Test the recorder against a plain model under random programs.

The model keeps every fact as a set and answers each question by looking through all of them.
"""

from dataclasses import dataclass, field

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from dynamemo.graph.recorder import Recorder
from dynamemo.graph.types import StorageKind


@dataclass
class ModelOperation:
    """Remember what one operation needs and whether its backward ran."""

    needs: frozenset[int]
    has_run: bool = False


@dataclass
class Model:
    """Answer the recorder's questions by exhaustive search."""

    storages: set[int] = field(default_factory=set)
    operations: dict[int, ModelOperation] = field(default_factory=dict)
    expired: set[int] = field(default_factory=set)
    last_use: dict[int, int] = field(default_factory=dict)

    def waiting(self, storage: int) -> list[int]:
        """List the operations whose backward still has to read a storage."""
        return [t for t, o in self.operations.items() if storage in o.needs and not o.has_run]


class RecorderMachine(RuleBasedStateMachine):
    """Drive the recorder and the model alike."""

    storages = Bundle("storages")
    operations = Bundle("operations")

    def __init__(self) -> None:
        super().__init__()
        self.recorder = Recorder(max_operations=8)
        self.model = Model()

    @rule(target=storages, nbytes=st.integers(0, 100))
    def make_storage(self, nbytes: int) -> int:
        storage = self.recorder.storage(nbytes, StorageKind.ACTIVATION)
        assert storage not in self.model.storages
        self.model.storages.add(storage)
        return storage

    @rule(storage=consumes(storages))
    def forget_storage(self, storage: int) -> None:
        self.recorder.forget_storage(storage)
        self.model.storages.discard(storage)
        self.model.expired.discard(storage)

    @rule(
        target=operations,
        inputs=st.lists(storages, max_size=3),
        outputs=st.lists(storages, max_size=2),
        retained=st.lists(storages, max_size=3),
        attributes=st.lists(storages, max_size=2),
    )
    def forward(
        self, inputs: list[int], outputs: list[int], retained: list[int], attributes: list[int]
    ) -> int:
        tick = self.recorder.forward(
            "f", tuple(inputs), tuple(outputs), retained=tuple(retained), attributes=(*attributes,)
        )
        used = {*inputs, *outputs, *retained, *attributes}
        self.model.expired -= used
        self.model.last_use.update(dict.fromkeys(used, tick))
        self.model.operations[tick] = ModelOperation(frozenset(retained) | frozenset(attributes))
        return tick

    @rule(tick=operations)
    def run_backward(self, tick: int) -> None:
        operation = self.model.operations[tick]
        is_first = not operation.has_run
        self.recorder.begin_backward(tick)
        assert self.recorder.position == tick
        expired = self.recorder.end_backward(tick)
        operation.has_run = True
        needs = operation.needs & self.model.storages
        done = {storage for storage in needs if not self.model.waiting(storage)}
        assert set(expired) <= done
        assert len(set(expired)) == len(expired)
        if is_first:
            assert set(expired) == done
        self.model.expired |= set(expired)

    @rule(tick=consumes(operations))
    def forget_operation(self, tick: int) -> None:
        self.recorder.forget_operation(tick)
        operation = self.model.operations.pop(tick)
        if not operation.has_run:
            for storage in operation.needs & self.model.storages:
                if not self.model.waiting(storage):
                    self.model.expired.add(storage)

    @invariant()
    def agrees(self) -> None:
        for storage in self.model.storages:
            assert self.recorder.is_expired(storage) == (storage in self.model.expired)
            assert self.recorder.distance(storage) >= 1
        self.recorder.validate()
        self.recorder.trace().validate()


TestRecorderMachine = RecorderMachine.TestCase
TestRecorderMachine.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
