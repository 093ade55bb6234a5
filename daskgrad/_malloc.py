"""The C library's heap: room for a batch's temporaries, so that their pages need not be mapped anew at each operation."""

from __future__ import annotations

import ctypes
import functools
import os

DASKS = "65536"
"""What Dask's nannies set MALLOC_TRIM_THRESHOLD_ to, in bytes: with it glibc returns every larger temporary to the system at once, and
eager torch is half as fast."""
TRIM, MMAP = 64 * 2**20, 4 * 2**20
"""Bytes free at the end of the heap from which they are returned; bytes of one block from which it is mapped by itself."""
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # of glibc's malloc.h


@functools.cache
def keep_memory() -> None:
    """Let the C library keep what a batch frees for the next one, once in a process.

    glibc gives memory back to the system as soon as a batch is over, and every page of the next batch is then mapped again, which takes
    up to a quarter of the time. It learns to keep as much as the double of the largest block that has come and gone, of 32 MiB at most:
    here is one of that size, of which no page is touched. Where an environment variable (`MALLOC_TRIM_THRESHOLD_`) decides, that holds,
    unless it is only Dask's own default: there it is set as `local_client` sets it.
    """
    import torch

    if os.environ.get("MALLOC_TRIM_THRESHOLD_") == DASKS:
        mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # glibc's; elsewhere there is none
        if mallopt is not None:
            mallopt(_M_TRIM_THRESHOLD, TRIM)
            if "MALLOC_MMAP_THRESHOLD_" not in os.environ:
                mallopt(_M_MMAP_THRESHOLD, MMAP)
    torch.empty(31 * 2**20, dtype=torch.uint8, device="cpu")
