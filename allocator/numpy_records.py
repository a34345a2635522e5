"""Find out which memory NumPy has freed, without running Python code when it does.

Covers the handler capsules, one for each array alive, and what hangs on them. `numpy_handler` tells
how a free gets by.

1. A record's memory is free when only the record refers to its capsule; nothing else proves it.
2. Records, and all that NumPy may call or write to by way of them, live for ever and are reused.
3. An interrupt or a full stack anywhere in here loses nothing: it makes us look again.
"""

from __future__ import annotations

import ctypes
import sys
import threading
import time
from collections import deque
from typing import Any, Protocol

from dynamemo.allocator.block import UNPLACED, Block
from dynamemo.allocator.numpy_capi import (
    HandlerStruct,
    decref,
    incref,
    native_decref,
    native_time,
    new_capsule,
    raw_free,
    raw_malloc,
)
from dynamemo.allocator.pool import Pool

__all__ = [
    "OutsideBlock",
    "Owner",
    "Record",
    "abandon_after_fork",
    "add_held",
    "arm",
    "by_ctx",
    "collect_all",
    "collect_freed",
    "install_callbacks",
    "leave_records",
    "records",
    "replace_held",
    "retire_at_exit",
    "undo",
]


class Owner(Protocol):
    """Whoever records are made over to: `numpy_handler.PoolHandler`."""

    #: Where memory goes back to; None once that needs no more.
    pool: Pool | None
    #: Whether the context has been left.
    is_left: bool

    def let_go(self) -> None:
        """Drop the pool if it is needed no more."""


class OutsideBlock:
    """A small block of the C library's memory."""

    __slots__ = ("address", "counted_bytes", "requested_bytes")

    parking = UNPLACED

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


_FLAG_BYTES = 8  # what ``time`` writes
_FLAGS_PER_PAGE = 512
_NO_FLAG = bytes(_FLAG_BYTES)
#: Pages looked through at each request; all of them are when memory is short.
_PAGES_PER_LOOK = 4


callback_addresses: tuple[int, ...] = ()
#: References to a record's capsule as `sys.getrefcount` sees them when nobody else has any.
unshared_count = 2


class Record:
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
        self.index = len(records)
        self.flag_address = _flag_address(self.index)
        #: Address of the token that stands in for the flag, 0 where there is none.
        self.token_address = 0
        #: The memory that was taken by way of this capsule.
        self.held: list[Block | OutsideBlock] = []
        self.handler: Owner | None = None
        self.is_spare = False
        self.struct = HandlerStruct(
            b"dynamemo", 1, self.flag_address, *callback_addresses, native_time
        )
        self.capsule: object = new_capsule(self.struct)
        by_ctx[self.flag_address] = self
        records.append(self)


records: list[Record] = []
_making = threading.RLock()
by_ctx: dict[int, Record] = {}
#: Records that nobody refers to and that hold nothing.
_spare: list[Record] = []
#: Records whose flag was seen while somebody still referred to their capsule.
doubtful: set[Record] = set()
_flag_pages: list[bytearray] = []
_collector = 0  # the thread that looks at the flags now
_next_page = 0
_arms_until_look = 0
#: Old memory of resized arrays, to be freed at the next look.
_leftover: deque[Any] = deque()
#: Whether a request failed half-way, so that a record may hold something that nobody will flag.
is_sweep_due = False


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


def install_callbacks(addresses: tuple[int, ...]) -> None:
    """Note the addresses of NumPy's ``malloc``, ``calloc`` and ``realloc`` callbacks, once."""
    global callback_addresses, unshared_count
    callback_addresses = addresses
    unshared_count = sys.getrefcount(Record().capsule)
    _examine(records[0])


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
    global _stamp, is_sweep_due
    now = _now_byte()
    for stamp in {_stamp, now}:
        for number, page in enumerate(_flag_pages):
            _look_through(number, page, stamp)
    _stamp = now
    if is_sweep_due:
        doubtful.update(record for record in records if not record.token_address)
        is_sweep_due = False
    for record in list(doubtful):
        _examine(record)
    while _leftover:
        _leftover[0].release(None)
        _leftover.popleft()


def _look_through(number: int, page: bytearray, stamp: int) -> None:
    byte = page.find(stamp)
    while byte >= 0:
        place = byte // _FLAG_BYTES
        record = records[number * _FLAGS_PER_PAGE + place]
        _examine(record)
        # Last, so that an interrupt before it only makes us look again.
        page[place * _FLAG_BYTES : (place + 1) * _FLAG_BYTES] = _NO_FLAG
        byte = page.find(stamp, (place + 1) * _FLAG_BYTES)


def _examine(record: Record) -> None:
    """Free what a record holds if nobody refers to its capsule."""
    if sys.getrefcount(record.capsule) > unshared_count:
        doubtful.add(record)
        return
    _hand_over(record)
    doubtful.discard(record)
    if not record.is_spare:
        record.is_spare = True
        _spare.append(record)
    if record.handler is not None and record.handler.is_left:
        record.handler.let_go()


def _hand_over(record: Record) -> None:
    pool = None if record.handler is None else record.handler.pool
    for item in record.held:
        if pool is not None:
            pool.free_later(item)
        elif isinstance(item, OutsideBlock):
            item.release(None)
    record.held = []


def arm(handler: Owner) -> Record:
    """Return a record that holds nothing and that nobody refers to, made over to the handler."""
    global _arms_until_look
    record = _pop_spare()
    if record is None and doubtful:
        _arms_until_look -= 1
        if _arms_until_look < 0:  # seldom enough to cost little, however many are doubtful
            collect_all()
            _arms_until_look = len(doubtful)
            record = _pop_spare()
    if record is None:
        with _making:  # a record's index is its place
            record = Record()
    record.handler = handler
    return record


def _pop_spare() -> Record | None:
    try:
        record = _spare.pop()
    except IndexError:
        return None
    record.is_spare = False
    return record


def replace_flag(record: Record) -> None:
    """Let a token stand in for the flag, one reference for each piece of memory."""
    token = _Token(record.index)
    address = id(token)
    by_ctx[address] = record
    for _ in record.held:
        incref(address)
    record.token_address = address
    record.struct.ctx = address
    record.struct.free = native_decref
    doubtful.discard(record)


def end_token(record: Record) -> None:
    address = record.token_address
    for _ in range(len(record.held)):
        decref(address)


def _finish_token(token: _Token) -> None:
    record = records[token]
    by_ctx.pop(id(token), None)
    record.token_address = 0
    record.struct.ctx = record.flag_address
    record.struct.free = native_time
    # The array being freed still refers to the capsule, after this call no more.
    if sys.getrefcount(record.capsule) > unshared_count + 1:
        if record.held:
            replace_flag(record)  # a copied context may have freed NULL: wait for the next free
        return
    _hand_over(record)
    doubtful.add(record)
    if record.handler is not None:
        record.handler.let_go()


def add_held(record: Record, item: Block | OutsideBlock) -> None:
    """Note memory that was taken by way of a record."""
    record.held = [*record.held, item]  # no call, so that neither interrupt nor full stack loses it
    owner = record.handler
    if owner is not None and owner.is_left:
        if record.token_address:
            incref(record.token_address)
        else:
            replace_flag(record)


def replace_held(record: Record, old: Block | OutsideBlock) -> None:
    """Free memory that a newer piece replaces; nothing can go wrong once it is off the record."""
    owner = record.handler
    pool = None if owner is None else owner.pool
    late: deque[Any] = _leftover if pool is None else pool.late
    record.held = [item for item in record.held if item is not old]
    late += (old,)  # no call: NumPy must hear of the new address from here on


def undo(record: Record, item: Block | OutsideBlock | None) -> None:
    """Take back a request that failed or was interrupted half-way."""
    global is_sweep_due
    is_sweep_due = True
    if item is not None:
        record.held = [other for other in record.held if other is not item]
        if isinstance(item, Block):
            item.pool.free_later(item)
        elif record.handler is not None:
            item.release(record.handler.pool)
    if not record.held:
        doubtful.add(record)


def leave_records(owner: Owner) -> None:
    """Collect what is freed, and let tokens stand in for the flags of the rest."""
    doubtful.update(record for record in list(records) if record.handler is owner)
    collect_all()
    for record in list(doubtful):
        if record.handler is owner and record.held and not record.token_address:
            replace_flag(record)
            if sys.getrefcount(record.capsule) <= unshared_count:
                end_token(record)  # freed by another thread just before


def abandon_after_fork() -> None:
    """Forget the parent's other threads."""
    global _collector, _making
    _collector, _making = 0, threading.RLock()


def retire_at_exit() -> None:
    """Make the frees of the dying interpreter native, so that they run no Python code."""
    for record in records:
        record.struct.ctx = record.flag_address
        record.struct.free = native_time


# Past the end of this module too: NumPy has pointers into all of it.
for _immortal in (records, _flag_pages):
    incref(id(_immortal))
