"""A worker without env hosts, before the first or after the last, leaves on a stop request with closed books."""

from __future__ import annotations

import signal
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from headrace.learner_stub import EpisodeStream
from headrace.schemas.accounts.ledger import add_up
from support.pipeline.delivery import BrokerThread, Process, Witness, script_process
from support.pipeline.worker_threads import AT_RANDOM, SAMPLING, WorkerThread, closed_row, drain, in_run
from support.waiting import wait_until

HOST = "import sys; from headrace.deploy.command.cli import main; sys.argv[0] = 'headrace'; main()"


def placed(run_dir: Path, **settings: Any) -> tuple[dict[str, Any], str]:
    """The sections of a worker in `run_dir`, and its address for env hosts."""
    fleet, address = in_run(run_dir, "envs")
    return {**AT_RANDOM, "fleet": fleet, "sampling": {**SAMPLING, "env_placement": "remote", **settings}}, address


def env_host(address: str, log: Path) -> Process:
    return script_process(HOST, "env-host", "--connect", address, "--env", "CartPole-v1", "--num-envs", "2", log=log)


def test_a_worker_leaves_on_a_stop_request_before_its_first_env_host_connects(
    broker: BrokerThread,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO")
    sections, address = placed(tmp_path)
    with WorkerThread(monkeypatch, broker.endpoints.worker, tmp_path, sections) as worker:
        call = f"headrace env-host --connect {address} --env CartPole-v1"
        wait_until(lambda: call in caplog.text, "a word on whom it waits for")
        worker.stopping.set()
        wait_until(lambda: not worker.is_alive, "its end")
    assert worker.error is None
    assert closed_row(broker).totals.stepped == 0


@pytest.mark.one_in(2)
@pytest.mark.chaos
@pytest.mark.parametrize(
    ("lease_s", "ready"), [(1.0, {}), (60.0, {"remote_env_batch_wait_ms": 0})], ids=["found lost", "silent"]
)
def test_a_worker_leaves_on_a_stop_request_after_its_last_env_host_is_killed(
    lease_s: float,
    ready: dict[str, Any],
    broker: BrokerThread,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    witness = Witness()
    sections, address = placed(tmp_path, **ready)
    sections["broker"] = {"lease_s": lease_s}
    with ExitStack() as stack:
        stream = stack.enter_context(EpisodeStream(broker.endpoints.learner))
        host = stack.enter_context(env_host(address, tmp_path / "host.log"))
        worker = stack.enter_context(WorkerThread(monkeypatch, broker.endpoints.worker, tmp_path, sections))
        wait_until(lambda: stream.next(0.1), "a first batch")
        host.signal(signal.SIGKILL)
        host.wait()
        if lease_s < 2:
            wait_until(lambda: stream.next(0.1) is None, "the last batch")
        worker.stopping.set()
        wait_until(lambda: drain(stream, witness.see_any) or not worker.is_alive, "its end")
        row = closed_row(broker, take=lambda: drain(stream, witness.see_any))
    assert worker.error is None
    assert row.totals.open == 0
    assert set(row.totals.discarded) <= ({"env_host_lost"} if lease_s < 2 else set()), "what was done is delivered"
    assert row.totals.stepped == row.settled.committed[0] + sum(row.totals.discarded.values())
    assert add_up(broker.rows()).balance() == 0
