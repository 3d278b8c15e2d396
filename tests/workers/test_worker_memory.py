"""A worker's process reuses the memory of its batches."""

from __future__ import annotations

import os
import platform
import subprocess
import sys

import pytest

_FAULTS = """
import resource
import numpy as np
from headrace.workers.fleet.memory import keep_large_arrays

keeps = keep_large_arrays()
def fill():
    np.ones(64 << 20, np.uint8)
fill()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(4):
    fill()
print(keeps, resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def _faults(**environment: str) -> tuple[bool, int]:
    """Return whether a process keeps large arrays, and its page faults while it fills one again and again."""
    command = [sys.executable, "-c", _FAULTS]
    done = subprocess.run(command, env=os.environ | environment, capture_output=True, text=True, check=True)
    keeps, faults = done.stdout.split()
    return keeps == "True", int(faults)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another C library")
def test_a_large_array_reuses_the_pages_of_the_previous_array() -> None:
    assert _faults() == (True, pytest.approx(0, abs=16))
    keeps, faults = _faults(MALLOC_MMAP_THRESHOLD_=str(1 << 20))
    assert not keeps
    assert faults > 16
