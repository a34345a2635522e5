"""What every pool and every tier must do, on a CPU and on a GPU.

A test class derives from a contract and says how to make its subject and its memory.
"""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest

from dynamemo.allocator import (
    Block,
    InternalError,
    OutOfMemoryError,
    Pool,
    Ticket,
    Tier,
    TierStack,
)

MIB = 1 << 20


class Evictor:
    """A reclaimer that frees what it was given, cheapest run first, and notes each request."""

    def __init__(self, costs: dict[int, float]) -> None:
        self.costs = costs
        self.requests: list[int] = []

    def reclaim(self, pool: Pool, requested_bytes: int) -> bool:
        self.requests.append(requested_bytes)
        window = pool.cheapest_window(requested_bytes, self.costs)
        for block in window or ():
            del self.costs[block.offset]
            pool.free(block)
        return bool(window)


class PoolContract(ABC):
    """The pool by itself."""

    @abstractmethod
    def make_pool(self, capacity_bytes: int) -> Pool:
        """Return a new pool."""

    def test_blocks_do_not_overlap(self) -> None:
        pool = self.make_pool(MIB)
        blocks = [pool.allocate(n) for n in (0, 1, 512, 513, 100_000)]
        spans = sorted((b.address, b.address + b.block_bytes) for b in blocks)
        assert all(end <= start for (_, end), (start, _) in pairwise(spans))
        assert all(pool.block_at(b.address) is b for b in blocks)
        assert all(b.address % 512 == 0 for b in blocks)
        pool.validate()

    def test_a_b_a_pattern(self) -> None:
        """Case A-08: seven units of eight are alive, and the last four are contiguous."""
        pool = self.make_pool(8 * MIB)
        first = pool.allocate(MIB)
        pool.free(pool.allocate(4 * MIB))
        second, third = pool.allocate(MIB), pool.allocate(MIB)
        last = pool.allocate(4 * MIB)
        assert pool.current_bytes == 7 * MIB
        assert len({b.offset for b in (first, second, third, last)}) == 4

    def test_limit_counts_only_what_is_alive(self) -> None:
        """Case A-09."""
        pool = self.make_pool(4 * MIB)
        pool.free(pool.allocate(2 * MIB))
        pool.free(pool.allocate(3 * MIB))
        assert pool.current_bytes == 0

    def test_out_of_memory_says_what_would_do(self) -> None:
        pool = self.make_pool(MIB)
        kept = pool.allocate(MIB // 2)
        with pytest.raises(OutOfMemoryError) as caught:
            pool.allocate(MIB)
        error = caught.value
        assert error.requested_bytes == MIB
        assert error.budget_bytes == MIB
        assert error.in_use_bytes == MIB // 2
        assert error.feasible_bytes == MIB + MIB // 2
        assert f"{error.feasible_bytes:,}" in str(error)
        pool.validate()
        pool.free(kept)
        pool.allocate(MIB)

    def test_reclaim_ends_contiguous(self) -> None:
        pool = self.make_pool(8 * MIB)
        blocks = [pool.allocate(MIB) for _ in range(8)]
        costs = [1.0, 9.0, 1.0, 9.0, 2.0, 2.0, 2.0, 9.0]
        evictor = Evictor({b.offset: c for b, c in zip(blocks, costs, strict=True)})
        pool.reclaimer = evictor
        block = pool.allocate(3 * MIB)
        assert block.offset == blocks[4].offset
        assert evictor.requests == [3 * MIB]
        assert pool.statistics().reclaims == 1
        pool.validate()

    def test_double_free_is_refused(self) -> None:
        pool = self.make_pool(MIB)
        block = pool.allocate(1000)
        pool.free(block)
        with pytest.raises(InternalError):
            pool.free(block)
        pool.validate()

    def test_random_program_keeps_the_accounts(self) -> None:
        pool = self.make_pool(MIB)
        draw = random.Random(1)
        live: list[Block] = []
        for _ in range(500):
            if live and draw.random() < 0.45:
                pool.free(live.pop(draw.randrange(len(live))))
            else:
                try:
                    live.append(pool.allocate(draw.randrange(0, 60_000)))
                except OutOfMemoryError as error:
                    assert error.in_use_bytes == sum(b.block_bytes for b in live)
        pool.validate()
        figures = pool.statistics()
        assert figures.current_bytes == sum(b.block_bytes for b in live)
        assert figures.requested_bytes == sum(b.requested_bytes for b in live)
        assert figures.live_blocks == len(live) == figures.allocations - figures.frees
        assert figures.current_bytes <= figures.peak_bytes <= MIB


class TierContract(ABC):
    """A tier, whose values come from and go to a device."""

    @abstractmethod
    def make_tier(self, limit_bytes: int, folder: str) -> Tier:
        """Return a new tier."""

    @abstractmethod
    def to_device(self, data: bytes) -> Any:
        """Return device memory with these bytes; it has an `address`."""

    @abstractmethod
    def to_bytes(self, memory: Any) -> bytes:
        """Return what is in device memory."""

    @pytest.fixture
    def tier(self, tmp_path: Any) -> Any:
        tier = self.make_tier(4 * MIB, str(tmp_path))
        yield tier
        tier.close()
        tier.close()

    @staticmethod
    def data(nbytes: int, seed: int = 0) -> bytes:
        return random.Random(seed).randbytes(nbytes)

    def stored(self, tier: Tier | TierStack, data: bytes) -> Ticket | None:
        """Store a value and wait until it is out."""
        memory = self.to_device(data)
        ticket = tier.store(memory.address, len(data))
        if ticket is not None:
            ticket.written.wait()
            assert ticket.written.is_done
        return ticket

    def loaded(self, tier: Tier | TierStack, ticket: Ticket) -> bytes:
        """Load a value and wait until it is in."""
        target = self.to_device(bytes(ticket.nbytes))
        mark = tier.load(ticket, target.address)
        mark.wait()
        assert mark.is_done
        return self.to_bytes(target)

    @pytest.mark.parametrize("nbytes", [0, 1, 4095, 4096, 4097, MIB + 13, 3 * MIB])
    def test_a_value_reads_back_equal_and_again(self, tier: Tier, nbytes: int) -> None:
        data = self.data(nbytes)
        ticket = self.stored(tier, data)
        assert ticket is not None
        assert (ticket.tier, ticket.nbytes) == (tier, nbytes)
        for _ in range(2):
            assert self.loaded(tier, ticket) == data
        tier.discard(ticket)
        tier.finish()
        assert tier.used_bytes == 0

    def test_a_load_that_is_begun_before_the_copy_out_has_ended(self, tier: Tier) -> None:
        data = self.data(2 * MIB + 5)
        memory = self.to_device(data)
        targets = [self.to_device(bytes(len(data))) for _ in range(2)]
        ticket = tier.store(memory.address, len(data))
        assert ticket is not None
        marks = [tier.load(ticket, target.address) for target in targets]
        assert ticket.last is marks[1]
        marks[0].hold_compute()
        assert self.to_bytes(targets[0]) == data
        marks[1].wait()
        assert self.to_bytes(targets[1]) == data
        assert ticket.written.is_done

    def test_a_place_is_given_on_only_when_its_last_copy_has_ended(self, tier: Tier) -> None:
        """Values are discarded while copies of them are under way, in a full tier."""
        values = [self.data(MIB + 7, seed) for seed in range(12)]
        memories = [self.to_device(value) for value in values]
        targets = [self.to_device(bytes(len(value))) for value in values]
        marks = []
        for memory, target, value in zip(memories, targets, values, strict=True):
            ticket = tier.store(memory.address, len(value))
            assert ticket is not None
            marks.append(tier.load(ticket, target.address))
            tier.discard(ticket)
            assert tier.used_bytes <= 4 * MIB
        for mark, target, value in zip(marks, targets, values, strict=True):
            mark.wait()
            assert self.to_bytes(target) == value
        tier.finish()
        assert tier.used_bytes == 0

    def test_a_value_that_nobody_waits_for_leaves_nothing(self, tier: Tier) -> None:
        memory = self.to_device(self.data(3 * MIB))
        ticket = tier.store(memory.address, 3 * MIB)
        assert ticket is not None
        tier.discard(ticket)
        tier.finish()
        assert tier.used_bytes == 0
        tier.trim()
        assert tier.held_bytes == 0

    def test_several_threads_at_once(self, tier: Tier) -> None:
        def work(number: int) -> list[bool]:
            draw = random.Random(number)
            results = []
            for step in range(10):
                data = self.data(draw.randrange(1, 400_000), 100 * number + step)
                ticket = self.stored(tier, data)
                assert ticket is not None
                results.append(self.loaded(tier, ticket) == data)
                tier.discard(ticket)
            return results

        with ThreadPoolExecutor(4) as threads:
            assert all(all(results) for results in threads.map(work, range(4)))
        tier.finish()
        assert tier.used_bytes == 0

    def test_a_full_tier_takes_nothing_and_says_so(self, tier: Tier) -> None:
        ticket = self.stored(tier, self.data(3 * MIB))
        before = tier.statistics()
        assert self.stored(tier, self.data(2 * MIB)) is None
        after = replace(tier.statistics(), held_bytes=before.held_bytes)  # an empty slab may go
        assert after == before
        assert ticket is not None
        tier.discard(ticket)
        assert self.stored(tier, self.data(2 * MIB)) is not None

    def test_the_limit_holds_and_nothing_grows(self, tier: Tier) -> None:
        """Case A-06: lengths vary, the bytes held stay bounded, and `trim` gives them back."""
        draw = random.Random(3)
        kept: list[tuple[Any, bytes]] = []
        for step in range(120):
            data = self.data(draw.randrange(1, 700_000), step)
            ticket = self.stored(tier, data)
            if ticket is not None:
                kept.append((ticket, data))
            if ticket is None or draw.random() < 0.4:
                tier.discard(kept.pop(draw.randrange(len(kept)))[0])
            assert tier.used_bytes <= 4 * MIB
            assert tier.held_bytes <= 4 * MIB
        for ticket, data in kept:
            assert self.loaded(tier, ticket) == data
            tier.discard(ticket)
        tier.finish()
        tier.trim()
        assert (tier.used_bytes, tier.held_bytes) == (0, 0)

    def test_a_discarded_ticket_is_refused(self, tier: Tier, tmp_path: Any) -> None:
        memory = self.to_device(b"x" * 100)
        ticket = tier.store(memory.address, 100)
        assert ticket is not None
        other = self.make_tier(MIB, str(tmp_path))
        with pytest.raises(InternalError):
            other.load(ticket, memory.address)
        tier.discard(ticket)
        with pytest.raises(InternalError):
            tier.load(ticket, memory.address)
        with pytest.raises(InternalError):
            tier.discard(ticket)
        other.close()
        tier.finish()

    def test_a_pool_with_tiers_loses_nothing(self, tmp_path: Any) -> None:
        """A value is always in the pool or in a tier, and reads back equal."""
        stack = TierStack(
            [self.make_tier(MIB, str(tmp_path)), self.make_tier(8 * MIB, str(tmp_path))]
        )
        draw = random.Random(5)
        resident: dict[int, Any] = {}
        stored: dict[int, Any] = {}
        values: dict[int, bytes] = {}
        for number in range(60):
            values[number] = self.data(draw.randrange(1, 200_000), number)
            resident[number] = self.to_device(values[number])
            if draw.random() < 0.6:
                victim = draw.choice(sorted(resident))
                ticket = stack.store(resident[victim].address, len(values[victim]))
                if ticket is not None:
                    ticket.written.hold_compute()
                    del resident[victim]
                    stored[victim] = ticket
            if stored and draw.random() < 0.3:
                back = draw.choice(sorted(stored))
                resident[back] = self.to_device(bytes(len(values[back])))
                stack.load(stored[back], resident[back].address).hold_compute()
                stack.discard(stored.pop(back))
            assert resident.keys() | stored.keys() == values.keys()
            assert not resident.keys() & stored.keys()
        for number, memory in resident.items():
            assert self.to_bytes(memory) == values[number]
        assert {ticket.tier for ticket in stored.values()} == set(stack.tiers)
        for number, ticket in stored.items():
            assert self.loaded(stack, ticket) == values[number]
        assert [s.tickets for s in stack.statistics()] == [
            sum(t.tier is tier for t in stored.values()) for tier in stack.tiers
        ]
        stack.finish()
        stack.trim()
        stack.close()
        assert stack.used_bytes == 0
