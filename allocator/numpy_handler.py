"""Speak NumPy's data-memory protocol (NEP 49) from Python, without a compiler.

Covers the C structures, the callbacks and the life of what NumPy holds pointers to. Does not cover
who enters and leaves (`numpy_memory`) nor placement (`pool`).

1. While a pool is in force, a free runs no Python code and takes no lock. NumPy frees arrays while
   an exception is pending, in the middle of a garbage collection and from any thread; a Python
   callback there loses the exception, and the interpreter then crashes.
2. What NumPy may still call or write to lives for ever: records are reused, never destroyed.
3. No exception leaves a callback, whatever happens, an interrupt or a full stack included: the
   answer is NULL, and `Pool.last_error` says why. (An exception in a ctypes callback leaves the
   result undefined, so NumPy would write to a stray address; cffi's callbacks have an error value.)
4. Memory is given back to the pool it came from, whatever handler is in force then.

How a free gets by without Python code: every array has a handler capsule of its own. The ``malloc``
callback that serves one array puts the next record's capsule in force for the next one. An array
refers to its capsule as long as it has the memory, so **a record's memory is free when nobody else
refers to its capsule**. To know where to look, NumPy's ``free(ctx, ptr, size)`` is the C library's
``time``, and ``ctx`` is the address of the record's *flag*: it is set natively, and whoever uses
the pool next looks through the flags (`collect_freed`). After the pool's context has been left
nobody would look, so the arrays still alive then get a token object for ``ctx`` and CPython's
``Py_DecRef`` for ``free``: the token's finalizer, before which CPython sets a pending exception
aside, frees at once.

*Source*: NEP 49, "Data allocation strategies"; NumPy 2.0 to 2.5, whose sorts make several requests
of one handler, free NULL, and may have made their result with the same one: so a free by itself
proves nothing. We differ from the NEP's example in every pointer but ``malloc``.
"""

from __future__ import annotations

import atexit
import ctypes
import os
import signal
from _thread import interrupt_main
from contextlib import suppress
from traceback import format_tb
from types import TracebackType

from cffi import FFI

from dynamemo.allocator import numpy_records
from dynamemo.allocator.block import Block
from dynamemo.allocator.errors import InternalError, NestedUseError, OutOfMemoryError
from dynamemo.allocator.numpy_capi import default_handler, in_force, incref, set_handler
from dynamemo.allocator.numpy_records import (
    OutsideBlock,
    abandon_after_fork,
    add_held,
    arm,
    by_ctx,
    collect_all,
    collect_freed,
    install_callbacks,
    leave_records,
    replace_held,
    retire_at_exit,
    undo,
)
from dynamemo.allocator.pool import Pool

__all__ = ["SMALL_BYTES", "PoolHandler", "bound_pools"]

#: Requests below this many bytes go to the C library and only count against the budget.
SMALL_BYTES = 1024

_entered: list[PoolHandler] = []
#: Pools that NumPy has blocks of or may ask for some.
bound_pools: list[Pool] = []


class PoolHandler:
    """Binds NumPy's requests in some contexts to one pool.

    Parameters
    ----------
    pool : Pool
        Kept alive until the handler is left and NumPy's last block is freed.
    small_bytes : int
        Requests below this many bytes go to the C library.
    """

    def __init__(self, pool: Pool, *, small_bytes: int = SMALL_BYTES) -> None:
        self._small_bytes = small_bytes
        self.pool: Pool | None = pool
        self.is_left = False
        self._is_forked = False

    def enter(self) -> object:
        """Put the handler in force in this context; return the capsule that was in force."""
        assert self.pool is not None
        self.pool.collect_late = collect_all
        bound_pools.append(self.pool)
        _entered.append(self)
        return set_handler(arm(self).capsule)

    def leave(self, previous: object) -> None:
        """Put the former capsule in force in this context. Arrays keep their memory."""
        set_handler(previous)
        self.is_left = True
        _entered.remove(self)
        leave_records(self)
        self.let_go()

    def let_go(self) -> None:
        """Drop the pool if the handler is left and nothing of NumPy's is in it; never waits."""
        pool = self.pool
        if pool is None or not self.is_left:
            return
        pool.try_settle()
        if not pool.has_blocks:
            self.pool = None
            bound_pools.remove(pool)

    def abandon(self) -> None:
        """Serve new requests from the C library, in a forked child."""
        self._is_forked = True

    def take(self, nbytes: int) -> Block | OutsideBlock:
        """Return memory of at least `nbytes`; `OutOfMemoryError` if the pool has none."""
        pool = self.pool
        if pool is None or self._is_forked:
            return OutsideBlock(nbytes)
        try:
            if nbytes >= self._small_bytes:
                return pool.allocate(nbytes)
            return self._take_small(pool, nbytes)
        except NestedUseError:
            return OutsideBlock(nbytes)

    def _take_small(self, pool: Pool, nbytes: int) -> OutsideBlock:
        item = OutsideBlock(nbytes)
        try:
            pool.take_outside(item, nbytes)
        except BaseException:
            item.release(pool)
            raise
        return item


# -- callbacks --


def _on_malloc(ctx: int, nbytes: int) -> int:
    record = by_ctx[ctx]
    handler = record.handler
    assert isinstance(handler, PoolHandler)
    item = None
    try:
        # First of all: what runs on our behalf below may make arrays too.
        if in_force.get(None) is record.capsule:
            in_force.set(arm(handler).capsule)
        collect_freed()
        item = handler.take(nbytes)
        add_held(record, item)
        return item.address
    except BaseException as error:
        numpy_records.is_sweep_due = True
        undo(record, item)
        if handler.pool is not None:
            handler.pool.last_error = error
        raise


def _on_calloc(ctx: int, count: int, item_bytes: int) -> int:
    nbytes = count * item_bytes
    address = _on_malloc(ctx, nbytes)
    try:
        ctypes.memset(address, 0, nbytes)
    except BaseException:
        numpy_records.is_sweep_due = True
        raise
    return address


def _on_realloc(ctx: int, address: int, nbytes: int) -> int:
    if not address:
        return _on_malloc(ctx, nbytes)
    record = by_ctx[ctx]
    handler = record.handler
    assert isinstance(handler, PoolHandler)
    try:
        old = next((item for item in record.held if item.address == address), None)
        if old is None:
            raise InternalError(f"NumPy resizes memory at {address:#x}, which is not ours")
        if isinstance(old, Block) and old.block_bytes // 2 < nbytes <= old.block_bytes:
            return old.address
        new = handler.take(nbytes)
        record.held = [*record.held, new]  # an interrupt from here on leaves it with the old
        # A block may have been resized in place before, so all of it counts.
        old_bytes = old.block_bytes if isinstance(old, Block) else old.requested_bytes
        ctypes.memmove(new.address, address, min(nbytes, old_bytes))
        replace_held(record, old)
        return new.address
    except BaseException as error:
        numpy_records.is_sweep_due = True
        if handler.pool is not None:
            handler.pool.last_error = error
        raise


class _Interrupt(int):
    #: Reading it sets off an interrupt. No call instruction is run, so that it is not raised just
    #: here.
    now = property(interrupt_main)


_interrupt = _Interrupt(signal.SIGINT)


def _on_error(
    kind: type[BaseException], error: BaseException, traceback: TracebackType | None
) -> None:
    for handler in _entered:
        if handler.pool is not None and kind is not OutOfMemoryError:
            handler.pool.last_error = error
    if isinstance(error, Exception) and not isinstance(error, MemoryError):
        with suppress(RecursionError):
            story = "".join(format_tb(traceback))
            error.add_note("while memory was made free for NumPy:\n" + story)
    _drop_frames(error)
    if kind is KeyboardInterrupt:
        # NumPy raises MemoryError now; the interrupt follows it at the next opportunity.
        _interrupt.now  # noqa: B018


def _drop_frames(error: BaseException | None) -> None:
    """Take the tracebacks off an error that will be kept: their frames would keep arrays alive."""
    while error is not None:
        error.__traceback__ = None
        error = error.__cause__ or error.__context__


_ffi = FFI()
_callbacks = tuple(
    _ffi.callback(signature, function, error=0, onerror=_on_error)
    for signature, function in (
        ("uintptr_t(uintptr_t, size_t)", _on_malloc),
        ("uintptr_t(uintptr_t, size_t, size_t)", _on_calloc),
        ("uintptr_t(uintptr_t, uintptr_t, size_t)", _on_realloc),
    )
)
install_callbacks(tuple(int(_ffi.cast("uintptr_t", callback)) for callback in _callbacks))


def _abandon_after_fork() -> None:
    """In a forked child: new arrays come from the C library, old ones are freed as they die."""
    abandon_after_fork()
    for handler in _entered:
        handler.abandon()
    set_handler(default_handler)


def _retire_at_exit() -> None:
    set_handler(default_handler)
    retire_at_exit()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_abandon_after_fork)
atexit.register(_retire_at_exit)
incref(id(_callbacks))  # past the end of this module too: NumPy has pointers to them
