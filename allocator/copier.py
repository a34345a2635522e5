"""Copy bytes between a device's memory and the host's.

Covers the CPU, where both are the same memory; the GPU's is `cupy_memory.CudaCopier`.
"""

from __future__ import annotations

import ctypes
from typing import Protocol

__all__ = ["Copier", "HostCopier"]


class Copier(Protocol):
    """Copies between device and host; done when the call returns."""

    @property
    def is_host(self) -> bool:
        """Whether device addresses are host addresses, so that the copy may be left out."""

    def to_host(self, host_address: int, device_address: int, nbytes: int) -> None:
        """Copy from the device to the host."""

    def to_device(self, device_address: int, host_address: int, nbytes: int) -> None:
        """Copy from the host to the device."""


class HostCopier:
    """Copies within host memory."""

    @property
    def is_host(self) -> bool:
        """Always true."""
        return True

    def to_host(self, host_address: int, device_address: int, nbytes: int) -> None:
        """Copy `nbytes` from `device_address` to `host_address`."""
        ctypes.memmove(host_address, device_address, nbytes)

    def to_device(self, device_address: int, host_address: int, nbytes: int) -> None:
        """Copy `nbytes` from `host_address` to `device_address`."""
        ctypes.memmove(device_address, host_address, nbytes)
