"""Deadlines of an env process measure the calls of its envs, not delays of the machine before or between calls."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from headrace.schemas.errors import EnvHangError
from headrace.workers import EnvRunnerConfig
from headrace.workers.envs.process import job_settings
from headrace.workers.envs.process.control import Control, Phase
from headrace.workers.envs.process.pool import EnvProcessPool
from headrace.workers.envs.process.shared_arrays import new_memory
from support.runners.process_driver import Driver

pytestmark = pytest.mark.processes


def _start_slowly(seconds: float, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have every interpreter that is started from now on take so long before it does anything."""
    (folder / "sitecustomize.py").write_text(f"import time\ntime.sleep({seconds})\n")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")]))


def test_the_limit_of_a_construction_does_not_count_the_start_of_the_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _start_slowly(2.5, tmp_path, monkeypatch)
    config = EnvRunnerConfig(env="CartPole-v1", num_envs=2, env_reset_timeout_s=1.0, env_step_timeout_s=2.0)
    with EnvProcessPool(config) as pool:
        driver = Driver(pool)
        driver.run(lambda: min(len(driver.lives[lane]) for lane in range(2)) > 20)
    assert not driver.failures


def test_a_process_that_does_not_start_is_a_typed_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job_settings, "_LEAST_START_S", 0.5)
    _start_slowly(1000.0, tmp_path, monkeypatch)
    words = r"env 0 did not return from start within max\(2 \* env_reset_timeout_s, 60 s\) = 0.5 s"
    with pytest.raises(EnvHangError, match=words):
        EnvProcessPool(EnvRunnerConfig(env="CartPole-v1", num_envs=2, env_reset_timeout_s=0.25))


def test_the_phase_after_a_call_is_timed_from_the_end_of_the_call() -> None:
    """Otherwise a construction that took longer than a step may take would use up the deadline of the next step."""
    memory = new_memory("headrace-control")
    control = Control(memory, 1, create=True)
    with control.during(0, Phase.CONSTRUCTION):
        began = control.doing
        while time.monotonic() <= began[2]:
            pass
    assert began[:2] == (0, Phase.CONSTRUCTION)
    assert control.doing[:2] == (-1, Phase.IDLE)
    assert control.doing[2] > began[2]
    os.close(memory)
