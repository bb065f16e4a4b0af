"""Memory that a rank has freed stays with it.

A training step frees what it allocated, and the next one takes the same again. glibc hands large blocks back to
the kernel in between, and each step faults its pages in anew: about 1,000 faults a step of a small convolutional
network, which took 7.7 to 8.5 ms with them and 5.0 to 5.2 ms without (glibc told by its environment). Batches
for a GPU are made in such memory too: crop, flip and normalise of 256 small images took 2.2 ms with the faults and 1.2
without.
"""

import ctypes
import gc
import sys

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
MOST_MMAP_THRESHOLD = 32 * 2**20  # glibc takes no more


def give_back() -> None:
    """Give the kernel what was freed: after something large that is done once."""
    gc.collect()
    if sys.platform == "linux":
        libc = ctypes.CDLL(None)
        if hasattr(libc, "malloc_trim"):
            libc.malloc_trim(0)


def keep() -> None:
    """Give freed memory back only above 1 GiB, and take blocks up to 32 MiB from the heap: for the rest of the process,
    in all of its threads. It is never undone: glibc does not tell what was set before."""
    if sys.platform == "linux":
        libc = ctypes.CDLL(None)
        if hasattr(libc, "mallopt"):
            libc.mallopt(M_TRIM_THRESHOLD, 2**30)
            libc.mallopt(M_MMAP_THRESHOLD, MOST_MMAP_THRESHOLD)
