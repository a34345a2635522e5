"""Let NumPy's arrays live in a pool.

Covers entering and leaving, and finding an array's block. Does not cover the protocol itself
(`numpy_handler`).

1. On leaving, the handler that was in force before is in force again, after an exception too.
2. Arrays outlive the context: their memory goes back to its pool whenever and wherever they die.
3. Only this context is affected: a thread starts with NumPy's own handler and enters for itself.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from dynamemo.allocator.block import Block
from dynamemo.allocator.numpy_handler import SMALL_BYTES, PoolHandler, bound_pools
from dynamemo.allocator.pool import Pool

__all__ = ["SMALL_BYTES", "root_array", "using_numpy_pool"]

_Array = np.ndarray[Any, Any]


@contextmanager
def using_numpy_pool(pool: Pool, *, small_bytes: int = SMALL_BYTES) -> Iterator[Pool]:
    """Take the memory of new NumPy arrays from a pool, in this context (PEP 567).

    Arrays below `small_bytes` bytes stay with the C library and count against the budget all the
    same. A request that does not fit makes NumPy raise `MemoryError`, and `Pool.last_error` holds
    the allocator's own error; if that is a `KeyboardInterrupt`, it is raised again soon after. In a
    forked child, new arrays come from the C library. Contexts nest.

    Parameters
    ----------
    pool : Pool
        A pool of host memory; kept alive as long as an array of it lives.
    small_bytes : int
        Least length that the pool serves.
    small_bytes : int
        Where a block begins to be worth the pool's granularity.
    """
    handler = PoolHandler(pool, small_bytes=small_bytes)
    previous = handler.enter()
    try:
        yield pool
    finally:
        handler.leave(previous)


def root_array(array: _Array) -> tuple[_Array, Block | None]:
    """Return the array that owns a view's memory, and its block.

    Parameters
    ----------
    array : numpy.ndarray
        Any array; views are followed down to the owner, through memoryviews too.

    Returns
    -------
    tuple
        The owner (the last array on the way where it is not an array), and its block; None for
        memory that is in no pool.
    """
    base = array.base
    while base is not None:
        if isinstance(base, memoryview):
            base = base.obj
            continue
        if not isinstance(base, np.ndarray):
            return array, None
        array = base
        base = array.base
    address = array.__array_interface__["data"][0]
    for pool in bound_pools:
        block = pool.block_at(address)
        if block is not None:
            return array, block
    return array, None
