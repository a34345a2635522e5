"""The context manager that trains within a budget.

`Runtime` composes the parts: a device and its arena, the tiers behind it, the memory manager and
the binding to Chainer. It holds no logic of its own beyond entering and leaving in the right order.

Invariants kept here:
  2. All array memory of the device that is asked for inside the context comes from the arena.
  4. Leaving undoes everything, also after an exception; arrays made inside stay valid, and a graph
     that is still alive can still run backward (what is away comes back when it is read).
"""

from __future__ import annotations

import contextlib
import os
import threading
import types

from dynamemo.allocator import (
    OutOfMemoryError,
    Pool,
    Tier,
    TierStack,
    parse_budget,
)
from dynamemo.chainer_binding import ChainerBinding, has_cuda
from dynamemo.device import Device, HostDevice
from dynamemo.errors import DynamemoError
from dynamemo.evictor import MIN_BYTES
from dynamemo.graph import LinkRate, Trace
from dynamemo.graph.trace_json import dumps
from dynamemo.manager import MemoryManager
from dynamemo.policies import Policy, policy_named
from dynamemo.recorded import recorded_trace
from dynamemo.statistics import Statistics

#: A size in bytes, as "4GiB", or as "60%" of what is free.
Size = int | str

#: Share of the free memory that a budget of None takes, and of the host's that backs a GPU.
_DEFAULT_SHARE = "90%"
_DEFAULT_HOST_SHARE = "50%"

#: The runtimes that were entered and not left, by the name of their device.
_active: dict[str, Runtime] = {}


class Runtime:
    """Train Chainer models within a budget of device memory.

    Everything that Chainer code does inside the context counts: parameters, activations,
    gradients, optimizer state, workspaces and your own arrays on that device.

    Parameters
    ----------
    budget : int or str, optional
        Bytes that may be taken from the device: a number, "4GiB", or a percentage of what is free
        when the context is entered. Default: 90% of that.
    device : str or int
        "auto" (the current GPU if CuPy sees one, else the CPU), "cpu", "cuda", "cuda:1", or the
        number of a GPU. Or an object that does what `dynamemo.device.Device` says.
    host_budget : int or str, optional
        Bytes that evicted tensors may take outside of the device: pinned host memory for a GPU
        (default: half of what is free), file space for the CPU (default: what the folder has).
    spill_dir : path, optional
        Folder for the private spill file, which has no name in it. Default: the system's temporary
        folder for the CPU; none for a GPU, which spills to the host only.
    policy : str or Policy
        What to evict and how: "none", "liveness", "lru", "speed-centric", "memory-centric",
        "recompute", "offload" or "cost-aware".
    verify : bool
        Compare every recomputed tensor with a hash taken in forward. Slow; for finding faults.

    Raises
    ------
    ValueError
        For a budget or host budget that is no size, or an unknown policy or device.
    DynamemoError
        On entering: another runtime is active for that device or in this thread, the device does
        not exist, its memory is taken.
    OutOfMemoryError
        Inside, where the budget cannot be met: it names the function, its bytes and the smallest
        budget that would have done. Arrays, model and allocator stay usable.

    Examples
    --------
    >>> import dynamemo, chainer, numpy
    >>> import chainer.functions as F
    >>> with dynamemo.Runtime(budget="64MiB", device="cpu") as runtime:
    ...     x = chainer.Variable(numpy.ones((8, 1024), "f"))
    ...     F.sum(F.relu(x * 2)).backward()
    >>> runtime.statistics().peak_bytes < 64 << 20
    True
    """

    def __init__(
        self,
        budget: Size | None = None,
        *,
        device: str | int | Device = "auto",
        host_budget: Size | None = None,
        spill_dir: str | os.PathLike[str] | None = None,
        policy: str | Policy = "cost-aware",
        verify: bool = False,
    ) -> None:
        self._budget = _checked(budget)
        self._host_budget = _checked(host_budget)
        self._device_name = device
        self._spill_dir = spill_dir
        self._policy = policy_named(policy) if isinstance(policy, str) else policy
        self._verify = verify
        self._stack = contextlib.ExitStack()
        self._pool: Pool | None = None
        self._tiers: TierStack | None = None
        self._manager: MemoryManager | None = None
        self._final: Statistics | None = None

    def __enter__(self) -> Runtime:
        """Take the arena and connect Chainer; nothing is left changed if that fails."""
        if self._manager is not None:
            raise DynamemoError("a Runtime can be entered once: make a new one")
        self._device = _resolve_device(self._device_name)
        self._thread_id = threading.get_ident()
        _refuse_second(self)
        with contextlib.ExitStack() as stack:
            self._open(stack)
            self._stack = stack.pop_all()
        _active[self._device.name] = self
        return self

    def _open(self, stack: contextlib.ExitStack) -> None:
        device = self._device
        is_torture = self._policy.is_eager
        budget_bytes = parse_budget(self._budget or _DEFAULT_SHARE, free_bytes=device.free_bytes)
        pool = device.make_pool(budget_bytes)
        self._tier_list = self._make_tiers(device)
        self._tiers = TierStack(self._tier_list)
        binding = ChainerBinding(device)
        manager = MemoryManager(
            device,
            pool,
            self._tiers,
            self._policy,
            replay=binding.replay,
            version_of=binding.version_of,
            verify=self._verify,
            min_bytes=1 if is_torture else MIN_BYTES,
        )
        manager.transfers.measure()
        pool.reclaimer = manager
        pool.explain = manager.explain
        binding.attach(manager)
        self._pool, self._manager, self._binding = pool, manager, binding
        stack.callback(_release, binding, manager)
        stack.enter_context(device.using_pool(pool, small_bytes=1 if is_torture else None))
        stack.callback(binding.leave)
        binding.enter()

    def _make_tiers(self, device: Device) -> list[Tier]:
        tiers: list[Tier] = []
        limit: int | None = None
        if self._host_budget is not None:
            limit = parse_budget(self._host_budget, free_bytes=HostDevice().free_bytes)
        if device.has_host_tier:
            default = parse_budget(_DEFAULT_HOST_SHARE, free_bytes=HostDevice().free_bytes)
            tiers.append(device.make_host_tier(default if limit is None else limit))
            limit = None
        if not device.has_host_tier or self._spill_dir is not None:
            folder = None if self._spill_dir is None else os.fspath(self._spill_dir)
            tiers.append(device.make_file_tier(folder, limit))
        return tiers

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: types.TracebackType | None,
    ) -> None:
        """Put Chainer, CuPy and NumPy back; turn NumPy's MemoryError into ours."""
        _active.pop(self._device.name, None)
        self._final = self.statistics()
        self._stack.close()
        ours = None
        if self._pool is not None:
            # Not kept any longer: its traceback's frames hold arrays.
            ours, self._pool.last_error = self._pool.last_error, None
        is_plain = isinstance(error, MemoryError) and not isinstance(error, OutOfMemoryError)
        if is_plain and isinstance(ours, OutOfMemoryError):
            raise ours from error

    def statistics(self) -> Statistics:
        """Return what was done so far; after leaving, what was done in all.

        Raises
        ------
        DynamemoError
            Before the runtime was entered.
        """
        if self._final is not None:
            return self._final
        manager, pool, tiers = self._manager, self._pool, self._tiers
        if manager is None or pool is None or tiers is None:
            raise DynamemoError("the Runtime was not entered yet: there are no statistics")
        manager.drain()
        figures = pool.statistics()
        counters = manager.counters
        return Statistics(
            device=self._device.name,
            policy=self._policy.name,
            budget_bytes=figures.budget_bytes,
            current_bytes=figures.current_bytes + figures.reserved_bytes,
            peak_bytes=figures.peak_bytes + figures.reserved_bytes,
            dropped_bytes=counters.dropped_bytes,
            recomputed_bytes=counters.recomputed_bytes,
            offloaded_bytes=counters.offloaded_bytes,
            early_bytes=counters.early_bytes,
            stalled_bytes=counters.stalled_bytes,
            fetched_bytes=counters.fetched_bytes,
            prefetched_bytes=counters.prefetched_bytes,
            awaited_bytes=counters.awaited_bytes,
            cancelled_bytes=counters.cancelled_bytes,
            late_bytes=counters.late_bytes,
            host_waits=self._device.copier.waits,
            slab_waits=sum(tier.waits for tier in self._tier_list),
            out_bytes_per_s=manager.transfers.outward.bytes_per_s,
            in_bytes_per_s=manager.transfers.inward.bytes_per_s,
            preserved_bytes=counters.preserved_bytes,
            moved_bytes=counters.moved_bytes,
            recomputed_functions=counters.recomputed_functions,
            iterations=(
                manager.recorder.iterations
                + manager.recorder.is_iteration_open
                + self._binding.slumber.finished_iterations
            ),
            pool=figures,
            tier_bytes={type(tier).__name__: tier.used_bytes for tier in self._tier_list},
        )

    def trace(self) -> Trace:
        """Return the recording of the last complete iteration (empty before the first).

        While everything fits the runtime looks away; then it is the last one that was looked at.
        """
        return recorded_trace(self._entered())

    def save_trace(self, path: str | os.PathLike[str]) -> None:
        """Write `trace()` and the link's rates to a file for `dynamemo plan`.

        Parameters
        ----------
        path : path
            Replaced if it is there.

        Raises
        ------
        OSError
            If it cannot be written.
        """
        transfers = self._entered().transfers
        outward, inward = (
            LinkRate(link.bytes_per_s, link.latency_s)
            for link in (transfers.outward, transfers.inward)
        )
        text = dumps(self.trace(), outward=outward, inward=inward)
        with open(path, "w", encoding="utf-8") as file:
            file.write(text)

    def _entered(self) -> MemoryManager:
        if self._manager is None:
            raise DynamemoError("the Runtime was not entered yet: there is no trace")
        return self._manager

    def reset_peak(self) -> None:
        """Let `peak_bytes` start again from what is taken now."""
        if self._pool is not None:
            self._pool.reset_peak()

    def release_host_memory(self) -> None:
        """Give host memory (pinned, for a GPU) and file space that no tensor needs back.

        May be called at any time, also after leaving. Waits for copies under way.
        """
        if self._tiers is not None:
            self._tiers.finish()
            self._tiers.trim()


def _refuse_second(runtime: Runtime) -> None:
    for other in _active.values():
        if other._device.name == runtime._device.name:
            where = f"for {other._device.name} in this process"
        elif other._thread_id == runtime._thread_id:
            where = f"in this thread, for {other._device.name}"
        else:
            continue
        raise DynamemoError(
            f"a dynamemo.Runtime is already active {where}: leave it first, or use that one (one "
            "budget holds for all models inside); another device takes another thread"
        )


def _release(binding: ChainerBinding, manager: MemoryManager) -> None:
    manager.close()
    binding.release()


def _checked(size: Size | None) -> Size | None:
    """Refuse at construction what cannot be a size, without asking the device."""
    if size is not None:
        parse_budget(size, free_bytes=lambda: 1 << 40)
    return size


def _resolve_device(device: str | int | Device) -> Device:
    """Return the device of that name.

    Raises
    ------
    ValueError
        For something that names no device.
    DynamemoError
        For a GPU where there is none of that number, or no CuPy.
    """
    if device == "cpu":
        return HostDevice()
    if device == "auto":
        return _default_device()
    if not isinstance(device, str | int | float) and hasattr(device, "make_pool"):
        return device
    index: int | None = None
    if isinstance(device, int) and not isinstance(device, bool):
        index = device
    elif isinstance(device, str) and device.startswith("cuda"):
        suffix = device.removeprefix("cuda").removeprefix(":")
        if suffix.isdigit() or not suffix:
            index = int(suffix) if suffix else -1
    if index is None:
        raise ValueError(
            f"unknown device {device!r}: use 'auto', 'cpu', 'cuda', 'cuda:0' or the GPU's number"
        )
    if not has_cuda():
        raise DynamemoError(
            f"device {device!r} needs CuPy, which cannot be used here: install the extra "
            "'cuda13' or 'cuda12', or use device='cpu'"
        )
    from dynamemo.cuda_device import CudaDevice

    return CudaDevice(None if index < 0 else index)


def _default_device() -> Device:
    if not has_cuda():
        return HostDevice()
    from dynamemo.cuda_device import CudaDevice, device_count

    return CudaDevice(None) if device_count() else HostDevice()
