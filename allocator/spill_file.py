"""Write and read a private file that has no name.

Covers opening it, going past the page cache where that pays, checksums, and what is said of its
failures. Knows no values: `file_tier` decides what lies where.

1. The file has no name: nobody else can open it, and it is gone with the process, however that
   ends.
2. All methods may be called from several threads at once, for stretches that do not overlap.

The first bytes of the file go through the page cache, where a value that is written again every
iteration need not wait for the disk. What lies behind them goes past it (direct I/O): that takes a
fraction of the CPU's time, and none of the memory that the values were put out of.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import tempfile
import time
import zlib
from collections import deque
from collections.abc import Callable, Iterator

from dynamemo.allocator.copier import CopyTime
from dynamemo.allocator.errors import SpillError
from dynamemo.allocator.sizes import format_bytes

__all__ = ["SECTOR_BYTES", "SpillFile", "explained"]

#: Direct I/O wants offsets and lengths that are multiples of it; no sector of a disk is longer.
SECTOR_BYTES = 4096
#: Below this length a way past the page cache is slower than through it.
_DIRECT_FROM_BYTES = 1 << 20
#: Most that one system call moves: Linux stops short of 2 GiB.
_CHUNK_BYTES = 1 << 30


class SpillFile:
    """An unlinked file; closed with the object.

    Parameters
    ----------
    folder : str
        Where the file lies.
    cached_bytes : int
        How many of its first bytes go through the page cache.

    Raises
    ------
    SpillError
        If no file can be made in the folder.
    """

    def __init__(self, folder: str, cached_bytes: int) -> None:
        #: Where the file lies.
        self.folder = folder
        #: How many of its first bytes go through the page cache.
        self.cached_bytes = cached_bytes
        self._file = self._direct = -1
        self._file = _open_unlinked(folder)
        self._direct = _open_direct(self._file)
        # Many disks take memory at any multiple of 512 bytes; what this one takes is found out.
        self._alignment_bytes = 512
        self._takes_direct = self._direct >= 0
        self._moves: deque[tuple[bool, int, float, float]] = deque(maxlen=4096)
        self._busy_until_s = {True: 0.0, False: 0.0}

    @property
    def held_bytes(self) -> int:
        """Bytes of disk the file takes now."""
        if self._file < 0:
            return 0
        state = os.fstat(self._file)
        return getattr(state, "st_blocks", state.st_size // 512) * 512

    def write(self, offset: int, address: int, nbytes: int) -> int:
        """Write memory to the file; return its checksum.

        Raises
        ------
        OSError
            If the disk is full or fails.
        """
        began_s = time.perf_counter()
        memory = _memory_at(address, nbytes)
        checksum = zlib.crc32(memory)
        done = 0
        while done < nbytes:
            count = self._move(_write_some, memory[done:], offset + done, address + done)
            if count == 0:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            done += count
        self._moves.append((True, nbytes, began_s, time.perf_counter()))
        return checksum

    def read(self, offset: int, address: int, nbytes: int) -> int:
        """Read the file into memory; return the checksum of what was read.

        Raises
        ------
        OSError
            If the disk fails, or the file is shorter.
        """
        began_s = time.perf_counter()
        memory = _memory_at(address, nbytes)
        done = 0
        while done < nbytes:
            count = self._move(_read_some, memory[done:], offset + done, address + done)
            if count == 0:
                raise OSError(errno.EIO, "the spill file is shorter than what was written to it")
            done += count
        checksum = zlib.crc32(memory)
        self._moves.append((False, nbytes, began_s, time.perf_counter()))
        return checksum

    def times(self) -> list[CopyTime]:
        """Return what the file took for what was moved since the last call.

        Moves of one direction that ran at once share the time in which any of them ran.
        """
        times = []
        while self._moves:
            is_write, nbytes, began_s, ended_s = self._moves.popleft()
            elapsed_s = ended_s - max(began_s, self._busy_until_s[is_write])
            self._busy_until_s[is_write] = max(ended_s, self._busy_until_s[is_write])
            times.append(CopyTime(is_write, nbytes, max(0.0, elapsed_s)))
        return times

    def cut(self, nbytes: int) -> None:
        """Shorten the file to so many bytes."""
        os.ftruncate(self._file, nbytes)

    def close(self) -> None:
        """Close the file, which frees its disk space. May be called twice."""
        files, self._file, self._direct = (self._file, self._direct), -1, -1
        for file in files:
            if file >= 0:
                os.close(file)

    def __del__(self) -> None:
        self.close()

    def _move(
        self,
        move: Callable[[int, memoryview, int], int],
        rest: memoryview,
        offset: int,
        address: int,
    ) -> int:
        length = self._direct_bytes(offset, address, len(rest))
        if length:
            try:
                return move(self._direct, rest[:length], offset)
            except OSError as error:
                if error.errno != errno.EINVAL:
                    raise
                self._ask_less(address)
        return move(self._file, rest[:_CHUNK_BYTES], offset)

    def _direct_bytes(self, offset: int, address: int, nbytes: int) -> int:
        """Return how many of the next bytes go past the page cache."""
        nbytes = min(nbytes, _CHUNK_BYTES) & -SECTOR_BYTES
        is_aligned = not (offset % SECTOR_BYTES or address % self._alignment_bytes)
        is_worth = nbytes >= _DIRECT_FROM_BYTES and offset + nbytes > self.cached_bytes
        return nbytes if self._takes_direct and is_aligned and is_worth else 0

    def _ask_less(self, address: int) -> None:
        """Take note that the disk refused direct I/O with this address."""
        if address % SECTOR_BYTES:
            self._alignment_bytes = SECTOR_BYTES
        else:
            self._takes_direct = False


@contextlib.contextmanager
def explained(what: str, folder: str, nbytes: int) -> Iterator[None]:
    """Raise a `SpillError` for each `OSError`: cannot `what` so many bytes in the folder."""
    try:
        yield
    except SpillError:
        raise
    except OSError as error:
        free_bytes = _free_bytes(folder)
        free = format_bytes(free_bytes) if free_bytes >= 0 else "an unknown number of bytes"
        raise SpillError(
            f"cannot {what} {nbytes:,} bytes in spill folder {folder!r} with {free} free: "
            f"{error}; choose a folder with more room, or a smaller limit for the spill file",
            folder=folder,
            requested_bytes=nbytes,
            free_bytes=free_bytes,
        ) from error


def _open_unlinked(folder: str) -> int:
    try:
        return _open_nameless(folder)
    except OSError as error:
        raise SpillError(
            f"cannot make a spill file in folder {folder!r} ({error}); "
            "choose a folder that exists and can be written to",
            folder=folder,
            free_bytes=_free_bytes(folder),
        ) from error


def _open_nameless(folder: str) -> int:
    if hasattr(os, "O_TMPFILE"):
        try:
            return os.open(folder, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
        except OSError as error:
            # Not every file system can.
            if error.errno not in (errno.EOPNOTSUPP, errno.EISDIR, errno.EINVAL):
                raise
    file, path = tempfile.mkstemp(prefix="dynamemo-", suffix=".spill", dir=folder)
    os.unlink(path)
    return file


def _open_direct(file: int) -> int:
    """Open the file once more for direct I/O; -1 where that cannot be."""
    if hasattr(os, "O_DIRECT"):
        with contextlib.suppress(OSError):
            return os.open(f"/proc/self/fd/{file}", os.O_RDWR | os.O_DIRECT | os.O_CLOEXEC)
    return -1


def _write_some(file: int, memory: memoryview, offset: int) -> int:
    return os.pwrite(file, memory, offset)


def _read_some(file: int, memory: memoryview, offset: int) -> int:
    return os.preadv(file, [memory], offset)


def _memory_at(address: int, nbytes: int) -> memoryview:
    return memoryview((ctypes.c_char * nbytes).from_address(address)).cast("B")


def _free_bytes(folder: str) -> int:
    try:
        state = os.statvfs(folder)
    except OSError:
        return -1
    return state.f_bavail * state.f_frsize
