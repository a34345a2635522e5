"""An allocate-free pair costs at most 1.5 times what it costs in CuPy's default pool.

Claim checked (exit code 1 where it does not hold): over the allocations of one training step of
ResNet-50, in the order in which they were made and freed, a pair takes at most `--limit` times as
long in `dynamemo.allocator` as in `cupy.get_default_memory_pool()`.

Both are asked through `cupy.cuda.alloc`, by the same loop, in one process, in alternating rounds
after a warm-up, with the collector off. The loop's own time is measured with a function that
allocates nothing, and taken off both. The median of the rounds counts.

A trace is a JSON list: `n` for a request of `n` bytes, `-i` for the free of the `i`-th request,
counted from 1. What the step leaves alive is freed at the end.

Usage:
  python -m benchmarks.allocation [--trace FILE] [--batch N] [--size N] [--out FILE]
      replays a trace, or where none is given the one it records first, on the GPU
  python -m benchmarks.allocation --record FILE [--device cpu|cuda] [--batch N] [--size N]
      records a trace only
  python -m benchmarks.allocation --cpu --trace FILE
      the pool alone, with a Python class in the place of CuPy's; nothing is compared
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import sys
import time
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from benchmarks.environment import describe
from dynamemo.allocator import Block, HostArena, Pool, using_numpy_pool
from dynamemo.allocator.block import BLOCK_SLOTS, UNPLACED

#: The arena in multiples of what the trace has in use at most: time is compared, not placement.
ROOM = 2

Trace = list[int]
Allocate = Callable[[int], Any]

# -- recording --


class _FreeNote:
    """The owner of a block; notes its free by dying."""

    def __init__(self, trace: Trace) -> None:
        trace_requests = sum(entry >= 0 for entry in trace)
        self._trace, self._number = trace, trace_requests

    def __del__(self) -> None:
        self._trace.append(-self._number)


def _recording(pool_class: type[Pool]) -> type[Pool]:
    class RecordingPool(pool_class):  # type: ignore[misc, valid-type]
        trace: Trace | None = None

        def place(self, block: Block, requested_bytes: int, end: Any, stream: int) -> None:
            super().place(block, requested_bytes, end, stream)
            if self.trace is not None:
                self.trace.append(requested_bytes)
                block.owner = _FreeNote(self.trace)

    return RecordingPool


def record(device: str, *, batch: int, size: int) -> Trace:
    """Return the trace of ResNet-50's second training step."""
    if device == "cpu":
        pool = _recording(Pool)(HostArena(64 << 30))
        with using_numpy_pool(pool, small_bytes=0):
            return _record_step(pool, "@numpy", batch, size)
    from dynamemo.allocator import cupy_memory

    capacity_bytes = cupy_memory.free_device_bytes() // 2
    pool = _recording(cupy_memory.CudaPool)(cupy_memory.CudaArena(capacity_bytes))
    with cupy_memory.using_cupy_pool(pool):
        return _record_step(pool, "@cupy:0", batch, size)


def _record_step(pool: Any, device: str, batch: int, size: int) -> Trace:
    import chainer
    import chainer.functions as F
    import chainer.links as L
    import numpy

    model = L.ResNet50Layers(pretrained_model=None)
    model.to_device(device)
    optimizer = chainer.optimizers.MomentumSGD(0.01).setup(model)
    inputs = numpy.random.RandomState(0).standard_normal((batch, 3, size, size)).astype("f")
    labels = numpy.zeros(batch, "i")
    trace: Trace = []
    for is_second in (False, True):
        if is_second:
            pool.settle()
            pool.trace = trace
        x, t = (chainer.get_device(device).send(array) for array in (inputs, labels))
        loss = F.softmax_cross_entropy(model(x, layers=["fc6"])["fc6"], t)
        model.cleargrads()
        loss.backward()
        optimizer.update()
        del loss, x, t
    pool.settle()
    pool.trace = None
    return _with_last_frees(list(trace))


def _with_last_frees(trace: Trace) -> Trace:
    freed = {-entry for entry in trace if entry < 0}
    requests = sum(entry >= 0 for entry in trace)
    return trace + [-number for number in range(1, requests + 1) if number not in freed]


# -- replaying --


def _operations(trace: Trace) -> tuple[list[tuple[int, int]], int]:
    """Return (slot, bytes; -1 to free) for each entry, and the number of slots, reused."""
    operations, spare, slots, slot_of = [], [], 0, {}
    request = 0
    for entry in trace:
        if entry >= 0:
            request += 1
            if not spare:
                spare.append(slots)
                slots += 1
            slot_of[request] = spare.pop()
            operations.append((slot_of[request], entry))
        else:
            slot = slot_of.pop(-entry)
            spare.append(slot)
            operations.append((slot, -1))
    return operations, slots


def _peak_bytes(trace: Trace) -> int:
    requests, used_bytes, peak_bytes = [], 0, 0
    for entry in trace:
        if entry >= 0:
            requests.append((entry + 511) // 512 * 512 or 512)
        used_bytes += requests[-1] if entry >= 0 else -requests[-entry - 1]
        peak_bytes = max(peak_bytes, used_bytes)
    return peak_bytes


def _replay(operations: list[tuple[int, int]], slots: list[Any], allocate: Allocate) -> float:
    """Return the seconds that one pass takes."""
    started = time.perf_counter()
    for slot, nbytes in operations:
        if nbytes < 0:
            slots[slot] = None
        else:
            slots[slot] = allocate(nbytes)
    return time.perf_counter() - started


Peer = tuple[Callable[[], AbstractContextManager[Any]], Allocate]


def measure(trace: Trace, peers: dict[str, Peer], *, rounds: int, passes: int) -> dict[str, float]:
    """Return the median nanoseconds of a pair for each peer, less the loop's own."""
    operations, count = _operations(trace)
    slots: list[Any] = [None] * count
    pairs = len(trace) // 2
    peers = {"loop": (nullcontext, lambda nbytes: None), **peers}
    seconds: dict[str, list[float]] = {name: [] for name in peers}
    for number in range(rounds + 2):  # two to warm up
        for name, (enter, allocate) in peers.items():
            with enter():
                gc.collect()
                gc.disable()
                try:
                    each = [_replay(operations, slots, allocate) for _ in range(passes)]
                finally:
                    gc.enable()
            if number >= 2:
                seconds[name].append(statistics.median(each))
    figures = {name: statistics.median(each) / pairs * 1e9 for name, each in seconds.items()}
    loop_ns = figures["loop"]
    return {name: ns if name == "loop" else ns - loop_ns for name, ns in figures.items()}


# -- peers --


def _gpu_peers(peak_bytes: int) -> dict[str, Peer]:
    import cupy

    from dynamemo.allocator import cupy_memory

    default = cupy.get_default_memory_pool()
    cupy.cuda.set_allocator(default.malloc)
    pool = cupy_memory.new_pool(peak_bytes * ROOM + (64 << 20))
    alloc = cupy.cuda.alloc
    return {
        "cupy": (nullcontext, alloc),
        "dynamemo": (lambda: cupy_memory.using_cupy_pool(pool), alloc),
    }


class _Memory:
    """Stands in for `cupy_memory.PoolMemory`."""

    __slots__ = ("__weakref__", "block", "device_id", "ptr", "size")


class _WatchedBlock(Block, weakref.ref[_Memory]):
    __slots__ = BLOCK_SLOTS


def _bare_pool(peak_bytes: int) -> dict[str, Peer]:
    pool = Pool(HostArena(peak_bytes * ROOM + (64 << 20)))
    place, note_death = pool.place, pool.late.append

    def allocate(nbytes: int) -> _Memory:  # as in `cupy_memory`
        memory = _Memory()
        block = _WatchedBlock(memory, note_death)
        block.address = 0
        block.parking = UNPLACED
        place(block, nbytes, None, 0)
        memory.ptr = block.address
        memory.size = nbytes
        memory.device_id = 0
        memory.block = block
        return memory

    return {"dynamemo": (nullcontext, allocate)}


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--trace", help="file to replay")
    parser.add_argument("--record", help="file for a new trace; nothing is replayed")
    parser.add_argument("--device", default="cuda", help="where to record")
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--size", type=int, default=224)
    parser.add_argument("--cpu", action="store_true", help="the pool alone, without CuPy")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--passes", type=int, default=20, help="of the trace, in a round")
    parser.add_argument("--limit", type=float, default=1.5)
    parser.add_argument("--out", help="file for the results")
    return parser


def main() -> int:
    """Record or replay; print the figures; return the exit code."""
    options = _parser().parse_args()
    if options.record:
        trace = record(options.device, batch=options.batch, size=options.size)
        with open(options.record, "w") as file:
            json.dump(trace, file, separators=(",", ":"))
        print(f"{len(trace) // 2} pairs, peak {_peak_bytes(trace):,} bytes")
        return 0
    if options.trace:
        with open(options.trace) as file:
            trace = json.load(file)
    else:
        device = "cpu" if options.cpu else options.device
        trace = record(device, batch=options.batch, size=options.size)
    peak_bytes = _peak_bytes(trace)
    peers = _bare_pool(peak_bytes) if options.cpu else _gpu_peers(peak_bytes)
    figures = measure(trace, peers, rounds=options.rounds, passes=options.passes)
    result: dict[str, Any] = {
        "environment": describe(),
        "options": {key: value for key, value in vars(options).items() if key != "out"},
        "pairs": len(trace) // 2,
        "peak_bytes": peak_bytes,
        "ns_per_pair": figures,
    }
    print(f"{len(trace) // 2} pairs of a step, peak {peak_bytes / 2**20:,.0f} MiB; per pair:")
    for name, ns in figures.items():
        print(f"{name:10} {ns:8.0f} ns")
    is_met = True
    if "cupy" in figures:
        result["ratio"] = ratio = figures["dynamemo"] / figures["cupy"]
        is_met = ratio <= options.limit
        print(f"ratio      {ratio:8.2f}, at most {options.limit} {'ok' if is_met else 'FAILED'}")
    if options.out:
        with open(options.out, "w") as file:
            json.dump(result, file, indent=2)
    return 0 if is_met else 1


if __name__ == "__main__":
    sys.exit(main())
