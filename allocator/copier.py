"""Copy bytes between a device's memory and the host's, beside the device's other work.

Covers what a copier promises, and the CPU's, whose copies are done at once. The GPU's is
`cupy_copier.CudaCopier`.

1. A copy begins behind everything that the compute stream was given before, and behind the mark it
   is told to wait for; nothing else delays it. The host does not wait.
2. Until a copy's mark is done, nobody may write where it reads, nor touch where it writes, unless
   they are held behind the mark (`Mark.hold_compute`).
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Protocol

__all__ = ["DONE", "Copier", "CopyTime", "HostCopier", "Mark"]


class Mark(Protocol):
    """The end of a copy that may be under way."""

    @property
    def is_done(self) -> bool:
        """Whether the copy has ended. Never waits."""

    def hold_compute(self) -> None:
        """Let what the compute stream is given from now on wait for the copy; the host goes on.

        Raises
        ------
        SpillError
            If the copy failed, where that can be known; its target is undefined then.
        """

    def wait(self) -> None:
        """Let the host wait for the copy. Errors as `hold_compute`."""


class _Done:
    """The end of a copy that ended before it was asked for."""

    is_done = True

    def hold_compute(self) -> None:
        """Do nothing."""

    def wait(self) -> None:
        """Do nothing."""


#: The mark of what is done.
DONE: Mark = _Done()


@dataclass(frozen=True, slots=True)
class CopyTime:
    """What one copy took, by the device's clock."""

    is_to_host: bool
    nbytes: int
    elapsed_s: float


class Copier(Protocol):
    """Copies between device and host."""

    #: How often the host has waited for the device.
    waits: int

    @property
    def is_host(self) -> bool:
        """Whether device addresses are host addresses, so that the copy may be left out."""

    def to_host(
        self, host_address: int, device_address: int, nbytes: int, *, after: Mark = DONE
    ) -> Mark:
        """Begin to copy from the device to the host."""

    def to_device(
        self, device_address: int, host_address: int, nbytes: int, *, after: Mark = DONE
    ) -> Mark:
        """Begin to copy from the host to the device."""

    def times(self) -> list[CopyTime]:
        """Return what copies took that ended since the last call. Never waits."""

    def finish(self) -> None:
        """Let the host wait for all copies under way."""


class HostCopier:
    """Copies within host memory, at once."""

    waits = 0

    @property
    def is_host(self) -> bool:
        """Always true."""
        return True

    def to_host(
        self, host_address: int, device_address: int, nbytes: int, *, after: Mark = DONE
    ) -> Mark:
        """Copy `nbytes` from `device_address` to `host_address`."""
        after.wait()
        ctypes.memmove(host_address, device_address, nbytes)
        return DONE

    def to_device(
        self, device_address: int, host_address: int, nbytes: int, *, after: Mark = DONE
    ) -> Mark:
        """Copy `nbytes` from `host_address` to `device_address`."""
        after.wait()
        ctypes.memmove(device_address, host_address, nbytes)
        return DONE

    def times(self) -> list[CopyTime]:
        """Return nothing: these copies hold up their caller, who can see the time."""
        return []

    def finish(self) -> None:
        """Do nothing."""
