"""Divide a value into pieces that are written and read each by itself.

Covers where the pieces lie, their checksums and the work on one of them. Runs nothing.

1. A piece is read behind its write, and only where that succeeded.
2. What reads back is what was written, or an error says that it is not.
"""

from __future__ import annotations

from dynamemo.allocator.copier import DONE, Mark
from dynamemo.allocator.errors import SpillError
from dynamemo.allocator.spill_file import SpillFile, explained
from dynamemo.allocator.spill_jobs import Job

__all__ = ["PIECE_BYTES", "Extent", "Piece"]

#: Longest piece: disks and links are near full speed, and several threads share a long value.
PIECE_BYTES = 4 << 20


class Piece:
    """A part of a value."""

    __slots__ = ("checksum", "nbytes", "start", "writing")

    def __init__(self, start: int, nbytes: int) -> None:
        #: First byte, relative to the value.
        self.start = start
        #: Length.
        self.nbytes = nbytes
        #: Checksum of what was written.
        self.checksum = 0
        #: The job that writes it; None: not begun.
        self.writing: Job | None = None


class Extent:
    """Where a value lies in the file.

    Parameters
    ----------
    file : SpillFile
        The file.
    offset : int
        First byte in the file.
    nbytes : int
        Length of the value.
    """

    __slots__ = ("file", "nbytes", "offset", "pieces")

    def __init__(self, file: SpillFile, offset: int, nbytes: int) -> None:
        self.file = file
        self.offset = offset
        self.nbytes = nbytes
        self.pieces = tuple(
            Piece(start, min(PIECE_BYTES, nbytes - start))
            for start in range(0, nbytes, PIECE_BYTES)
        )

    @property
    def writing(self) -> list[Job]:
        """The writes that were begun."""
        return [piece.writing for piece in self.pieces if piece.writing is not None]

    def write(self, piece: Piece, address: int, after: Mark = DONE) -> None:
        """Write a piece from memory, behind the mark; `SpillError` where the disk fails."""
        after.wait()
        with explained("write", self.file.folder, self.nbytes):
            piece.checksum = self.file.write(self.offset + piece.start, address, piece.nbytes)

    def read(self, piece: Piece, address: int, after: Mark = DONE) -> None:
        """Read a piece into memory, behind its write and the mark.

        Raises
        ------
        SpillError
            If the disk fails, the write failed, or the piece is not what was written.
        """
        after.wait()
        assert piece.writing is not None
        piece.writing.wait()
        piece.writing.check()
        with explained("read", self.file.folder, self.nbytes):
            checksum = self.file.read(self.offset + piece.start, address, piece.nbytes)
        if checksum != piece.checksum:
            raise self._damage(piece)

    def _damage(self, piece: Piece) -> SpillError:
        return SpillError(
            f"a value of {self.nbytes:,} bytes in spill folder {self.file.folder!r} is damaged: "
            f"the {piece.nbytes:,} bytes from {piece.start:,} on are not what was written; "
            "the disk or its memory is failing, choose a folder on another disk",
            folder=self.file.folder,
            requested_bytes=self.nbytes,
        )
