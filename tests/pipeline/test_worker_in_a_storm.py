"""A worker whose envs never give a fragment keeps trying. On a stop request it leaves soon, with closed books."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest

from headrace.schemas.accounts.recorder import read_recorder
from headrace.schemas.errors import EnvRestartBudgetError
from headrace.workers import EnvRunnerConfig, SingleAgentEnvRunner
from support.pipeline.delivery import BrokerThread
from support.pipeline.worker_threads import AT_RANDOM, WorkerThread, closed_row
from support.waiting import wait_until

ENDLESS = 1_000_000
STORM: dict[str, Any] = {
    "env": "support.envs.stormy:Stormy",
    "num_envs": 2,
    "env_restart_attempts": ENDLESS,
    "max_env_restarts_per_window": ENDLESS,
}
WHOLE = {"batch_mode": "complete_episodes"}


@pytest.mark.long
@pytest.mark.parametrize(
    ("fails", "settings"),
    [
        ("construction", {"env_restart_backoff_s": 0.0}),
        ("reset", {"env_restart_backoff_s": 0.0}),
        ("reset", {"env_restart_backoff_s": 5.0}),
        ("reset", {"env_placement": "process", "env_restart_backoff_s": 0.0}),
        ("step", {"env_restart_backoff_s": 0.0, **WHOLE}),
        (None, WHOLE),
    ],
    ids=["never built again", "never reset", "long waits", "in processes", "never stepped", "episodes without an end"],
)
def test_a_worker_that_never_gets_a_fragment_leaves_on_a_stop_request(
    fails: str | None,
    settings: dict[str, Any],
    broker: BrokerThread,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    sections = {**AT_RANDOM, "sampling": {**STORM, "env_config": {"fails": fails}, **settings}}
    with WorkerThread(monkeypatch, broker.endpoints.worker, tmp_path, sections) as worker:
        wait_until(lambda: _works_in_vain(caplog, tmp_path / "worker-0-1.rec"), "work in vain")
        worker.stopping.set()
        wait_until(lambda: not worker.is_alive, "its end")
        row = closed_row(broker)
    assert worker.error is None
    assert row.totals.open == 0
    assert row.totals.stepped == sum(row.totals.discarded.values())


def _works_in_vain(caplog: pytest.LogCaptureFixture, recorder: Path) -> bool:
    reading = read_recorder(recorder)
    stepped = reading.totals.stepped if reading is not None else 0
    return stepped > 100 or any("(attempt 2 of" in record.getMessage() for record in list(caplog.records))


def test_sample_waits_for_failed_envs_until_their_restart_budget_is_spent() -> None:
    config = EnvRunnerConfig(
        env="support.envs.stormy:Stormy", num_envs=2, env_config={"fails": "reset"}, env_restart_attempts=4,
        env_restart_backoff_s=0.01,
    )  # fmt: skip
    with SingleAgentEnvRunner(config) as runner, pytest.raises(EnvRestartBudgetError, match="env_restart_attempts"):
        runner.sample(num_timesteps=8, random_actions=True)


class EnoughError(Exception):
    """Raised by the caller to end its wait."""


def test_the_caller_of_sample_fragment_can_end_the_wait_for_failed_envs() -> None:
    looks = itertools.count()

    def look() -> None:
        if next(looks) > 5:
            raise EnoughError

    config = EnvRunnerConfig(**STORM, env_config={"fails": "reset"}, env_restart_backoff_s=0.0)
    with SingleAgentEnvRunner(config) as runner:
        with pytest.raises(EnoughError):
            runner.sample_fragment(look, random_actions=True)
        assert len(runner.cut_fragment()) == 0
