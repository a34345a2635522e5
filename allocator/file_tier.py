"""Keep values in a private spill file, written and read beside the program's work.

Covers the extents, the limit, and the way of a value that the file can reach by itself: on a host,
threads move it straight between the file and memory. From a GPU it goes through `spill_staging`.
Does not cover the file (`spill_file`) nor the threads (`spill_jobs`).

1. `Ticket.written` is done when the file has the value: a block that waits for it is never given up
   for a value that the disk refuses.
2. A failed store keeps nothing but its ticket; a failed or interrupted load leaves the value as it
   is, and nobody writes into its target any more.
3. A forked child reads its parent's values and stores none: both would write to the same file.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from functools import partial
from typing import Protocol

from dynamemo.allocator.arena import Arena, HostArena
from dynamemo.allocator.copier import Copier, CopyTime, Mark
from dynamemo.allocator.errors import SpillError
from dynamemo.allocator.heap import BlockHeap
from dynamemo.allocator.spill_extent import Extent
from dynamemo.allocator.spill_file import SECTOR_BYTES, SpillFile
from dynamemo.allocator.spill_jobs import Job, JobsMark, Workers, give_up
from dynamemo.allocator.spill_staging import Staging
from dynamemo.allocator.tier import Tier

__all__ = ["FileTier"]

#: Offsets of a file without limit; no disk is that large.
_UNLIMITED_BYTES = 1 << 46
#: How much of the machine's memory the page cache may take for the file.
_CACHED_SHARE = 0.25
#: Buffers between a GPU and the file; 64 MiB with all of them in use.
_BUFFERS = 16


class FileTier(Tier):
    """Values in an unlinked file.

    Parameters
    ----------
    copier : Copier
        Copies between the device and the host.
    folder : str or path, optional
        Where the file lies; the system's temporary folder by default.
    limit_bytes : int, optional
        Most that the values may take, rounded to 4096 bytes each; no limit by default.
    slabs : callable, optional
        Makes the buffers between a GPU and the file, as `HostTier`'s; plain memory by default.
    cached_bytes : int, optional
        How much of the file goes through the page cache; what lies behind it is read and written
        past the cache, where the file system can. A quarter of the machine's memory by default.

    Raises
    ------
    SpillError
        If no file can be made in the folder.
    """

    def __init__(
        self,
        copier: Copier,
        folder: str | os.PathLike[str] | None = None,
        limit_bytes: int | None = None,
        *,
        slabs: Callable[[int], Arena] = HostArena,
        cached_bytes: int | None = None,
    ) -> None:
        super().__init__(limit_bytes)
        #: Folder of the spill file.
        self.folder = os.fspath(folder) if folder is not None else tempfile.gettempdir()
        self._file = SpillFile(
            self.folder, _cached_bytes() if cached_bytes is None else cached_bytes
        )
        self._workers = Workers()
        self._heap: BlockHeap | None = _new_heap(limit_bytes)
        self._staging = None if copier.is_host else Staging(copier, self._workers, slabs, _BUFFERS)
        self._way: _Way = self._staging or _Straight(self._workers)

    @property
    def used_bytes(self) -> int:
        """Bytes taken by the values kept now, rounding included."""
        return self._heap.used_bytes if self._heap is not None else 0

    @property
    def held_bytes(self) -> int:
        """Bytes of disk the file takes now."""
        return self._file.held_bytes

    def times(self) -> list[CopyTime]:
        """Return what the file took for what was moved since the last call. Never waits."""
        with self._lock:
            return self._file.times()

    def trim(self) -> None:
        """Cut off the end of the file that no value and no copy under way needs."""
        with self._lock:
            self._reap()
            if self._heap is not None and self._workers.is_at_home:
                self._file.cut(self._heap.capacity_bytes - self._heap.tail_free_bytes)

    def close(self) -> None:
        """Let the threads end and close the file, which frees its disk space.

        A copy that has not begun by now fails, and so does a load that nobody has waited for.
        """
        with self._lock:
            self._workers.close()
            if self._staging is not None:
                self._staging.close()
            self.finish()
            self._file.close()
            self._heap = None

    def _put(self, device_address: int, nbytes: int) -> tuple[Extent, Mark] | None:
        heap = self._heap
        if heap is None or not self._workers.is_at_home:
            return None
        offset = heap.allocate(nbytes)
        if offset is None:
            return None
        extent = Extent(self._file, offset, nbytes)
        try:
            self._way.write(extent, device_address)
        except BaseException:
            self._give_up(extent)
            raise
        self.waits = self._way.waits
        return extent, JobsMark(extent.writing)

    def _get(self, place: object, device_address: int, nbytes: int, *, after: Mark) -> Mark:
        assert isinstance(place, Extent)
        return self._way.read(place, device_address, after)

    def _drop(self, place: object) -> None:
        assert isinstance(place, Extent)
        if self._heap is not None:  # not after close
            self._heap.free(place.offset)

    def _give_up(self, extent: Extent) -> None:
        """Let nothing touch an extent, and the memory it comes from, any more."""
        self._leaving.append((JobsMark(extent.writing), extent))
        give_up(extent.writing)
        self._reap()


class _Way(Protocol):
    """How values come to the file and back."""

    #: How often a store had to wait for memory on the way.
    waits: int

    def write(self, extent: Extent, device_address: int) -> None:
        """Begin to write a value: each piece's `writing` tells the end."""

    def read(self, extent: Extent, device_address: int, after: Mark) -> Mark:
        """Begin to read a value; return the end, which is not before the mark's."""


class _Straight:
    """The way between the file and memory that it can reach."""

    waits = 0

    def __init__(self, workers: Workers) -> None:
        self._workers = workers

    def write(self, extent: Extent, device_address: int) -> None:
        for piece in extent.pieces:
            job = Job(partial(extent.write, piece, device_address + piece.start))
            piece.writing = job
            self._workers.submit(job)

    def read(self, extent: Extent, device_address: int, after: Mark) -> Mark:
        jobs = [
            Job(partial(extent.read, piece, device_address + piece.start))
            for piece in extent.pieces
        ]
        load = _Load(jobs, after)
        try:
            for job in jobs:
                self._workers.submit(job)
        except BaseException:
            load.abandon()
            raise
        return load


class _Load(JobsMark):
    """The end of a value's way back."""

    def wait(self) -> None:
        """Let the host wait; interrupted, it sees to it that nobody writes into the target."""
        try:
            super().wait()
        except SpillError:
            raise
        except BaseException:
            self.abandon()
            raise

    def abandon(self) -> None:
        """Touch the target no more."""
        give_up(self._jobs)


def _new_heap(limit_bytes: int | None) -> BlockHeap | None:
    capacity_bytes = _UNLIMITED_BYTES if limit_bytes is None else limit_bytes
    if capacity_bytes < SECTOR_BYTES:
        return None
    return BlockHeap(capacity_bytes, granularity_bytes=SECTOR_BYTES)


def _cached_bytes() -> int:
    try:
        memory_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, OSError, ValueError):
        return _UNLIMITED_BYTES
    return int(_CACHED_SHARE * memory_bytes)
