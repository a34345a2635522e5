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
import sys
import threading
import time
from _thread import interrupt_main
from contextlib import suppress
from traceback import format_tb
from types import TracebackType

from cffi import FFI

from dynamemo.allocator.block import Block
from dynamemo.allocator.errors import (
    InternalError,
    NestedUseError,
    OutOfMemoryError,
)
from dynamemo.allocator.numpy_capi import (
    HandlerStruct,
    decref,
    default_handler,
    in_force,
    incref,
    native_decref,
    native_time,
    new_capsule,
    raw_free,
    raw_malloc,
    set_handler,
)
from dynamemo.allocator.pool import Pool

__all__ = ["SMALL_BYTES", "PoolHandler", "bound_pools", "collect_all", "collect_freed"]

#: Requests below this many bytes go to the C library and only count against the budget.
SMALL_BYTES = 1024

# -- small blocks and tokens --


class OutsideBlock:
    """A small block of the C library's memory."""

    __slots__ = ("address", "counted_bytes", "requested_bytes")

    def __init__(self, requested_bytes: int) -> None:
        self.address = raw_malloc(requested_bytes) or 0
        if not self.address:
            raise MemoryError(f"the C library has no {requested_bytes:,} bytes left")
        self.requested_bytes = requested_bytes
        #: Bytes counted against the pool's budget.
        self.counted_bytes = 0

    def release(self, pool: Pool | None) -> None:
        """Free it; a second call does what an interrupt kept the first from doing."""
        address, self.address = self.address, 0
        if address:
            raw_free(address)
        if pool is not None:
            pool.give_outside(self)


class _Token(int):
    """Index of a record whose handler has been left; NumPy's arrays own all references to it."""

    __slots__ = ()

    def __del__(self) -> None:
        _finish_token(self)


# -- records --

_FLAG_BYTES = 8  # what ``time`` writes
_FLAGS_PER_PAGE = 512
_NO_FLAG = bytes(_FLAG_BYTES)
#: Pages looked through at each request; all of them are when memory is short.
_PAGES_PER_LOOK = 4


class _Record:
    """One handler capsule and what belongs to it."""

    __slots__ = (
        "capsule",
        "flag_address",
        "handler",
        "held",
        "index",
        "is_spare",
        "struct",
        "token_address",
    )

    def __init__(self) -> None:
        self.index = len(_records)
        self.flag_address = _flag_address(self.index)
        #: Address of the token that stands in for the flag, 0 where there is none.
        self.token_address = 0
        #: The memory that was taken by way of this capsule.
        self.held: list[Block | OutsideBlock] = []
        self.handler: PoolHandler | None = None
        self.is_spare = False
        self.struct = HandlerStruct(
            b"dynamemo", 1, self.flag_address, *_callback_addresses, native_time
        )
        self.capsule: object = new_capsule(self.struct)
        _by_ctx[self.flag_address] = self
        _records.append(self)


_records: list[_Record] = []
_records_lock = threading.RLock()
_by_ctx: dict[int, _Record] = {}
#: Records that nobody refers to and that hold nothing.
_spare: list[_Record] = []
#: Records whose flag was seen while somebody still referred to their capsule.
_doubtful: set[_Record] = set()
_flag_pages: list[bytearray] = []
_collector = 0  # the thread that looks at the flags now
_next_page = 0
_arms_until_look = 0
#: Whether a request failed half-way, so that a record may hold something that nobody will flag.
_is_sweep_due = False
_entered: list[PoolHandler] = []
#: Pools that NumPy has blocks of or may ask for some.
bound_pools: list[Pool] = []


def _flag_address(index: int) -> int:
    page, place = divmod(index, _FLAGS_PER_PAGE)
    if page == len(_flag_pages):
        _flag_pages.append(bytearray(_FLAGS_PER_PAGE * _FLAG_BYTES))
    first = ctypes.addressof(ctypes.c_char.from_buffer(_flag_pages[page]))
    return first + place * _FLAG_BYTES


def _now_byte() -> int:
    """Return the byte that every flag set in these months contains; it changes twice a year."""
    return int(time.time()) >> 24 & 0xFF


_stamp = _now_byte()


def collect_freed() -> None:
    """Hand what NumPy has freed lately to the pools, looking at a bounded number of flags."""
    global _collector
    me = threading.get_ident()
    if _collector:
        return
    # The check and this are one step: nothing between them lets another thread or an interrupt in.
    _collector = me
    try:
        _look_at_some()
    finally:
        _collector = 0


def collect_all() -> None:
    """Hand all that NumPy has freed to the pools."""
    global _collector
    me = threading.get_ident()
    while _collector:
        if _collector == me:
            return  # in a finalizer in the middle of it
        time.sleep(0)
    _collector = me
    try:
        _look_at_all()
    finally:
        _collector = 0


def _look_at_some() -> None:
    global _next_page
    pages = _flag_pages
    if len(pages) <= _PAGES_PER_LOOK:
        for number, page in enumerate(pages):
            if page.find(_stamp) >= 0:
                _look_through(number, page, _stamp)
        return
    for _ in range(_PAGES_PER_LOOK):
        _next_page = number = (_next_page + 1) % len(pages)
        _look_through(number, pages[number], _stamp)


def _look_at_all() -> None:
    global _stamp, _is_sweep_due
    now = _now_byte()
    for stamp in {_stamp, now}:
        for number, page in enumerate(_flag_pages):
            _look_through(number, page, stamp)
    _stamp = now
    if _is_sweep_due:
        _doubtful.update(record for record in _records if not record.token_address)
        _is_sweep_due = False
    for record in list(_doubtful):
        _examine(record)


def _look_through(number: int, page: bytearray, stamp: int) -> None:
    byte = page.find(stamp)
    while byte >= 0:
        place = byte // _FLAG_BYTES
        record = _records[number * _FLAGS_PER_PAGE + place]
        _examine(record)
        # Last, so that an interrupt before it only makes us look again.
        page[place * _FLAG_BYTES : (place + 1) * _FLAG_BYTES] = _NO_FLAG
        byte = page.find(stamp, (place + 1) * _FLAG_BYTES)


def _examine(record: _Record) -> None:
    """Free what a record holds if nobody refers to its capsule."""
    if sys.getrefcount(record.capsule) > _UNSHARED:
        _doubtful.add(record)
        return
    _hand_over(record)
    _doubtful.discard(record)
    if not record.is_spare:
        record.is_spare = True
        _spare.append(record)
    if record.handler is not None and record.handler.is_left:
        record.handler.let_go()


def _hand_over(record: _Record) -> None:
    pool = None if record.handler is None else record.handler.pool
    for item in record.held:
        if pool is not None:
            pool.free_later(item)
        elif isinstance(item, OutsideBlock):
            item.release(None)
    record.held = []


def _arm(handler: PoolHandler) -> _Record:
    """Return a record that holds nothing and that nobody refers to, made over to the handler."""
    global _arms_until_look
    record = _pop_spare()
    if record is None and _doubtful:
        _arms_until_look -= 1
        if _arms_until_look < 0:  # seldom enough to cost little, however many are doubtful
            collect_all()
            _arms_until_look = len(_doubtful)
            record = _pop_spare()
    if record is None:
        with _records_lock:  # a record's index is its place
            record = _Record()
    record.handler = handler
    return record


def _pop_spare() -> _Record | None:
    try:
        record = _spare.pop()
    except IndexError:
        return None
    record.is_spare = False
    return record


# -- frees after the context has been left --


def _replace_flag(record: _Record) -> None:
    """Let a token stand in for the flag, one reference for each piece of memory."""
    token = _Token(record.index)
    address = id(token)
    _by_ctx[address] = record
    for _ in record.held:
        incref(address)
    record.token_address = address
    record.struct.ctx = address
    record.struct.free = native_decref
    _doubtful.discard(record)


def _end_token(record: _Record) -> None:
    address = record.token_address
    for _ in range(len(record.held)):
        decref(address)


def _finish_token(token: _Token) -> None:
    record = _records[token]
    _by_ctx.pop(id(token), None)
    record.token_address = 0
    record.struct.ctx = record.flag_address
    record.struct.free = native_time
    # The array being freed still refers to the capsule, after this call no more.
    if sys.getrefcount(record.capsule) > _UNSHARED + 1:
        if record.held:
            _replace_flag(record)  # a copied context may have freed NULL: wait for the next free
        return
    _hand_over(record)
    _doubtful.add(record)
    if record.handler is not None:
        record.handler.let_go()


# -- callbacks --


def _on_malloc(ctx: int, nbytes: int) -> int:
    global _is_sweep_due
    record = _by_ctx[ctx]
    handler = record.handler
    assert handler is not None
    item = None
    try:
        # First of all: what runs on our behalf below may make arrays too.
        if in_force.get(None) is record.capsule:
            in_force.set(_arm(handler).capsule)
        collect_freed()
        item = handler.take(nbytes)
        record.held = [*record.held, item]  # no call, so that a full stack cannot lose it
        if handler.is_left:
            _count_late_request(record)
        return item.address
    except BaseException as error:
        _is_sweep_due = True
        _undo(record, item)
        if handler.pool is not None:
            handler.pool.last_error = error
        raise


def _count_late_request(record: _Record) -> None:
    """Make sure that memory taken in a copy of a context that has been left is freed."""
    if record.token_address:
        incref(record.token_address)
    else:
        _replace_flag(record)


def _undo(record: _Record, item: Block | OutsideBlock | None) -> None:
    """Take back a request that failed or was interrupted half-way."""
    if item is not None:
        record.held = [other for other in record.held if other is not item]
        if isinstance(item, Block):
            item.pool.free_later(item)
        elif record.handler is not None:
            item.release(record.handler.pool)
    if not record.held:
        _doubtful.add(record)


def _on_calloc(ctx: int, count: int, item_bytes: int) -> int:
    nbytes = count * item_bytes
    address = _on_malloc(ctx, nbytes)
    ctypes.memset(address, 0, nbytes)
    return address


def _on_realloc(ctx: int, address: int, nbytes: int) -> int:
    if not address:
        return _on_malloc(ctx, nbytes)
    record = _by_ctx[ctx]
    handler = record.handler
    assert handler is not None
    try:
        for place, item in enumerate(record.held):
            if item.address == address:
                record.held[place] = new = handler.resize(item, nbytes)
                return new.address
        raise InternalError(f"NumPy resizes memory at {address:#x}, which is not ours")
    except BaseException as error:
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
_callback_addresses = tuple(int(_ffi.cast("uintptr_t", callback)) for callback in _callbacks)

#: References to a record's capsule as `sys.getrefcount` sees them when nobody else has any.
_UNSHARED = sys.getrefcount(_Record().capsule)
_examine(_records[0])

# -- binding a pool --


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
        return set_handler(_arm(self).capsule)

    def leave(self, previous: object) -> None:
        """Put the former capsule in force in this context. Arrays keep their memory."""
        set_handler(previous)
        self.is_left = True
        _entered.remove(self)
        for record in list(_records):
            if record.handler is self:
                _doubtful.add(record)
        collect_all()
        for record in list(_doubtful):
            if record.handler is self and record.held and not record.token_address:
                _replace_flag(record)
                if sys.getrefcount(record.capsule) <= _UNSHARED:
                    _end_token(record)  # freed by another thread just before
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

    def resize(self, item: Block | OutsideBlock, nbytes: int) -> Block | OutsideBlock:
        """Return memory of `nbytes` with the old contents; the old is freed where it is another."""
        if isinstance(item, Block) and item.block_bytes // 2 < nbytes <= item.block_bytes:
            return item
        new = self.take(nbytes)
        # A block may have been resized in place before, so all of it counts.
        old_bytes = item.block_bytes if isinstance(item, Block) else item.requested_bytes
        ctypes.memmove(new.address, item.address, min(nbytes, old_bytes))
        if isinstance(item, Block):
            item.pool.free_later(item)
        else:
            item.release(self.pool)
        return new


def _abandon_after_fork() -> None:
    """In a forked child: new arrays come from the C library, old ones are freed as they die."""
    global _collector, _records_lock
    _collector, _records_lock = 0, threading.RLock()
    for handler in _entered:
        handler.abandon()
    set_handler(default_handler)


def _retire_at_exit() -> None:
    """Make the frees of the dying interpreter native, so that they run no Python code."""
    set_handler(default_handler)
    for record in _records:
        record.struct.ctx = record.flag_address
        record.struct.free = native_time


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_abandon_after_fork)
atexit.register(_retire_at_exit)
# Past the end of this module too: NumPy has pointers into all of it.
for _immortal in (_records, _callbacks, _flag_pages):
    incref(id(_immortal))
