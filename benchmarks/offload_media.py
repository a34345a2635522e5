"""A bit mask beats the link; which lossless codecs and which file engine do too is printed.

Claims checked (exit code 1 where one does not hold):

- every codec and mask here gives back every activation bit for bit, every file engine every byte;
- a bit mask in place of a ReLU's output or of a dropout's float mask costs less kernel time, there
  and back, than the link time that it saves.

Questions answered (no exit code; the last lines printed):

- nvCOMP: for which content does a codec's kernel time, which competes with the model's own kernels,
  stay below the link time it saves there and back (``--link-gbps``; the rate seen is printed too);
- file tier: is kvikio (POSIX, or cuFile with GPUDirect Storage where present) faster from and to
  the device than pinned buffers, ``os.pwrite`` with O_DIRECT and a few threads.

What a ReLU mask needs: that nothing but the ReLU's backward reads ``y``, and that one only as
``y > 0`` (Chainer keeps ``y``; its cuDNN path takes an array, not a mask). A convolution or linear
layer that follows keeps the same array as its input: then only a codec that restores ``y`` helps,
such as the bit mask with the non-zero values behind it ("zeros out"; idea: Rhu et al. 2018,
*Compressing DMA Engine*, zero-value compression; here 32 values a mask word, compacted by a
running sum of its bit counts). Chainer's dropout keeps a float mask only without cuDNN's dropout.

Not covered: trained weights (weights here are random; a trained network has more zeros, see the
contents with 80%), the slowdown of kernels that run beside a codec, and that the host must wait
for the compressed size before it can copy.

Every section is a process of its own with a time limit: a missing package, a failing codec or a
crash prints its reason and the rest goes on.

Usage: python -m benchmarks.offload_media [--out FILE] [--folder DIR] [--sections masks,codecs,...]
"""

from __future__ import annotations

import argparse
import concurrent.futures
import functools
import json
import math
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

from benchmarks.environment import describe

_BEGUN_S = time.monotonic()
#: Sections in order, each with its seconds, CuPy's start included.
_SECTIONS = {"masks": 9.0, "codecs": 22.0, "staging": 9.0, "kvikio": 9.0, "cufile": 7.0}
_GIB = 1 << 30
_CHUNK_BYTES = 8 << 20

#: Label, what nvcomp.Codec takes, and the element type it is told: bytes, unsigned words, or the
#: array's own. The likeliest first: the time may not suffice for all.
_CODECS: list[tuple[str, dict[str, Any], str]] = [
    ("ANS", {"algorithm": "ANS"}, "own"),
    ("Bitcomp", {"algorithm": "Bitcomp", "algorithm_type": 0}, "own"),
    ("Bitcomp sparse", {"algorithm": "Bitcomp", "algorithm_type": 1}, "own"),
    ("LZ4", {"algorithm": "LZ4"}, "byte"),
    ("Cascaded", {"algorithm": "Cascaded"}, "word"),
    ("Snappy", {"algorithm": "Snappy"}, ""),
    ("GDeflate entropy", {"algorithm": "GDeflate", "algorithm_type": 0}, ""),
    ("Zstd", {"algorithm": "Zstd"}, ""),
    ("ANS bytes", {"algorithm": "ANS"}, "byte"),
    ("LZ4 bitshuffle", {"algorithm": "LZ4", "bitshuffle_mode": "MSB"}, "word"),
    ("Deflate entropy", {"algorithm": "Deflate", "algorithm_type": 0}, ""),
    ("GDeflate fast", {"algorithm": "GDeflate", "algorithm_type": 1}, ""),
]

#: What is tried, and left out should it take the process down, as a codec is.
_POOL = "nvCOMP with CuPy's pool"

#: Keeps the device busy for so many of its cycles.
_BUSY = """
extern "C" __global__ void busy(long long cycles) {
    long long start = clock64();
    while (clock64() - start < cycles) {}
}
"""

#: One thread an element, one mask word a warp; the last block's idle threads take part in ballots.
_KERNELS = r"""
typedef WORD word;
#define INDEX long long i = (long long)blockIdx.x * blockDim.x + threadIdx.x
extern "C" __global__ void pack_positive(const word* y, unsigned* mask, long long n) {
    INDEX;
    word bits = i < n ? y[i] : (word)0;
    unsigned ballot = __ballot_sync(0xffffffffu, bits != 0 && bits <= INFINITY_BITS);
    if (i < n && (i & 31) == 0) mask[i >> 5] = ballot;
}
extern "C" __global__ void backward(
        const unsigned* mask, const word* gy, word* gx, long long n) {
    INDEX;
    if (i < n) gx[i] = (mask[i >> 5] >> (i & 31)) & 1 ? gy[i] : (word)0;
}
extern "C" __global__ void expand(const unsigned* mask, word scale, word* out, long long n) {
    INDEX;
    if (i < n) out[i] = (mask[i >> 5] >> (i & 31)) & 1 ? scale : (word)0;
}
extern "C" __global__ void pack_nonzero(const word* x, unsigned* mask, int* count, long long n) {
    INDEX;
    unsigned ballot = __ballot_sync(0xffffffffu, i < n && x[i] != 0);
    if (i < n && (i & 31) == 0) { mask[i >> 5] = ballot; count[i >> 5] = __popc(ballot); }
}
extern "C" __global__ void count_bits(const unsigned* mask, int* count, long long n) {
    INDEX;
    if (i < n) count[i] = __popc(mask[i]);
}
extern "C" __global__ void compact(
        const word* x, const unsigned* mask, const int* end, word* values, long long n) {
    INDEX;
    if (i >= n) return;
    unsigned rest = mask[i >> 5] >> (i & 31);
    if (rest & 1) values[end[i >> 5] - __popc(rest)] = x[i];
}
extern "C" __global__ void spread(
        const word* values, const unsigned* mask, const int* end, word* out, long long n) {
    INDEX;
    if (i >= n) return;
    unsigned rest = mask[i >> 5] >> (i & 31);
    out[i] = rest & 1 ? values[end[i >> 5] - __popc(rest)] : (word)0;
}
"""


# What is measured: a child process for each section.


def _emit(**row: Any) -> None:
    print(json.dumps(row), flush=True)


def _attempt(label: str, measure: Callable[..., Any], *arguments: Any) -> bool:
    """Run it; print the reason where it fails; say whether it went well."""
    try:
        measure(*arguments)
    except Exception as error:
        reason = " ".join(str(error).split())[:300]
        _emit(note=f"{label}: {type(error).__name__}: {reason}")
        return False
    return True


def _has_time(options: argparse.Namespace, label: str) -> bool:
    if time.monotonic() - _BEGUN_S < options.seconds:
        return True
    _emit(note=f"{label}: not measured, the section's time is over")
    return False


@functools.cache
def _busy() -> Any:
    import cupy

    return cupy.RawKernel(_BUSY, "busy")


def _timed(call: Callable[[], Any]) -> tuple[Any, float]:
    """Return the last result, and the least seconds between two events on the current stream.

    The device is kept busy first, so that the host is ahead, as it is while a model trains.
    """
    import cupy
    import numpy

    begun_s = time.monotonic()
    result = call()
    cupy.cuda.get_current_stream().synchronize()
    repeats = 1 if time.monotonic() - begun_s > 0.5 else 3
    elapsed_s = math.inf
    for _ in range(repeats):
        result = None  # its memory serves the next call
        start, stop = cupy.cuda.Event(), cupy.cuda.Event()
        _busy()((1,), (1,), (numpy.int64(3_000_000),))
        start.record()
        result = call()
        stop.record()
        stop.synchronize()
        elapsed_s = min(elapsed_s, cupy.cuda.get_elapsed_time(start, stop) / 1e3)
    return result, elapsed_s


def _contents(nbytes: int) -> Iterator[tuple[str, Any]]:
    """Yield named activations of two layers (linear, normalised, ReLU) with random weights."""
    import cupy

    features = 1024
    normal = functools.partial(cupy.random.standard_normal, dtype="f")
    for dtype in (cupy.dtype("f4"), cupy.dtype("f2")):
        x = normal((nbytes // features // dtype.itemsize, features))
        for _ in range(2):
            weight = normal((features, features)) * cupy.float32(math.sqrt(2 / features))
            gamma = cupy.random.uniform(0.5, 1.5, features).astype("f")
            x = x @ weight
            pre = gamma * (x - x.mean(0)) / cupy.sqrt(x.var(0) + cupy.float32(1e-5))
            x = cupy.maximum(pre, 0)
        mask = ((normal(x.shape) >= 0) * cupy.float32(2)).astype(dtype)  # ratio 0.5
        yield "pre-activation", pre.astype(dtype).ravel()
        yield "relu, 50% zeros", x.astype(dtype).ravel()
        yield "relu, 80% zeros", cupy.maximum(pre - 0.8416 * gamma, 0).astype(dtype).ravel()
        yield "dropout output", (x.astype(dtype) * mask).ravel()
        yield "dropout mask", mask.ravel()
    # As in Chainer: the place in the window, here 2 x 2, as int32.
    yield "pool indexes", cupy.maximum(normal((nbytes // 4, 4)), 0).argmax(1).astype("i")


def _is_equal(restored: Any, array: Any) -> bool:
    if restored.nbytes != array.nbytes:
        return False
    return bool((restored.ravel().view("u1") == array.ravel().view("u1")).all())


def _measure(
    name: tuple[str, str],
    array: Any,
    encode: Callable[[], Any],
    decode: Callable[[Any], Any],
    nbytes_of: Callable[[Any], int],
    *,
    expected: Any = None,
    instead_of_s: float = 0.0,
    is_mask: bool = False,
) -> None:
    """Time both ways and compare bits.

    ``decode`` may return what is computed from the array in place of the array, then compared with
    ``expected``; what that took from the array itself, ``instead_of_s``, is not counted.
    """
    encoded, encode_s = _timed(encode)
    encoded_bytes = nbytes_of(encoded)
    restored, decode_s = _timed(lambda: decode(encoded))
    decode_s = max(0.0, decode_s - instead_of_s)
    _emit(
        content=name[0],
        dtype=array.dtype.name,
        codec=name[1],
        ratio=array.nbytes / encoded_bytes,
        encode_gbps=array.nbytes / encode_s / 1e9,
        decode_gbps=array.nbytes / decode_s / 1e9 if decode_s else None,
        kernel_s_per_gib=(encode_s + decode_s) / array.nbytes * _GIB,
        is_equal=_is_equal(restored, array if expected is None else expected),
        is_mask=is_mask,
    )


def _masks(options: argparse.Namespace) -> None:
    _attempt("link", _measure_link)
    for content, array in _contents(options.mib << 20):
        label = f"{content} {array.dtype.name}"
        if not _has_time(options, label):
            break
        if content == "dropout mask":
            _attempt(label, _measure_mask, content, array)
        elif content == "pool indexes":
            _attempt(label, _measure_cast, content, array)
        if content.startswith("relu"):
            _attempt(label, _measure_relu, content, array)
        if array.dtype.kind == "f":
            _attempt(label, _measure_zeros_out, content, array)


def _measure_link() -> None:
    import cupy
    import cupyx

    device = cupy.zeros(256 << 20, dtype="u1")
    host = cupyx.zeros_pinned(device.shape, dtype="u1")
    _, out_s = _timed(lambda: device.get(out=host, blocking=False))
    _, back_s = _timed(lambda: device.set(host))
    rates = [device.nbytes / seconds / 1e9 for seconds in (out_s, back_s)]
    _emit(link_gbps=rates, note="link: {:.1f} GB/s to the host, {:.1f} back".format(*rates))


@functools.cache
def _kernels(itemsize: int) -> Any:
    import cupy

    word, infinity = ("unsigned short", "0x7c00") if itemsize == 2 else ("unsigned", "0x7f800000u")
    source = _KERNELS.replace("WORD", word).replace("INFINITY_BITS", infinity)
    return cupy.RawModule(code=source)


def _launch(array: Any, name: str, *arguments: Any, count: int = 0) -> None:
    """Run the kernel for the array's element size over its elements, or over ``count``."""
    import numpy

    count = count or array.size
    kernel = _kernels(array.dtype.itemsize).get_function(name)
    kernel((-(-count // 256),), (256,), (*arguments, numpy.int64(count)))


def _pack(array: Any) -> Any:
    import cupy

    mask = cupy.empty(-(-array.size // 32), dtype="u4")
    _launch(array, "pack_positive", array, mask)
    return mask


def _measure_relu(content: str, y: Any) -> None:
    """Put a mask in place of y; count what the backward then takes more than Chainer's."""
    import cupy

    gy = cupy.random.standard_normal(y.size, dtype="f").astype(y.dtype)
    plain = cupy.ElementwiseKernel("T y, T gy", "T gx", "gx = y > 0 ? gy : (T)0", "relu_backward")
    expected, plain_s = _timed(lambda: plain(y, gy))

    def backward(mask: Any) -> Any:
        gx = cupy.empty_like(gy)
        _launch(y, "backward", mask, gy, gx)
        return gx

    def backward_packbits(mask: Any) -> Any:
        return cupy.where(cupy.unpackbits(mask)[: y.size].view("?"), gy, y.dtype.type(0))

    def packbits() -> Any:
        return cupy.packbits(y > 0)

    measure = functools.partial(_measure, expected=expected, instead_of_s=plain_s)
    pack = functools.partial(_pack, y)
    measure((content, "bit mask"), y, pack, backward, lambda m: m.nbytes, is_mask=True)
    measure((content, "cupy.packbits"), y, packbits, backward_packbits, lambda m: m.nbytes)


def _measure_mask(content: str, array: Any) -> None:
    import cupy

    scale = array.max().view(f"u{array.dtype.itemsize}").get()[()]

    def expand(mask: Any) -> Any:
        out = cupy.empty_like(array)
        _launch(array, "expand", mask, scale, out)
        return out

    pack = functools.partial(_pack, array)
    _measure((content, "bit mask"), array, pack, expand, lambda m: m.nbytes, is_mask=True)


def _measure_zeros_out(content: str, array: Any) -> None:
    import cupy

    words = -(-array.size // 32)
    values = cupy.empty_like(array)

    def encode() -> tuple[Any, Any]:
        mask, count = cupy.empty(words, dtype="u4"), cupy.empty(words, dtype="i4")
        _launch(array, "pack_nonzero", array, mask, count)
        end = cupy.cumsum(count, dtype="i4")
        _launch(array, "compact", array, mask, end, values)
        return mask, end

    def decode(encoded: tuple[Any, Any]) -> Any:
        count, out = cupy.empty(words, dtype="i4"), cupy.empty_like(array)
        _launch(array, "count_bits", encoded[0], count, count=words)
        _launch(array, "spread", values, encoded[0], cupy.cumsum(count, dtype="i4"), out)
        return out

    def nbytes_of(encoded: tuple[Any, Any]) -> int:
        return int(encoded[0].nbytes) + int(encoded[1][-1]) * int(array.dtype.itemsize)

    _measure((content, "zeros out"), array, encode, decode, nbytes_of)


def _measure_cast(content: str, array: Any) -> None:
    def encode() -> Any:
        return array.astype("u1")

    name = (content, "as uint8")
    _measure(name, array, encode, lambda a: a.astype(array.dtype), lambda a: a.nbytes)


def _codecs(options: argparse.Namespace) -> None:
    import cupy

    _join_namespace()
    from nvidia import nvcomp

    _emit(note=f"nvCOMP {nvcomp.__version__} for CUDA {nvcomp.__cuda_version__}")
    if _POOL not in options.skip.split(","):
        _emit(begun=_POOL)
        # So that allocation is not what is timed.
        nvcomp.set_device_allocator(lambda nbytes, stream: cupy.cuda.alloc(nbytes))
        if not _attempt(_POOL, _try_codec):
            nvcomp.set_device_allocator()
    else:
        _emit(note="from here with nvCOMP's own allocator")
    contents = list(_contents(options.mib << 20))
    for codec in _CODECS:
        if codec[0] in options.skip.split(","):
            continue
        if not _has_time(options, codec[0]):
            break
        _emit(begun=codec[0])
        for content, array in contents:
            label = f"{codec[0]}, {content} {array.dtype.name}"
            if codec[0] == "ANS" and array.dtype.kind != "f":
                continue  # floats and bytes only
            if not _has_time(options, label):
                break
            if not _attempt(label, _measure_codec, codec, content, array):
                cupy.zeros(1).get()  # raises where the CUDA context is lost: a new process goes on


def _try_codec() -> None:
    import cupy
    from nvidia import nvcomp

    stream = cupy.cuda.get_current_stream().ptr
    codec = nvcomp.Codec(algorithm="ANS", cuda_stream=stream)
    codec.decode(codec.encode(nvcomp.as_array(cupy.zeros(1 << 20, dtype="u1"), cuda_stream=stream)))
    cupy.cuda.Device().synchronize()


def _join_namespace() -> None:
    """Let ``nvidia`` span all of sys.path, also where some package makes it a regular one."""
    import nvidia

    for folder in sys.path:
        path = os.path.join(folder, "nvidia")
        if os.path.isdir(path) and path not in nvidia.__path__:
            nvidia.__path__.append(path)


def _measure_codec(codec: tuple[str, dict[str, Any], str], content: str, array: Any) -> None:
    import cupy
    from nvidia import nvcomp

    label, settings, unit = codec
    own = {"own": array.dtype.str, "word": f"<u{array.dtype.itemsize}"}
    data_type = own.get(unit, "|u1")
    settings = settings | ({"data_type": data_type} if unit else {})
    if "bitshuffle_mode" in settings:
        settings["bitshuffle_mode"] = nvcomp.BitshuffleMode.NVCOMP_BITSHUFFLE_MSB_FIRST
    stream = cupy.cuda.get_current_stream().ptr
    coder = nvcomp.Codec(cuda_stream=stream, **settings)
    source = nvcomp.as_array(array.view(data_type), cuda_stream=stream)
    _measure(
        (content, label),
        array,
        lambda: coder.encode(source),
        lambda encoded: cupy.asarray(coder.decode(encoded)),
        lambda encoded: int(encoded.buffer_size),
    )


def _staging(options: argparse.Namespace) -> None:
    """Move through pinned buffers by system calls: as the file tier does today, and O_DIRECT."""
    state = os.statvfs(options.folder)
    free = f"{state.f_bavail * state.f_frsize / 1e9:.0f} GB free"
    _emit(note=f"{options.folder}: {_file_system(options.folder)}, {free}")
    for mib in _file_sizes(options):
        for way, flag in (("pinned + O_DIRECT", os.O_DIRECT), ("pinned, buffered", 0)):
            for threads in (1, 4):
                if _has_time(options, f"{way}, {threads} threads, {mib} MiB"):
                    _attempt(way, _measure_staging, options, (way, threads, mib), flag)


def _measure_staging(options: argparse.Namespace, name: tuple[str, int, int], flag: int) -> None:
    import cupy
    import cupyx

    _, threads, mib = name
    buffers = [cupyx.empty_pinned((2, _CHUNK_BYTES), dtype="u1") for _ in range(threads)]
    streams = [cupy.cuda.Stream(non_blocking=True) for _ in range(threads)]
    stripe_bytes = (mib << 20) // threads

    def run(move: Callable[..., None], flags: int, path: str, array: Any) -> None:
        file = os.open(path, os.O_RDWR | flag | flags, 0o600)
        try:
            tasks = [
                pool.submit(move, file, array.data.ptr, k * stripe_bytes, stripe_bytes, *pair)
                for k, pair in enumerate(zip(buffers, streams, strict=True))
            ]
            for task in tasks:
                task.result()
        finally:
            os.close(file)

    with concurrent.futures.ThreadPoolExecutor(threads) as pool:
        write = functools.partial(run, _write_stripe, os.O_CREAT | os.O_TRUNC)
        _measure_file(options, name, write, functools.partial(run, _read_stripe, 0))


def _write_stripe(file: int, device: int, offset: int, nbytes: int, pair: Any, stream: Any) -> None:
    """Copy a chunk to one buffer while the other one is written."""
    from cupy.cuda import runtime

    def copy(start: int) -> None:
        host = pair[start // _CHUNK_BYTES % 2].ctypes.data
        kind = runtime.memcpyDeviceToHost
        runtime.memcpyAsync(host, device + offset + start, _CHUNK_BYTES, kind, stream.ptr)

    copy(0)
    for start in range(0, nbytes, _CHUNK_BYTES):
        stream.synchronize()
        if start + _CHUNK_BYTES < nbytes:
            copy(start + _CHUNK_BYTES)
        _move_all(os.pwrite, file, pair[start // _CHUNK_BYTES % 2], offset + start)


def _read_stripe(file: int, device: int, offset: int, nbytes: int, pair: Any, stream: Any) -> None:
    """Read a chunk into one buffer while the other one is copied."""
    from cupy.cuda import runtime

    for start in range(0, nbytes, _CHUNK_BYTES):
        buffer = pair[start // _CHUNK_BYTES % 2]
        _move_all(lambda f, data, at: os.preadv(f, [data], at), file, buffer, offset + start)
        stream.synchronize()
        kind = runtime.memcpyHostToDevice
        address = device + offset + start
        runtime.memcpyAsync(address, buffer.ctypes.data, _CHUNK_BYTES, kind, stream.ptr)
    stream.synchronize()


def _move_all(call: Callable[[int, Any, int], int], file: int, buffer: Any, offset: int) -> None:
    done = 0
    while done < len(buffer):
        count = call(file, buffer[done:], offset + done)
        if count == 0:
            raise OSError("the file ended early")
        done += count


def _kvikio(options: argparse.Namespace) -> None:
    """Go through kvikio without cuFile: its own threads, bounce buffers and O_DIRECT."""
    import kvikio

    _emit(note=f"kvikio {kvikio.__version__}")
    _sweep_kvikio(options, kvikio.CompatMode.ON, "kvikio POSIX", direct=True)
    _sweep_kvikio(options, kvikio.CompatMode.ON, "kvikio POSIX, buffered", direct=False)


def _cufile(options: argparse.Namespace) -> None:
    """Go through cuFile, which uses GPUDirect Storage where driver and file system can."""
    import kvikio
    import kvikio.cufile_driver as driver

    _emit(note=f"libcufile {driver.libcufile_version()}")
    for name in ("is_gds_available", "allow_compat_mode"):
        _attempt(name, lambda name=name: _emit(note=f"{name}: {driver.get(name)}"))
    # kvikio's documentation: may fail, crash or hang where cuFile is not set up.
    _sweep_kvikio(options, kvikio.CompatMode.OFF, "kvikio cuFile", direct=True)


def _sweep_kvikio(options: argparse.Namespace, mode: Any, way: str, *, direct: bool) -> None:
    import kvikio
    import kvikio.defaults

    def write(path: str, array: Any) -> None:
        with kvikio.CuFile(path, "w") as file:
            _expect(file.write(array), array.nbytes)

    def read(path: str, array: Any) -> None:
        with kvikio.CuFile(path, "r") as file:
            _expect(file.read(array), array.nbytes)

    for mib in _file_sizes(options):
        for threads in (1, 4, 8):
            if not _has_time(options, f"{way}, {threads} threads, {mib} MiB"):
                return
            settings = {
                "compat_mode": mode,
                "num_threads": threads,
                "auto_direct_io_read": direct,
                "auto_direct_io_write": direct,
            }
            with kvikio.defaults.set(settings):
                _attempt(way, _measure_file, options, (way, threads, mib), write, read)


def _expect(moved_bytes: int, nbytes: int) -> None:
    if moved_bytes != nbytes:
        raise OSError(f"{moved_bytes:,} of {nbytes:,} bytes moved")


def _file_sizes(options: argparse.Namespace) -> list[int]:
    return [int(text) for text in options.file_mib.split(",")]


def _file_system(folder: str) -> str:
    with open("/proc/mounts") as mounts:
        entries = [line.split()[1:3] for line in mounts]
    path = os.path.join(os.path.realpath(folder), "")
    above = [entry for entry in entries if path.startswith(os.path.join(entry[0], ""))]
    return max(above, key=lambda entry: len(entry[0]))[1] if above else "unknown file system"


def _measure_file(
    options: argparse.Namespace,
    name: tuple[str, int, int],
    write: Callable[[str, Any], None],
    read: Callable[[str, Any], None],
) -> None:
    """Time device to file, until it is on the disk too, and back with nothing in the page cache."""
    import cupy

    way, threads, mib = name
    path = os.path.join(options.folder, "offload.bin")
    source = cupy.random.standard_normal(mib << 18, dtype="f").view("u1")
    target = cupy.zeros_like(source)
    best_s = dict.fromkeys(("write_gbps", "durable_gbps", "read_gbps"), math.inf)
    is_equal = True
    for _ in range(2):
        target.fill(0)
        cupy.cuda.Device().synchronize()
        marks = [time.perf_counter()]
        write(path, source)
        marks.append(time.perf_counter())
        _empty_cache(path)
        marks.append(time.perf_counter())
        read(path, target)
        cupy.cuda.Device().synchronize()
        marks.append(time.perf_counter())
        took_s = (marks[1] - marks[0], marks[2] - marks[0], marks[3] - marks[2])
        best_s = {k: min(best_s[k], s) for k, s in zip(best_s, took_s, strict=True)}
        is_equal = is_equal and _is_equal(target, source)
    os.unlink(path)
    rates = {key: source.nbytes / seconds / 1e9 for key, seconds in best_s.items()}
    _emit(way=way, threads=threads, mib=mib, is_equal=is_equal, **rates)


def _empty_cache(path: str) -> None:
    file = os.open(path, os.O_RDONLY)
    try:
        os.fsync(file)
        os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(file)


def _child(options: argparse.Namespace) -> int:
    """Run one section in this process."""

    def run() -> None:
        import cupy

        cupy.cuda.runtime.getDeviceCount()  # says what is wrong where there is none
        cupy.cuda.Stream(non_blocking=True).use()  # not the null stream: nvCOMP takes 0 as none
        globals()[f"_{options.child}"](options)

    code = 0 if _attempt(options.child, run) else 3
    sys.stdout.flush()
    # No teardown: the codecs would give memory back to a pool that has ended by then.
    os._exit(code)


# The parent: runs the sections, prints and judges.


def _run_section(options: argparse.Namespace, section: str, seconds: float, skip: str = "") -> int:
    """Print a child's rows as they come, keep them in options.rows; return its exit code."""
    command = [sys.executable, "-m", "benchmarks.offload_media", "--child", section]
    command += ["--seconds", str(seconds - 1), "--skip", skip, "--folder", options.folder]
    command += ["--mib", str(options.mib), "--file-mib", options.file_mib]
    child = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace"
    )
    killer = threading.Timer(max(3.0, seconds + 1), child.kill)
    killer.start()
    for line in child.stdout or ():
        _take(options, {"section": section}, line.rstrip())
    killer.cancel()
    if child.wait():
        _take(options, {"section": section}, f"{section}: exit code {child.returncode}")
    return child.returncode


def _take(options: argparse.Namespace, row: dict[str, Any], line: str) -> None:
    try:
        row |= json.loads(line)
    except (ValueError, TypeError):  # not ours: some library's own words
        row["note"] = line
    if "codec" in row:
        row |= _effective(options, row)
    options.rows.append(row)
    text = _as_text(row)
    if text:
        print(text, flush=True)


def _effective(options: argparse.Namespace, row: dict[str, Any]) -> dict[str, float]:
    """Milliseconds for each GiB of activations, to the host and back."""
    plain_ms = 2 * _GIB / options.link_gbps / 1e6
    figures = {"plain_ms": plain_ms, "link_ms": plain_ms / row["ratio"]}
    figures["effective_ms"] = figures["link_ms"] + row["kernel_s_per_gib"] * 1e3
    return figures | {"gain_ms": plain_ms - figures["effective_ms"]}


_CODEC_HEADER = (
    f"{'content':16} {'dtype':8} {'codec':17} {'ratio':>6} {'encode':>6} {'decode':>6}"
    f" {'link':>6} {'kernel':>6} {'sum':>6} {'gain':>6}   GB/s; ms a GiB, there and back"
)
_FILE_HEADER = f"{'engine':25} {'th':>2} {'MiB':>6} {'write':>8} {'+ fsync':>8} {'read':>8}   GB/s"


def _as_text(row: dict[str, Any]) -> str:
    if "codec" in row:
        decode = f"{row['decode_gbps']:6.0f}" if row["decode_gbps"] else "  free"
        return (
            f"{row['content']:16} {row['dtype']:8} {row['codec']:17} {row['ratio']:6.2f}"
            f" {row['encode_gbps']:6.0f} {decode} {row['link_ms']:6.1f}"
            f" {row['kernel_s_per_gib'] * 1e3:6.1f} {row['effective_ms']:6.1f}"
            f" {row['gain_ms']:+6.1f}  {'bit-equal' if row['is_equal'] else 'DIFFERENT'}"
        )
    if "way" in row:
        rates = " ".join(f"{row[f'{rate}_gbps']:8.2f}" for rate in ("write", "durable", "read"))
        verdict = "equal" if row["is_equal"] else "DIFFERENT"
        return f"{row['way']:25} {row['threads']:2} {row['mib']:6} {rates}  {verdict}"
    return f"  {row['note']}" if row.get("note") else ""


def _run_sections(options: argparse.Namespace) -> None:
    scale = options.limit_s / sum(_SECTIONS.values())
    end_s = time.monotonic()
    for section in (name for name in options.sections.split(",") if name in _SECTIONS):
        end_s += _SECTIONS[section] * scale  # what one section leaves, the next may use
        print(f"\n{section}\n{_CODEC_HEADER if section in ('masks', 'codecs') else _FILE_HEADER}")
        skip = ""
        # A codec that takes its process down is left out of the next one.
        while _run_section(options, section, end_s - time.monotonic(), skip):
            begun = ",".join(row["begun"] for row in options.rows if "begun" in row)
            if begun == skip or section != "codecs" or end_s - time.monotonic() < 5:
                break
            skip = begun


def _judge(sections: str, rows: list[dict[str, Any]]) -> Iterator[str]:
    if "masks" in sections.split(",") and not any(row.get("is_mask") for row in rows):
        yield "masks: nothing was measured"
    for row in rows:
        name = " ".join(str(row[key]) for key in ("content", "dtype", "codec", "way") if key in row)
        if not row.get("is_equal", True):
            yield f"{name}: what comes back differs"
        if row.get("is_mask") and row["gain_ms"] <= 0:
            yield f"{name}: costs {-row['gain_ms']:.1f} ms a GiB more than it saves"


def _answer(rows: list[dict[str, Any]]) -> Iterator[str]:
    """Yield the best codec for each content, and each engine's best for each size."""
    best: dict[tuple[str, ...], dict[str, Any]] = {}
    for row in (row for row in rows if "codec" in row and row["is_equal"]):
        key = (row["content"], row["dtype"], row["section"])
        if key not in best or row["gain_ms"] > best[key]["gain_ms"]:
            best[key] = row
    for (content, dtype, _), row in sorted(best.items()):
        verdict = "pays" if row["gain_ms"] > 0 else "does not pay"
        gain = f"{row['gain_ms']:+.1f} of {row['plain_ms']:.1f} ms a GiB"
        yield f"{content} {dtype}: {row['codec']} {verdict}, {gain}"
    files = [row for row in rows if "way" in row and row["is_equal"]]
    for mib in dict.fromkeys(row["mib"] for row in files):
        for rate in ("durable", "read"):
            fastest: dict[str, str] = {}
            ranked = sorted(files, key=lambda row: -row[f"{rate}_gbps"])
            for row in (row for row in ranked if row["mib"] == mib):
                text = f"{row['way']} x{row['threads']} {row[f'{rate}_gbps']:.2f}"
                fastest.setdefault(row["way"], text)
            yield f"{mib} MiB {rate}, GB/s: {'; '.join(fastest.values())}"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mib", type=int, default=128, help="size of each content")
    parser.add_argument("--file-mib", default="64,512", help="sizes of what goes to a file")
    parser.add_argument("--folder", default=tempfile.gettempdir(), help="where files lie")
    parser.add_argument("--link-gbps", type=float, default=55.0)
    parser.add_argument("--limit-s", type=float, default=56.0, help="for all sections together")
    parser.add_argument("--sections", default=",".join(_SECTIONS))
    parser.add_argument("--out", help="file for the results")
    parser.add_argument("--child", choices=tuple(_SECTIONS), help=argparse.SUPPRESS)
    parser.add_argument("--seconds", type=float, default=math.inf, help=argparse.SUPPRESS)
    parser.add_argument("--skip", default="", help=argparse.SUPPRESS)
    return parser


def main() -> int:
    """Run all; print a line each; return the exit code."""
    options = _parser().parse_args()
    if options.child:
        return _child(options)
    hidden = ("out", "child", "seconds", "skip")
    asked = {key: value for key, value in vars(options).items() if key not in hidden}
    options.rows = []
    with tempfile.TemporaryDirectory(prefix="dynamemo-", dir=options.folder) as folder:
        options.folder = folder
        _run_sections(options)
    rows = [row for row in options.rows if "begun" not in row]
    if options.out:
        with open(options.out, "w") as file:
            json.dump({"environment": describe(), "options": asked, "rows": rows}, file, indent=2)
    print("", *_answer(rows), sep="\n")
    failures = list(_judge(options.sections, rows))
    for failure in failures:
        print(f"FAILED: {failure}")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
