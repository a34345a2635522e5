"""Give NumPy's arrays a budget, without Chainer: the allocator alone.

Shows: `dynamemo.using_pool` (the same line serves CuPy's arrays, with device="cuda"), its
statistics, and what an array that does not fit raises.
Prints: what the pool holds, that a large array was refused and what it would have needed, and that
arrays outlive the context.
"""

import numpy as np

import dynamemo
from dynamemo import format_bytes


def main():
    """Make arrays that fit, and one that does not."""
    with dynamemo.using_pool("8MiB", device="cpu") as pool:
        a = np.ones((1024, 1024), np.float32)
        print("in use:", format_bytes(pool.statistics().current_bytes))
        try:
            np.vstack([a, a])
        except MemoryError:
            print("refused:", pool.last_error)
        b = a[:512] * 2
        print("after it:", format_bytes(pool.statistics().current_bytes))
    print("outside:", a.sum(), b.sum())


if __name__ == "__main__":
    main()
