"""A worker whose envs never give a fragment keeps trying. On a stop request it leaves soon, with closed books."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest

from headrace.schemas.accounts.recorder import read_recorder
from headrace.schemas.errors import EnvRestartBudgetError
from headrace.workers import EnvRunnerConfig, SingleAgentEnvRunner
from headrace.workers.envs import restarts
from support.pipeline.delivery import BrokerThread
from support.pipeline.worker_threads import AT_RANDOM, WorkerThread, closed_row
from support.waiting import wait_until

ENDLESS = 1_000_000
STORM: dict[str, Any] = {
    "env": "support.envs.stormy:Stormy",
    "num_envs": 2,
    "env_restart_attempts": ENDLESS,
}
WHOLE = {"batch_mode": "complete_episodes"}


@pytest.mark.long
@pytest.mark.parametrize(
    ("fails", "backoff_s", "settings"),
    [
        ("construction", 0.0, {}),
        ("reset", 0.0, {}),
        ("reset", 5.0, {}),
        ("reset", 0.0, {"env_placement": "process"}),
        ("step", 0.0, WHOLE),
        (None, 0.0, WHOLE),
    ],
    ids=["never built again", "never reset", "long waits", "in processes", "never stepped", "episodes without an end"],
)
def test_a_worker_that_never_gets_a_fragment_leaves_on_a_stop_request(
    fails: str | None,
    backoff_s: float,
    settings: dict[str, Any],
    broker: BrokerThread,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(restarts, "BACKOFF_S", backoff_s)
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
        env="support.envs.stormy:Stormy", num_envs=2, env_config={"fails": "reset"}, env_restart_attempts=4
    )
    with SingleAgentEnvRunner(config) as runner, pytest.raises(EnvRestartBudgetError, match="env_restart_attempts"):
        runner.sample(num_timesteps=8, random_actions=True)


class EnoughError(Exception):
    """Raised by the caller to end its wait."""


def test_the_caller_of_sample_fragment_can_end_the_wait_for_failed_envs() -> None:
    looks = itertools.count()

    def look() -> None:
        if next(looks) > 5:
            raise EnoughError

    config = EnvRunnerConfig(**STORM, env_config={"fails": "reset"})
    with SingleAgentEnvRunner(config) as runner:
        with pytest.raises(EnoughError):
            runner.sample_fragment(look, random_actions=True)
        assert len(runner.cut_fragment()) == 0
