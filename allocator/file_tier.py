"""Keep values in a private spill file.

Covers the file, its extents and its failures. Values go straight between the file and memory on a
host, and through one staging buffer from a GPU.

1. The file has no name: nobody else can open it, and it is gone with the process, however that
   ends.
2. A failed store leaves the tier as it was.
3. A forked child reads its parent's values and stores none: both would write to the same file.
"""

from __future__ import annotations

import ctypes
import errno
import os
import tempfile

from dynamemo.allocator.arena import Arena, HostArena
from dynamemo.allocator.copier import Copier
from dynamemo.allocator.errors import SpillError
from dynamemo.allocator.heap import BlockHeap
from dynamemo.allocator.sizes import format_bytes
from dynamemo.allocator.tier import Tier

__all__ = ["FileTier"]

_GRANULARITY_BYTES = 4096
#: Offsets of a file without limit; no disk is that large.
_UNLIMITED_BYTES = 1 << 46
#: Most that one system call moves: Linux stops short of 2 GiB.
_CHUNK_BYTES = 1 << 30
_STAGING_BYTES = 16 << 20


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
    ) -> None:
        super().__init__(limit_bytes)
        #: Folder of the spill file.
        self.folder = os.fspath(folder) if folder is not None else tempfile.gettempdir()
        self._copier = copier
        self._file = _open_unlinked(self.folder)
        self._process = os.getpid()
        self._staging: Arena | None = None
        self._heap: BlockHeap | None = _new_heap(limit_bytes)

    @property
    def used_bytes(self) -> int:
        """Bytes taken by the values kept now, rounding included."""
        return self._heap.used_bytes if self._heap is not None else 0

    @property
    def held_bytes(self) -> int:
        """Bytes of disk the file takes now."""
        if self._file < 0:
            return 0
        state = os.fstat(self._file)
        return getattr(state, "st_blocks", state.st_size // 512) * 512

    def trim(self) -> None:
        """Cut off the end of the file that no value needs."""
        with self._lock:
            if self._heap is not None and os.getpid() == self._process:
                os.ftruncate(self._file, self._heap.capacity_bytes - self._heap.tail_free_bytes)

    def close(self) -> None:
        """Close the file, which frees its disk space; the values are lost."""
        with self._lock:
            file, self._file, self._heap = self._file, -1, None
            if file >= 0:
                os.close(file)
            if self._staging is not None:
                self._staging.close()
                self._staging = None

    def __del__(self) -> None:
        file, self._file = getattr(self, "_file", -1), -1
        if file >= 0:
            os.close(file)

    def _put(self, device_address: int, nbytes: int) -> int | None:
        heap = self._heap
        if heap is None or os.getpid() != self._process:
            return None
        heap.coalesce()  # so that the file grows only when it must
        offset = heap.allocate(nbytes)
        if offset is None:
            return None
        try:
            self._write(offset, device_address, nbytes)
        except OSError as error:
            heap.free(offset)
            raise self._failure("write", nbytes, error) from error
        except BaseException:
            heap.free(offset)
            raise
        return offset

    def _get(self, place: object, device_address: int, nbytes: int) -> None:
        assert isinstance(place, int)
        try:
            self._read(place, device_address, nbytes)
        except OSError as error:
            raise self._failure("read", nbytes, error) from error

    def _drop(self, place: object) -> None:
        assert isinstance(place, int)
        if self._heap is not None:  # not after close
            self._heap.free(place)

    def _write(self, offset: int, device_address: int, nbytes: int) -> None:
        if self._copier.is_host:
            _write_all(self._file, offset, device_address, nbytes)
            return
        buffer = self._staging_buffer()
        for start in range(0, nbytes, _STAGING_BYTES):
            length = min(_STAGING_BYTES, nbytes - start)
            self._copier.to_host(buffer.address, device_address + start, length)
            _write_all(self._file, offset + start, buffer.address, length)

    def _read(self, offset: int, device_address: int, nbytes: int) -> None:
        if self._copier.is_host:
            _read_all(self._file, offset, device_address, nbytes)
            return
        buffer = self._staging_buffer()
        for start in range(0, nbytes, _STAGING_BYTES):
            length = min(_STAGING_BYTES, nbytes - start)
            _read_all(self._file, offset + start, buffer.address, length)
            self._copier.to_device(device_address + start, buffer.address, length)

    def _staging_buffer(self) -> Arena:
        if self._staging is None:
            self._staging = HostArena(_STAGING_BYTES)
        return self._staging

    def _failure(self, what: str, nbytes: int, error: OSError) -> SpillError:
        free_bytes = _free_bytes(self.folder)
        free = format_bytes(free_bytes) if free_bytes >= 0 else "an unknown number of bytes"
        return SpillError(
            f"cannot {what} {nbytes:,} bytes in spill folder {self.folder!r} with {free} free: "
            f"{error}; choose a folder with more room, or a smaller limit for the spill file",
            folder=self.folder,
            requested_bytes=nbytes,
            free_bytes=free_bytes,
        )


def _new_heap(limit_bytes: int | None) -> BlockHeap | None:
    capacity_bytes = _UNLIMITED_BYTES if limit_bytes is None else limit_bytes
    if capacity_bytes < _GRANULARITY_BYTES:
        return None
    return BlockHeap(capacity_bytes, granularity_bytes=_GRANULARITY_BYTES)


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


def _write_all(file: int, offset: int, address: int, nbytes: int) -> None:
    memory = _memory_at(address, nbytes)
    done = 0
    while done < nbytes:
        written = os.pwrite(file, memory[done : done + _CHUNK_BYTES], offset + done)
        if written == 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        done += written


def _read_all(file: int, offset: int, address: int, nbytes: int) -> None:
    memory = _memory_at(address, nbytes)
    done = 0
    while done < nbytes:
        count = os.preadv(file, [memory[done : done + _CHUNK_BYTES]], offset + done)
        if count == 0:
            raise OSError(errno.EIO, "the spill file is shorter than what was written to it")
        done += count


def _memory_at(address: int, nbytes: int) -> memoryview:
    return memoryview((ctypes.c_char * nbytes).from_address(address)).cast("B")


def _free_bytes(folder: str) -> int:
    try:
        state = os.statvfs(folder)
    except OSError:
        return -1
    return state.f_bavail * state.f_frsize
