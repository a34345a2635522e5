"""A prefetch that finds no place is given up; it takes nothing from anybody and fails nobody."""

import pytest

from dynamemo import Runtime
from dynamemo.allocator import OutOfMemoryError
from dynamemo.transfers import Transfers
from tests.runtime.late import LateDevice
from tests.runtime.training import train_layers


def train(steps=3):
    return train_layers(0, layers=8, width=256, rows=512, steps=steps)


@pytest.fixture
def budget():
    with Runtime("256MiB", device="cpu", policy="none") as runtime:
        train(1)
    return int(0.6 * runtime.statistics().peak_bytes)


def test_without_a_place_it_comes_back_when_it_is_read(budget, monkeypatch):
    expected = train()
    tries = []

    def refuse(transfers, storage, make_room, leaves_room):
        tries.append(storage.nbytes)
        raise OutOfMemoryError(
            requested_bytes=1,
            budget_bytes=1,
            in_use_bytes=1,
            feasible_bytes=2,
            largest_free_bytes=0,
        )

    monkeypatch.setattr(Transfers, "prefetch", refuse)
    with Runtime(budget, device=LateDevice(), policy="offload") as runtime:
        assert train() == expected
    figures = runtime.statistics()
    assert tries
    assert figures.prefetched_bytes == 0
    assert figures.late_bytes == figures.fetched_bytes > 0


def test_it_evicts_nothing_that_is_needed(budget, monkeypatch):
    """While a prefetch asks for memory, the pool's calls for more are refused."""
    manager = None
    answers = []
    begin = Transfers._begin

    def asking(transfers, storage, ticket, memory):
        if manager._is_evicting:
            answers.append(manager.reclaim(manager.pool, storage.nbytes))
        return begin(transfers, storage, ticket, memory)

    monkeypatch.setattr(Transfers, "_begin", asking)
    with Runtime(budget, device=LateDevice(), policy="offload") as runtime:
        manager = runtime._manager
        train()
    assert answers
    assert not any(answers)
