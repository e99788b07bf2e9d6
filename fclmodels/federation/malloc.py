"""glibc is told to keep freed memory: by default it gives each step's gradients back and faults them in again.

Worth 15 to 40 % of a training round on a CPU (bench/rounds.py measures it). No effect on other C libraries.
"""

import ctypes

M_MMAP_MAX, M_TRIM_THRESHOLD = -4, -1


def tune() -> bool:
    """Whether this process runs on glibc and took the settings."""
    try:
        libc = ctypes.CDLL("libc.so.6")
        return bool(libc.mallopt(M_MMAP_MAX, 0) and libc.mallopt(M_TRIM_THRESHOLD, 2**31 - 1))
    except (OSError, AttributeError):
        return False
