"""How a worker's process keeps the memory of large arrays."""

from __future__ import annotations

import ctypes
import os

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
_KEPT_BYTES = 1 << 30
"""Arrays up to this size share the heap, and up to so much free memory at its end stays with the process."""


def keep_large_arrays() -> bool:
    """Let freed memory of large arrays serve the next ones; return whether the C library does so.

    By default glibc returns it to the system with each batch, and takes new pages for the next one. To fault those in
    costs more than to fill them. The process then stays as large as at its peak. What the user has set in the
    environment holds. Other C libraries stay as they are.
    """
    if "MALLOC_MMAP_THRESHOLD_" in os.environ or "glibc.malloc" in os.environ.get("GLIBC_TUNABLES", ""):
        return False
    set_option = getattr(ctypes.CDLL(None), "mallopt", None)
    return set_option is not None and all(
        set_option(option, _KEPT_BYTES) == 1 for option in (_TRIM_THRESHOLD, _MMAP_THRESHOLD)
    )
