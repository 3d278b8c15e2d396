"""A shorter time for the close() of envs than the 5 s that they have."""

from __future__ import annotations

import pytest

from headrace.workers.envs import lane
from headrace.workers.envs.process import job_settings, lane_homes, pool
from headrace.workers.external import self_driven


def close_within(monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
    """Give envs `seconds` to close, here and in processes that start from now on."""
    for module in (lane, job_settings, lane_homes, pool, self_driven):
        monkeypatch.setattr(module, "ENV_CLOSE_TIMEOUT_S", seconds)
