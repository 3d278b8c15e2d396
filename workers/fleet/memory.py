"""Reuse of the memory of large arrays by a worker's process."""

from __future__ import annotations

import ctypes
import os

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
_KEPT_BYTES = 1 << 30
"""Arrays up to this size share the heap. The process keeps up to this much free memory at the heap's end."""


def keep_large_arrays() -> bool:
    """Let freed memory of large arrays serve the next ones; return whether the C library does so.

    By default glibc returns this memory to the system after each batch, and takes new pages for the next one. The page
    faults cost more than filling the pages. With this setting the process stays as large as at its peak. Settings of
    the user in the environment win. Other C libraries are not changed.
    """
    if "MALLOC_MMAP_THRESHOLD_" in os.environ or "glibc.malloc" in os.environ.get("GLIBC_TUNABLES", ""):
        return False
    set_option = getattr(ctypes.CDLL(None), "mallopt", None)
    options = (_TRIM_THRESHOLD, _MMAP_THRESHOLD)
    return set_option is not None and all(set_option(option, _KEPT_BYTES) == 1 for option in options)
