"""Move values between a GPU and a spill file through a few buffers of host memory.

Covers the buffers, who has them, and in which order copies, writes and reads follow each other.

1. A copy from or to the device is begun by the thread that asks for it, so that it is ordered with
   the stream that is current there; the file's threads only wait for copies.
2. A buffer goes to its next user when its job is done, and that user waits for the newest copy that
   touches it.
3. The file's threads never take the lock: whoever holds it may wait for them.

A value that comes in is read ahead as far as there are buffers for it. The last step, the copy to
the device, is begun when somebody waits for it, or when the buffer is wanted: that is later than
`load`, and a later copy is in order just as well. Beside the disk's time it is next to nothing.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from functools import partial

from dynamemo.allocator.arena import Arena, HostArena
from dynamemo.allocator.copier import DONE, Copier, Mark
from dynamemo.allocator.errors import SpillError
from dynamemo.allocator.spill_extent import PIECE_BYTES, Extent, Piece
from dynamemo.allocator.spill_jobs import Job, Workers, give_up, given_up, raise_again, wait_quietly

__all__ = ["Staging"]


class _Buffer:
    """Host memory for one piece."""

    __slots__ = ("job", "land", "last", "memory")

    def __init__(self, memory: Arena) -> None:
        self.memory = memory
        #: The newest copy that touches it.
        self.last: Mark = DONE
        #: What keeps it busy.
        self.job: Job | None = None
        #: What is to be done when that has ended, before it is free.
        self.land: Callable[[], None] | None = None


class Staging:
    """The way of values that no file can reach by itself.

    Parameters
    ----------
    copier : Copier
        Copies between the device and the buffers.
    workers : Workers
        Threads that write and read.
    slabs : callable
        Makes a buffer of so many bytes, as `HostTier`'s. Where the machine refuses, fewer buffers
        do, and one is of plain memory if need be.
    buffers : int
        How many buffers there may be, each of `PIECE_BYTES`.
    """

    def __init__(
        self, copier: Copier, workers: Workers, slabs: Callable[[int], Arena], buffers: int
    ) -> None:
        #: How often a store had to wait for a buffer.
        self.waits = 0
        #: Why nothing comes in any more; None: it is not closed.
        self.closed: SpillError | None = None
        self.lock = threading.RLock()
        self.copier = copier
        self._workers = workers
        self._slabs = slabs
        self._most_buffers = buffers
        self._free: list[_Buffer] = []
        self._busy: deque[_Buffer] = deque()
        #: Buffers that an interrupted call may still copy into.
        self._lost: list[_Buffer] = []

    def write(self, extent: Extent, device_address: int) -> None:
        """Begin to write a value; waits while all buffers are in use."""
        with self.lock:
            for piece in extent.pieces:
                self._begin_write(extent, piece, device_address, self._take())

    def read(self, extent: Extent, device_address: int, after: Mark) -> Mark:
        """Begin to read a value; return the end of its copy to the device."""
        load = _StagedLoad(self, extent, device_address, after)
        with self.lock:
            try:
                load.read_ahead()
            except BaseException:
                load.abandon()
                raise
        return load

    def read_job(self, extent: Extent, piece: Piece, buffer: _Buffer) -> Job:
        """Return the job that reads a piece into a buffer."""
        return Job(partial(_read_into, buffer.memory, extent, piece, buffer.last))

    def begin(self, job: Job, buffer: _Buffer, land: Callable[[], None] | None = None) -> None:
        """Have a thread do a buffer's job; the buffer is free when it is done and has landed."""
        buffer.job, buffer.land = job, land
        self._busy.append(buffer)
        self._workers.submit(job)

    def poll(self) -> _Buffer | None:
        """Take a buffer that is free."""
        if not self._free and len(self._busy) < self._most_buffers:
            self._make()
        return self._free.pop() if self._free else None

    def settle(self) -> None:
        """Land what was read, and free the buffers that nobody needs any more."""
        for buffer in list(self._busy):
            if buffer.job is None or buffer.job.is_done:
                if buffer.land is not None:
                    buffer.land()  # again after an interrupt, which harms nobody
                buffer.job = buffer.land = None
                self._busy.remove(buffer)
                self._free.append(buffer)

    def wait_for_buffer(self) -> None:
        """Wait until there is a free one."""
        job = self._busy[0].job
        if job is not None:
            job.wait()
        self.settle()

    def close(self) -> None:
        """Free the buffers; the threads have ended. What has not landed never does."""
        with self.lock:
            self.closed = given_up()
            self.settle()
            if self._lost:
                self.copier.finish()
            while self._free:
                buffer = self._free.pop()
                buffer.last.wait()
                buffer.memory.close()
            while self._lost:
                self._lost.pop().memory.close()

    def _begin_write(
        self, extent: Extent, piece: Piece, device_address: int, buffer: _Buffer
    ) -> None:
        memory = buffer.memory
        source = device_address + piece.start
        try:
            buffer.last = self.copier.to_host(
                memory.address, source, piece.nbytes, after=buffer.last
            )
            job = Job(partial(_write_from, memory, extent, piece, buffer.last))
        except BaseException:
            self._lost.append(buffer)
            raise
        piece.writing = job
        self.begin(job, buffer)

    def _take(self) -> _Buffer:
        self.settle()
        buffer = self.poll()
        while buffer is None:
            self.waits += 1
            self.wait_for_buffer()
            buffer = self.poll()
        return buffer

    def _make(self) -> None:
        try:
            memory = self._slabs(PIECE_BYTES)
        except (MemoryError, OSError):
            if self._busy:
                self._most_buffers = len(self._busy)  # do not ask again and again
                return
            memory = HostArena(PIECE_BYTES)
        self._free.append(_Buffer(memory))


class _StagedLoad:
    """The end of a value's way to the device."""

    def __init__(
        self, staging: Staging, extent: Extent, device_address: int, earlier: Mark
    ) -> None:
        self._staging = staging
        self._extent = extent
        self._address = device_address
        self._earlier = DONE if earlier.is_done else earlier
        self._unread = deque(extent.pieces)
        self._reading: dict[Piece, Job] = {}
        self._copies: list[Mark] = []
        self._error: BaseException | None = None

    @property
    def is_done(self) -> bool:
        """Whether all of it is on the device. False until somebody has had it copied there."""
        if self._unread or self._reading or not all(copy.is_done for copy in self._copies):
            return False
        self._copies.clear()
        return self._earlier.is_done

    def hold_compute(self) -> None:
        """Let the host wait for the file, and the compute streams for the copies."""
        self._bring()
        for copy in self._copies:
            copy.hold_compute()
        if self._error is not None:
            raise_again(self._error)

    def wait(self) -> None:
        """Let the host wait for all of it."""
        self._bring()
        for copy in self._copies:
            copy.wait()
        wait_quietly(self._earlier)
        self._earlier = DONE
        if self._error is not None:
            raise_again(self._error)

    def read_ahead(self) -> None:
        """Begin to read as much as there are buffers for."""
        self._staging.settle()
        while self._unread:
            buffer = self._staging.poll()
            if buffer is None:
                return
            self._read_piece(self._unread[0], buffer)
            self._unread.popleft()

    def abandon(self) -> None:
        """Touch the target no more."""
        self._unread.clear()
        jobs = list(self._reading.values())
        self._reading.clear()
        self._error = given_up()
        give_up(jobs)
        for copy in self._copies:
            copy.wait()

    def _bring(self) -> None:
        """Let the host wait until the last copy to the device is begun."""
        with self._staging.lock:
            try:
                while self._unread or self._reading:
                    if self._staging.closed:
                        self.abandon()
                    self.read_ahead()
                    if self._reading:
                        next(iter(self._reading.values())).wait()
                    elif self._unread:
                        self._staging.wait_for_buffer()
            except BaseException:  # the caller will not wait again before it frees the target
                self.abandon()
                raise

    def _read_piece(self, piece: Piece, buffer: _Buffer) -> None:
        job = self._staging.read_job(self._extent, piece, buffer)
        self._reading[piece] = job
        self._staging.begin(job, buffer, partial(self._land, piece, buffer, job))

    def _land(self, piece: Piece, buffer: _Buffer, job: Job) -> None:
        """Begin the copy of what was read."""
        if piece not in self._reading:
            return  # abandoned
        self._error = self._error or job.error or self._staging.closed
        if self._error is None:
            target = self._address + piece.start
            address = buffer.memory.address
            buffer.last = self._staging.copier.to_device(target, address, piece.nbytes)
            self._copies.append(buffer.last)
        else:
            self._unread.clear()
        del self._reading[piece]


def _write_from(memory: Arena, extent: Extent, piece: Piece, after: Mark) -> None:
    extent.write(piece, memory.address, after)


def _read_into(memory: Arena, extent: Extent, piece: Piece, after: Mark) -> None:
    extent.read(piece, memory.address, after)
