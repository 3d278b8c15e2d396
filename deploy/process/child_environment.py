"""The environment of processes that a supervisor starts. It imports little, since `entry.py` needs it early."""

from __future__ import annotations

import os

from headrace.schemas.settings.env_prefix import ENV_PREFIX

_BLAS_THREADS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")


def child_environment(threads: int) -> dict[str, str]:
    """Return our environment with BLAS pinned to `threads`, and without `HEADRACE_SECTION__KEY`."""
    return {**dict.fromkeys(_BLAS_THREADS, str(threads)), **without_settings()}


def without_settings() -> dict[str, str]:
    """Return our environment without `HEADRACE_SECTION__KEY`.

    The resolved config has those variables already. If children read them again, they would override the flags of `up`.
    """
    return {k: v for k, v in os.environ.items() if not (k.startswith(ENV_PREFIX) and "__" in k)}
