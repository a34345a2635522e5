"""CUDA kernels of our own: compiled by CuPy, launched with as little as can be on the way.

A training step launches hundreds of them, and where arrays are small the host's time decides. All
take one argument, a structure; CuPy's launch, which looks at every argument, takes three times as
long as the driver's.

A kernel is ``extern "C" __global__ void name(const Arguments given)``, with `PREAMBLE` before it.
"""

from __future__ import annotations

from typing import Any

import cffi

from dynamemo.cudnn import context

__all__ = ["PREAMBLE", "THREADS", "Kernel", "arguments", "is_aligned"]

#: Threads of a block, of every kernel.
THREADS = 512

_ADDRESSES, _NUMBERS, _SCALARS = 10, 13, 2

PREAMBLE = f"""
typedef unsigned int u32;
#define THREADS {THREADS}
struct Arguments {{
    float* at[{_ADDRESSES}];
    u32 numbers[{_NUMBERS}];
    float scalars[{_SCALARS}];
}};
"""

_ffi = cffi.FFI()
_ffi.cdef(f"""
typedef struct {{
    uintptr_t at[{_ADDRESSES}];
    uint32_t numbers[{_NUMBERS}];
    float scalars[{_SCALARS}];
}} arguments_t;
""")
_STRUCTURE = _ffi.typeof("arguments_t *")
_POINTER = _ffi.typeof("arguments_t *[1]")


def arguments(
    addresses: tuple[int, ...], numbers: tuple[int, ...], scalars: tuple[float, ...] = ()
) -> Any:
    """Return the structure that a kernel takes; entries that are left out are zero."""
    return _ffi.new(_STRUCTURE, (addresses, numbers, scalars))


def is_aligned(*addresses: int) -> bool:
    """Tell whether four elements of float32 can be read at once from all addresses."""
    return not any(address & 15 for address in addresses)


class Kernel:
    """One kernel; compiled for each device that it is launched on.

    Parameters
    ----------
    name : str
    source : str
        CUDA C++, without the preamble.
    options : tuple of str
        For the compiler.
    is_cooperative : bool
        Whether all blocks have to be running at once.
    shared_bytes : int
        The most shared memory that a launch asks for, 0 where none does.
    """

    def __init__(
        self,
        name: str,
        source: str,
        *,
        options: tuple[str, ...] = (),
        is_cooperative: bool = False,
        shared_bytes: int = 0,
    ) -> None:
        self._name = name
        self._raw = context.cupy.RawKernel(PREAMBLE + source, name, options=options)
        self._is_cooperative = is_cooperative
        self._shared_bytes = shared_bytes
        #: By device: the function's address. CuPy keeps it loaded.
        self._functions: dict[int, int] = {}

    def launch(self, device: int, blocks: int, given: Any, *, shared_bytes: int = 0) -> None:
        """Enqueue the kernel on the current stream of `device`, which is the current device."""
        function = self._functions.get(device)
        if function is None:
            function = self._load(device)
        stream = context.cupy.cuda.get_current_stream().ptr
        pointer = _ffi.new(_POINTER, (given,))
        place = int(_ffi.cast("uintptr_t", pointer))
        shape = (function, blocks, 1, 1, THREADS, 1, 1, shared_bytes, stream, place)
        if self._is_cooperative:
            context.cupy.cuda.driver.launchCooperativeKernel(*shape)
        else:
            context.cupy.cuda.driver.launchKernel(*shape, 0)

    def _load(self, device: int) -> int:
        if self._shared_bytes:
            self._raw.max_dynamic_shared_size_bytes = self._shared_bytes
            self._raw.preferred_shared_memory_carveout = 100
        function = self._functions[device] = self._raw.kernel.ptr
        return int(function)
