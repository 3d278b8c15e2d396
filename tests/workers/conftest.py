"""A fixture for every test of workers."""

from __future__ import annotations

import pytest

from headrace.workers.envs import restarts


@pytest.fixture(autouse=True)
def rebuilds_do_not_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """Envs of this process that fail again and again are built again at once."""
    monkeypatch.setattr(restarts, "BACKOFF_S", 0.0)
