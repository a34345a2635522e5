"""The block heap against a plain model: a list of live intervals."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from dynamemo.allocator.errors import InternalError
from dynamemo.allocator.heap import BlockHeap, End

GRANULE = 512


class HeapMachine(RuleBasedStateMachine):
    """Random frees and requests; the model knows which bytes are taken and nothing else."""

    @initialize(granules=st.integers(1, 60))
    def start(self, granules: int) -> None:
        self.capacity_bytes = granules * GRANULE
        self.heap = BlockHeap(self.capacity_bytes)
        self.live: dict[int, int] = {}
        self.touched: set[int] = set()  # granules

    def runs(self) -> list[tuple[int, int]]:
        """Return the free runs (offset, bytes) of the model."""
        runs, position = [], 0
        for offset in sorted(self.live):
            if offset > position:
                runs.append((position, offset - position))
            position = offset + self.rounded(self.live[offset])
        if position < self.capacity_bytes:
            runs.append((position, self.capacity_bytes - position))
        return runs

    @staticmethod
    def rounded(requested_bytes: int) -> int:
        return max(1, -(-requested_bytes // GRANULE)) * GRANULE

    @rule(requested_bytes=st.integers(0, 20 * GRANULE), end=st.sampled_from(End))
    def allocate(self, requested_bytes: int, end: End) -> None:
        longest = max((length for _, length in self.runs()), default=0)
        offset = self.heap.allocate(requested_bytes, end=end)
        if offset is None:
            assert longest < self.rounded(requested_bytes)
        else:
            self.check_placed(offset, requested_bytes)
            first, past = offset, offset + self.rounded(requested_bytes)
            if end is End.LOW:  # what lies between the block and its end counts as touched
                first = 0
            else:
                past = self.capacity_bytes
            self.touched.update(range(first // GRANULE, past // GRANULE))

    def check_placed(self, offset: int, requested_bytes: int) -> None:
        assert offset % GRANULE == 0
        assert any(
            start <= offset and offset + self.rounded(requested_bytes) <= start + length
            for start, length in self.runs()
        )
        self.live[offset] = requested_bytes

    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        if self.live:
            offset = data.draw(st.sampled_from(sorted(self.live)))
            self.heap.free(offset)
            del self.live[offset]

    @rule(offset=st.integers(0, 61).map(lambda n: n * GRANULE))
    def free_what_is_not_live(self, offset: int) -> None:
        if offset not in self.live:
            with pytest.raises(InternalError):
                self.heap.free(offset)

    @rule()
    def rebuild(self) -> None:
        self.heap.rebuild({offset: self.rounded(n) for offset, n in self.live.items()})

    @rule(requested_bytes=st.integers(0, 20 * GRANULE), end=st.sampled_from(End))
    def allocate_used(self, requested_bytes: int, end: End) -> None:
        offset = self.heap.allocate_used(requested_bytes, end=end)
        if offset is not None:
            self.check_placed(offset, requested_bytes)
            granules = range(offset // GRANULE, (offset + self.rounded(requested_bytes)) // GRANULE)
            assert self.touched.issuperset(granules)

    @rule(nbytes=st.integers(1, 30 * GRANULE), data=st.data())
    def cheapest_window(self, nbytes: int, data: st.DataObject) -> None:
        costs = {
            offset: float(data.draw(st.integers(0, 5)))
            for offset in sorted(self.live)
            if data.draw(st.booleans())
        }
        window = self.heap.cheapest_window(nbytes, costs)
        best = self.cheapest_by_trial(nbytes, costs)
        if window is None:
            assert best is None
            return
        assert sum(costs[offset] for offset in window) == best
        kept = {o: n for o, n in self.live.items() if o not in window}
        model = HeapMachine.__new__(HeapMachine)
        model.capacity_bytes, model.live = self.capacity_bytes, kept
        assert max(length for _, length in model.runs()) >= nbytes

    def cheapest_by_trial(self, nbytes: int, costs: dict[int, float]) -> float | None:
        blocks = list(self.heap.blocks())
        best = None
        for start in range(len(blocks)):
            length, cost = 0, 0.0
            for block in blocks[start:]:
                if not block.is_free and block.offset not in costs:
                    break
                length += block.block_bytes
                cost += 0 if block.is_free else costs[block.offset]
                if length >= nbytes and (best is None or cost < best):
                    best = cost
        return best

    @invariant()
    def accounts_are_exact(self) -> None:
        if hasattr(self, "heap"):
            assert self.heap.used_bytes == sum(map(self.rounded, self.live.values()))
            assert self.heap.free_bytes == self.capacity_bytes - self.heap.used_bytes

    def teardown(self) -> None:
        if hasattr(self, "heap"):
            self.heap.validate()
            longest = max((length for _, length in self.runs()), default=0)
            assert self.heap.largest_free_bytes == longest


TestHeap = HeapMachine.TestCase
TestHeap.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)


@given(st.lists(st.tuples(st.integers(1, 4000), st.booleans()), max_size=60))
@settings(max_examples=100, deadline=None)
def test_everything_freed_leaves_one_run(requests: list[tuple[int, bool]]) -> None:
    heap = BlockHeap(1 << 20)
    offsets = [heap.allocate(n, end=End.HIGH if high else End.LOW) for n, high in requests]
    for offset in offsets:
        assert offset is not None
        heap.free(offset)
        heap.validate()
    assert heap.largest_free_bytes == heap.capacity_bytes


def test_ends_keep_long_lived_and_transient_blocks_apart() -> None:
    heap = BlockHeap(100 * GRANULE)
    transient = [heap.allocate(GRANULE) for _ in range(3)]
    lasting = [heap.allocate(GRANULE, end=End.HIGH) for _ in range(3)]
    assert transient == [0, GRANULE, 2 * GRANULE]
    assert lasting == [99 * GRANULE, 98 * GRANULE, 97 * GRANULE]


def test_best_fit_takes_the_shortest_run_that_is_long_enough() -> None:
    heap = BlockHeap(20 * GRANULE)
    offsets = [heap.allocate(n * GRANULE) for n in (5, 1, 3, 1, 4, 1)]
    for offset in (offsets[0], offsets[2], offsets[4]):
        assert offset is not None
        heap.free(offset)
    assert heap.allocate(2 * GRANULE) == offsets[2]


@pytest.mark.parametrize("granularity_bytes", [0, 3, 1000])
def test_granularity_must_be_a_power_of_two(granularity_bytes: int) -> None:
    with pytest.raises(ValueError, match="power of two"):
        BlockHeap(1 << 20, granularity_bytes=granularity_bytes)


def test_only_memory_that_was_used_is_used_again() -> None:
    heap = BlockHeap(20 * GRANULE)
    first = heap.allocate(4 * GRANULE)
    last = heap.allocate(4 * GRANULE, end=End.HIGH)
    assert first is not None
    assert last is not None
    heap.free(first)
    heap.free(last)
    assert heap.allocate_used(5 * GRANULE, end=End.LOW) is None
    assert heap.allocate_used(4 * GRANULE, end=End.LOW) == first
    assert heap.allocate_used(5 * GRANULE, end=End.HIGH) is None
    assert heap.allocate_used(4 * GRANULE, end=End.HIGH) == last


def test_window_skips_blocks_that_may_not_be_touched() -> None:
    heap = BlockHeap(6 * GRANULE)
    offsets: list[Any] = [heap.allocate(GRANULE) for _ in range(6)]
    costs = {offsets[0]: 1.0, offsets[1]: 1.0, offsets[3]: 5.0, offsets[4]: 1.0, offsets[5]: 9.0}
    assert heap.cheapest_window(2 * GRANULE, costs) == (offsets[0], offsets[1])
    assert heap.cheapest_window(3 * GRANULE, costs) == (offsets[3], offsets[4], offsets[5])
    assert heap.cheapest_window(4 * GRANULE, costs) is None
    assert heap.cheapest_window(3 * GRANULE, {**costs, offsets[4]: float("inf")}) is None
