"""Use the allocator by itself, for any NumPy or CuPy code.

Covers choosing the device and making the arena. Eviction is the runtime's affair.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

from dynamemo.allocator.arena import HostArena
from dynamemo.allocator.numpy_memory import using_numpy_pool
from dynamemo.allocator.pool import Pool
from dynamemo.allocator.sizes import parse_budget

__all__ = ["free_host_bytes", "using_pool"]

#: Left to libraries when a GPU's budget is a percentage (context, cuDNN, cuFFT, NCCL).
DEVICE_RESERVE_BYTES = 512 << 20


@contextmanager
def using_pool(budget: int | str, *, device: str | int = "auto") -> Iterator[Pool]:
    """Take the memory of new arrays from one budgeted pool.

    Parameters
    ----------
    budget : int or str
        Bytes, a size ("4GiB") or a percentage of what the device has free ("60%").
    device : str or int
        "cpu": NumPy's arrays. "cuda", "cuda:1" or 1: CuPy's arrays on that GPU. "auto": the current
        GPU if CuPy is installed and sees one, else the CPU.

    Yields
    ------
    Pool
        For statistics. Arrays outlive the context; the pool's memory is released with the last of
        them.

    Raises
    ------
    ValueError
        If the budget is not a size or the device does not exist.
    """
    number = device_number(device)
    if number is None:
        nbytes = parse_budget(budget, free_bytes=free_host_bytes)
        with using_numpy_pool(Pool(HostArena(nbytes))) as pool:
            yield pool
        return
    # CuPy is imported only where a GPU is asked for.
    from dynamemo.allocator import cupy_memory

    with cupy_memory.using_device(number):
        nbytes = parse_budget(
            budget, free_bytes=cupy_memory.free_device_bytes, reserve_bytes=DEVICE_RESERVE_BYTES
        )
        with cupy_memory.using_cupy_pool(cupy_memory.new_pool(nbytes)) as pool:
            yield pool


def device_number(device: str | int) -> int | None:
    """Return the number of the GPU that is meant, or None for the CPU.

    Raises
    ------
    ValueError
        If the device does not exist.
    """
    if device == "cpu":
        return None
    if device == "auto":
        return _current_gpu()
    number = _current_gpu() if device == "cuda" else _named_gpu(device)
    if number is None or not 0 <= number < _gpu_count():
        raise ValueError(
            f"no device {device!r}: {_gpu_count()} GPUs are seen; "
            "give 'auto', 'cpu', 'cuda', 'cuda:N' or N"
        )
    return number


def free_host_bytes() -> int:
    """Return the bytes that the machine can still give to this process."""
    try:
        with open("/proc/meminfo", encoding="ascii") as lines:
            for line in lines:
                if line.startswith("MemAvailable:"):
                    return int(line.split()[1]) * 1024
    except OSError:
        pass
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _named_gpu(device: str | int) -> int | None:
    if isinstance(device, int):
        return device
    kind, _, number = device.partition(":")
    return int(number) if kind == "cuda" and number.isdigit() else None


def _current_gpu() -> int | None:
    if not _gpu_count():
        return None
    from dynamemo.allocator import cupy_memory

    return cupy_memory.current_gpu()


def _gpu_count() -> int:
    try:
        from dynamemo.allocator import cupy_memory
    except ImportError:  # CuPy is not installed
        return 0
    return cupy_memory.gpu_count()
