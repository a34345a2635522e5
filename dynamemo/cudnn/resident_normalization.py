"""Batch normalisation in training that reads its input once: each channel stays in shared memory.

cuDNN reads the input for the statistics and again to normalise, and in the backward direction both
arrays twice; the time is that of the memory traffic. Here as many channels are worked on at a time
as fit in the shared memory of the whole device: a group of blocks loads a channel, adds up, waits
for each other, and writes the result from what it kept.

Covers float32 arrays ``(n, c, ...)``, C-contiguous. What it does not cover is left to cuDNN.

1. The same bits each time on the same device: blocks write their sums down, and all of them add
   these up in one order. Atomics only count who has arrived.
2. Blocks that wait for each other are all running: they are launched cooperatively.
3. Variances are sums of squares about the mean of each part, put together as Chan et al. do: they
   lose nothing where the mean is large.

*Source*: Chan, Golub, LeVeque 1983, equation 2.1, for the variance of parts.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from dynamemo.cudnn import context, names
from dynamemo.cudnn.kernels import THREADS, Kernel, arguments, is_aligned

__all__ = ["Layout", "Limits", "backward", "can_do", "forward", "layout_of"]

#: Shared memory that a block has beside what it asks for, bytes: its sums, and what CUDA takes.
_RESERVED = 2048
#: Blocks on a multiprocessor, in the order they are tried: with several, some load while others
#: wait for the sums of their group.
_BLOCKS_AT_A_TIME = (2, 1)
#: Elements of a channel that are worth a block of their own.
_WORTH_A_BLOCK = 4096
#: Below so many bytes of input both ways take as long as a launch.
_LEAST_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Layout:
    """How channels are shared out among blocks."""

    #: Blocks that work on one channel together; at most as many as a block has threads.
    group: int
    #: Groups.
    groups: int
    #: Elements of a channel that a block keeps, of each array; a multiple of 4.
    part: int
    #: Bytes of shared memory that a block asks for.
    shared_bytes: int

    @property
    def blocks(self) -> int:
        """Blocks in all."""
        return self.group * self.groups


@dataclass(frozen=True, slots=True)
class Limits:
    """What a device has."""

    multiprocessors: int
    #: Bytes of shared memory of a multiprocessor, and the most that a block may ask for.
    shared_bytes: int
    block_shared_bytes: int


def layout_of(channels: int, elements: int, arrays: int, limits: Limits) -> Layout | None:
    """Share channels out among blocks; None where a channel does not fit in all blocks together.

    Parameters
    ----------
    channels : int
    elements : int
        Of one channel in one array.
    arrays : int
        That are kept: 1 forward, 2 backward.
    limits : Limits

    Examples
    --------
    >>> h200 = Limits(132, 233472, 232448)
    >>> layout_of(2048, 64 * 49, 1, h200)
    Layout(group=1, groups=2048, part=3136, shared_bytes=12544)
    >>> layout_of(64, 64 * 112 * 112, 2, h200).group
    66
    """
    for blocks_at_a_time in _BLOCKS_AT_A_TIME:
        room = limits.shared_bytes // blocks_at_a_time - _RESERVED
        room = min(room, limits.block_shared_bytes - _RESERVED)
        most = room // (4 * arrays) // 4 * 4
        if most <= 0:
            continue
        resident = limits.multiprocessors * blocks_at_a_time
        group = max(
            math.ceil(elements / most), min(resident // channels, elements // _WORTH_A_BLOCK)
        )
        if group <= 1:
            return _layout(1, channels, elements, arrays)
        if group <= min(resident, THREADS):
            groups = min(channels, resident // group)
            # The blocks that are left over help, as far as their sums can be read at once.
            group = min(resident // groups, THREADS)
            return _layout(group, groups, elements, arrays)
    return None


def _layout(group: int, groups: int, elements: int, arrays: int) -> Layout:
    part = math.ceil(elements / group / 4) * 4
    return Layout(group, groups, part, part * 4 * arrays)


class _Launch:
    """What every launch for one shape has in common."""

    __slots__ = ("area", "layout", "numbers", "scratch_bytes")

    def __init__(self, shape: tuple[int, ...], arrays: int, limits: Limits) -> None:
        self.area = math.prod(shape[2:])
        elements = shape[0] * self.area
        self.layout = layout = layout_of(shape[1], elements, arrays, limits)
        if layout is None:
            return
        #: Two rounds of two sums of each block, and of each group how many have arrived.
        self.scratch_bytes = layout.blocks * 16 + layout.groups * 4 if layout.group > 1 else 0
        self.numbers = (shape[1], self.area, elements, layout.part, layout.group)


def can_do(x: Any, is_for_conv2d: bool, cudnn_mode: int, layout: int) -> bool:
    """Tell whether an array is normalised here in both directions."""
    if not is_for_conv2d or cudnn_mode != names.CUDNN_BATCHNORM_SPATIAL or layout:
        return False
    if x.dtype.char != "f" or x.nbytes < _LEAST_BYTES or x.size >= 1 << 31:
        return False
    return _launch_of(x, 2).layout is not None


def _launch_of(x: Any, arrays: int) -> _Launch:
    key = (x.data.device_id, x.shape, arrays)
    launch = _launches.get(key)
    if launch is None:
        if len(_launches) >= context.CACHED_DESCRIPTORS:
            _launches.clear()
        launch = _launches[key] = _Launch(x.shape, arrays, _limits_of(key[0]))
    return launch


def _limits_of(device: int) -> Limits:
    attributes = context.cupy.cuda.Device(device).attributes
    if not attributes["CooperativeLaunch"]:
        return Limits(0, 0, 0)
    return Limits(
        attributes["MultiProcessorCount"],
        attributes["MaxSharedMemoryPerMultiprocessor"],
        attributes["MaxSharedMemoryPerBlockOptin"],
    )


_launches: dict[Any, _Launch] = {}


def forward(
    x: Any,
    y: Any,
    parameters: tuple[Any, Any],
    running: tuple[Any, Any],
    saved: tuple[Any, Any],
    *,
    eps: float,
    share: float,
) -> None:
    """Normalise `x` into `y`, write the statistics down, and update the running ones in place.

    Parameters
    ----------
    x, y : cupy.ndarray
        ``(n, c, ...)``, for which `can_do` holds.
    parameters : tuple of cupy.ndarray
        gamma and beta, ``(c,)``.
    running : tuple of cupy.ndarray
        Running mean and variance, ``(c,)``.
    saved : tuple of cupy.ndarray
        The mean, and the inverse of the standard deviation, ``(c,)``: written.
    eps : float
    share : float
        Of the new statistics in the running ones.
    """
    _enqueue("normalize", 1, (x, y, *parameters, *running, *saved), (eps, share))


def backward(
    x: Any,
    gy: Any,
    gx: Any,
    gamma: Any,
    saved: tuple[Any, Any],
    gradients: tuple[Any, Any],
) -> None:
    """Write the gradients of the input and, into `gradients`, of gamma and beta."""
    _enqueue("normalize_backward", 2, (x, gy, gx, gamma, *saved, *gradients), ())


def _enqueue(
    name: str, kept_arrays: int, arrays: tuple[Any, ...], scalars: tuple[Any, ...]
) -> None:
    launch = _launch_of(arrays[0], kept_arrays)
    layout = launch.layout
    assert layout is not None
    addresses = [array.data.ptr for array in arrays]
    is_wide = not launch.area & 3 and is_aligned(*addresses[:3])
    device = arrays[0].data.device_id
    if launch.scratch_bytes:
        memory = context.allocate(launch.scratch_bytes)
        memory.memset_async(0, launch.scratch_bytes)
        addresses += (0,) * (8 - len(addresses))
        addresses += (memory.ptr, memory.ptr + layout.blocks * 16)
    kernel = _kernel(name, is_wide, layout.group > 1, device)
    given = arguments(tuple(addresses), launch.numbers, scalars)
    kernel.launch(device, layout.blocks, given, shared_bytes=layout.shared_bytes)


def _kernel(name: str, is_wide: bool, is_cooperative: bool, device: int) -> Kernel:
    key = (name, is_wide, is_cooperative, device)
    kernel = _kernels.get(key)
    if kernel is None:
        kernel = _kernels[key] = Kernel(
            name,
            _SOURCE,
            options=(f"-DWIDTH={4 if is_wide else 1}",),
            is_cooperative=is_cooperative,
            shared_bytes=_limits_of(device).block_shared_bytes - _RESERVED,
        )
    return kernel


_kernels: dict[Any, Kernel] = {}

_SOURCE = r"""
struct Pair { float a, b; };
struct alignas(WIDTH * 4) Pack { float at[WIDTH]; };

// The sum over all threads of a block, in an order that is always the same; every thread gets it.
__device__ Pair block_sum(Pair value, Pair* scratch) {
    for (int step = 16; step; step >>= 1) {
        value.a += __shfl_xor_sync(0xffffffffu, value.a, step);
        value.b += __shfl_xor_sync(0xffffffffu, value.b, step);
    }
    const u32 lane = threadIdx.x & 31;
    __syncthreads();
    if (!lane) scratch[threadIdx.x >> 5] = value;
    __syncthreads();
    value = Pair{0, 0};
    if (lane < THREADS / 32) value = scratch[lane];
    for (int step = 16; step; step >>= 1) {
        value.a += __shfl_xor_sync(0xffffffffu, value.a, step);
        value.b += __shfl_xor_sync(0xffffffffu, value.b, step);
    }
    return value;
}

// Blocks of a group show each other their sums; thread t gets those of block t.
__device__ Pair exchange(Pair mine, const Arguments& given, u32 round) {
    const u32 group = given.numbers[4];
    float2* sums = (float2*)given.at[8];
    u32* arrived = (u32*)given.at[9];
    float2* slots = sums + (round & 1) * gridDim.x + blockIdx.x / group * group;
    if (!threadIdx.x) {
        u32* count = arrived + blockIdx.x / group;
        __stcg(slots + blockIdx.x % group, make_float2(mine.a, mine.b));
        __threadfence();
        atomicAdd(count, 1);
        while (*(volatile u32*)count < group * (round + 1)) __nanosleep(32);
        __threadfence();
    }
    __syncthreads();
    Pair theirs{0, 0};
    if (threadIdx.x < group) {
        const float2 read = __ldcg(slots + threadIdx.x);
        theirs = Pair{read.x, read.y};
    }
    return theirs;
}

// What of a channel a block works on, and where in the array its elements are.
struct Part {
    u32 channels, area, elements, part, group;
    u32 first, count;
    __device__ Part(const Arguments& given)
        : channels(given.numbers[0]), area(given.numbers[1]), elements(given.numbers[2]),
          part(given.numbers[3]), group(given.numbers[4]) {
        first = blockIdx.x % group * part;
        count = count_of(blockIdx.x % group);
    }
    __device__ u32 count_of(u32 member) const {
        const u32 start = member * part;
        return start < elements ? min(part, elements - start) : 0;
    }
    __device__ u32 place(u32 channel, u32 i) const {
        const u32 sample = (first + i) / area;
        return (sample * channels + channel) * area + (first + i - sample * area);
    }
};

#define BATCH 4
#define STEP (THREADS * WIDTH)
#define FOR_EACH_BATCH(i) for (u32 i = threadIdx.x * WIDTH; i < own.count; i += BATCH * STEP)
#define FOR_EACH(k) \
    _Pragma("unroll") for (u32 k = 0; k < BATCH; ++k) if (i + k * STEP < own.count)
#define FOR_EACH_KEPT(i) for (u32 i = threadIdx.x * WIDTH; i < own.count; i += STEP)
#define FOR_WIDTH(w) _Pragma("unroll") for (u32 w = 0; w < WIDTH; ++w)

extern "C" __global__ void __launch_bounds__(THREADS, 2) normalize(const Arguments given) {
    const float* __restrict__ x = given.at[0];
    float* __restrict__ y = given.at[1];
    float *running_mean = given.at[4], *running_variance = given.at[5];
    const float eps = given.scalars[0], share = given.scalars[1];
    extern __shared__ float4 memory[];
    __shared__ Pair scratch[32];
    float* kept = (float*)memory;
    const Part own(given);
    const u32 channels = own.channels, elements = own.elements, group = own.group;
    const u32 groups = gridDim.x / group;
    u32 round = 0;
    for (u32 channel = blockIdx.x / group; channel < channels; channel += groups, ++round) {
        float sum = 0;
        FOR_EACH_BATCH(i) {
            Pack loaded[BATCH];
            FOR_EACH(k) loaded[k] = *(const Pack*)(x + own.place(channel, i + k * STEP));
            FOR_EACH(k) {
                *(Pack*)(kept + i + k * STEP) = loaded[k];
                FOR_WIDTH(w) sum += loaded[k].at[w];
            }
        }
        sum = block_sum(Pair{sum, 0}, scratch).a;
        float mean = own.count ? sum / own.count : 0;
        float squares = 0;
        FOR_EACH_KEPT(i) {
            const Pack pack = *(const Pack*)(kept + i);
            FOR_WIDTH(w) squares += (pack.at[w] - mean) * (pack.at[w] - mean);
        }
        squares = block_sum(Pair{squares, 0}, scratch).a;
        if (group > 1) {
            const Pair theirs = exchange(Pair{sum, squares}, given, round);
            mean = block_sum(Pair{theirs.a, 0}, scratch).a / elements;
            const u32 count = threadIdx.x < group ? own.count_of(threadIdx.x) : 0;
            const float apart = count ? theirs.a / count - mean : 0;
            squares = block_sum(Pair{theirs.b + count * apart * apart, 0}, scratch).a;
        }
        const float inverse = 1.0f / sqrtf(squares / elements + eps);
        if (!threadIdx.x && blockIdx.x % group == 0) {
            given.at[6][channel] = mean;
            given.at[7][channel] = inverse;
            const float variance = squares / max(elements - 1, 1u);
            running_mean[channel] = running_mean[channel] * (1 - share) + mean * share;
            running_variance[channel] = running_variance[channel] * (1 - share) + variance * share;
        }
        const float scale = given.at[2][channel] * inverse, shift = given.at[3][channel];
        FOR_EACH_KEPT(i) {
            Pack pack = *(const Pack*)(kept + i);
            FOR_WIDTH(w) pack.at[w] = (pack.at[w] - mean) * scale + shift;
            *(Pack*)(y + own.place(channel, i)) = pack;
        }
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, 2) normalize_backward(const Arguments given) {
    const float *__restrict__ x = given.at[0], *__restrict__ gy = given.at[1];
    float* __restrict__ gx = given.at[2];
    extern __shared__ float4 memory[];
    __shared__ Pair scratch[32];
    const Part own(given);
    float *kept_x = (float*)memory, *kept_gy = kept_x + own.part;
    const u32 channels = own.channels, elements = own.elements, group = own.group;
    const u32 groups = gridDim.x / group;
    u32 round = 0;
    for (u32 channel = blockIdx.x / group; channel < channels; channel += groups, ++round) {
        const float mean = given.at[4][channel], inverse = given.at[5][channel];
        Pair sum{0, 0};
        FOR_EACH_BATCH(i) {
            Pack loaded_x[BATCH], loaded_gy[BATCH];
            FOR_EACH(k) {
                const u32 place = own.place(channel, i + k * STEP);
                loaded_x[k] = *(const Pack*)(x + place);
                loaded_gy[k] = *(const Pack*)(gy + place);
            }
            FOR_EACH(k) {
                FOR_WIDTH(w) {
                    loaded_x[k].at[w] = (loaded_x[k].at[w] - mean) * inverse;
                    sum.a += loaded_gy[k].at[w] * loaded_x[k].at[w];
                    sum.b += loaded_gy[k].at[w];
                }
                *(Pack*)(kept_x + i + k * STEP) = loaded_x[k];
                *(Pack*)(kept_gy + i + k * STEP) = loaded_gy[k];
            }
        }
        sum = block_sum(sum, scratch);
        if (group > 1)
            sum = block_sum(exchange(sum, given, round), scratch);
        if (!threadIdx.x && blockIdx.x % group == 0) {
            given.at[6][channel] = sum.a;
            given.at[7][channel] = sum.b;
        }
        const float scale = given.at[3][channel] * inverse;
        const float slope = sum.a / elements, offset = sum.b / elements;
        FOR_EACH_KEPT(i) {
            Pack pack = *(const Pack*)(kept_x + i);
            const Pack above = *(const Pack*)(kept_gy + i);
            FOR_WIDTH(w) pack.at[w] = scale * (above.at[w] - (pack.at[w] * slope + offset));
            *(Pack*)(gx + own.place(channel, i)) = pack;
        }
    }
}
"""
