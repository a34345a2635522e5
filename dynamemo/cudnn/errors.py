"""What the cuDNN part raises."""

from __future__ import annotations

from dynamemo.errors import DynamemoError

__all__ = ["CudnnError", "NoPlanError"]


class CudnnError(DynamemoError):
    """A call of cuDNN failed.

    Attributes
    ----------
    function : str
        The C function.
    status : int
        Its ``cudnnStatus_t``.
    """

    def __init__(self, message: str, *, function: str = "", status: int = 0) -> None:
        super().__init__(message)
        self.function = function
        self.status = status

    @property
    def is_refusal(self) -> bool:
        """Tell whether cuDNN declined the request and did nothing; the device is well."""
        return self.status // 1000 in (2, 3)


class NoPlanError(CudnnError):
    """cuDNN has no way to do this convolution or pooling; Chainer's own path has to."""
