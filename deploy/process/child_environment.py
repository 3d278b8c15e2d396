"""The environment of processes that a supervisor starts. It imports little, since `entry.py` needs it early."""

from __future__ import annotations

import os

from headrace.schemas.settings import ENV_PREFIX

EXIT_RECORD = "HEADRACE_EXIT_RECORD"
"""Variable with the path of a process's exit record. It is for that process only."""

LIVENESS_FILE = "HEADRACE_LIVENESS_FILE"
"""Variable with the path of the file whose time is a process's last sign of life. It is for that process only."""

_BLAS_THREADS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
_FOR_US = (EXIT_RECORD, LIVENESS_FILE)


def child_environment(threads: int) -> dict[str, str]:
    """Return our environment with BLAS pinned to `threads`, without `HEADRACE_SECTION__KEY` and what is for us only.

    It is the same before and after this process has taken its exit record and its liveness file out of its environment.
    """
    ours = without_settings()
    return {**dict.fromkeys(_BLAS_THREADS, str(threads)), **{k: v for k, v in ours.items() if k not in _FOR_US}}


def without_settings() -> dict[str, str]:
    """Return our environment without `HEADRACE_SECTION__KEY`.

    The resolved config has those variables already. If children read them again, they would override the flags of `up`.
    """
    return {k: v for k, v in os.environ.items() if not (k.startswith(ENV_PREFIX) and "__" in k)}
