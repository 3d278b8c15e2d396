"""`headrace why` of a real fleet through several stalls: each is found, and its finding goes when the stall is over."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from contextlib import ExitStack, closing, suppress
from pathlib import Path

import orjson
import pytest

from headrace.deploy.monitoring.facts import FactsReader
from headrace.deploy.monitoring.findings import find, verdict
from headrace.deploy.report.audit import find_books
from headrace.schemas.errors import ExitCode
from support.fleets.running_fleet import RunningFleet
from support.waiting import TIMEOUT_S

FLEET = (
    *("--env", "CartPole-v1", "--workers", "2", "--num-envs", "2"),
    *("--set", "broker.lease_s=200"),
)

SLOW_START = {"redis_away", "worker_loading", "worker_building", "learner_loading", "no_weights"}
"""Kinds that a machine which is slow beyond the usual may show."""


def why(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "headrace.deploy", "why", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=TIMEOUT_S)


@pytest.mark.thorough
@pytest.mark.slow
def test_why_explains_each_stall_from_redis_or_the_run_directory(tmp_path: Path) -> None:
    run = tmp_path / "run"
    with RunningFleet(run, *FLEET) as fleet:
        fleet.wait_until((run / "fleet.json").exists, "a run")
        with closing(FactsReader(run)) as here, ExitStack() as stack:
            at_start: set[str] = set()

            def found(reader: FactsReader = here) -> set[tuple[str, str]]:
                return {(one.kind, one.whom) for one in find(reader.read())}

            def line() -> str:
                facts = here.read()
                return verdict(facts, find(facts))

            def learns() -> bool:
                at_start.update(kind for kind, _ in found())
                return line() == "Learning. Nothing lost."

            fleet.wait_until(learns, "a fleet that learns")
            assert at_start <= SLOW_START
            fleet.wait_until(lambda: not found(), "a healthy fleet")
            url, fleet_id = find_books(run)
            elsewhere = stack.enter_context(closing(FactsReader(redis_url=url, fleet_id=fleet_id)))

            fleet.send(signal.SIGSTOP, "learner")
            for reader in (here, elsewhere):
                fleet.wait_until(lambda it=reader: found(it) == {("process_stopped", "learner")}, "a stopped learner")  # type: ignore[misc]
            fleet.send(signal.SIGCONT, "learner")
            fleet.wait_until(lambda: not found(), "the learner to go on")

            pid = fleet.send(signal.SIGSTOP, "worker", 0)
            fleet.wait_until(lambda: line() == "Learning. 1 of 2 workers late (worker-0). Nothing lost.", "the verdict")
            stopped = why("--run-dir", str(run), "--json")
            assert stopped.returncode == ExitCode.FINDINGS, stopped.stderr
            (finding,) = orjson.loads(stopped.stdout)["findings"]
            assert (finding["kind"], finding["command"]) == ("process_stopped", f"kill -CONT {pid}")
            assert (finding["whom"], finding["limit"]) == ("worker-0", "broker.lease_s = 200")
            fleet.send(signal.SIGCONT, "worker", 0)
            fleet.wait_until(lambda: not found(), "the worker to go on")

            redis = fleet.pid("redis")
            assert redis is not None
            os.kill(redis, signal.SIGSTOP)
            fleet.wait_until(lambda: "redis" in {whom.lower() for _, whom in found()}, "Redis to be missed")
            with suppress(ProcessLookupError):  # its supervisor may have replaced it on a slow machine
                os.kill(redis, signal.SIGCONT)
            fleet.wait_until(lambda: not found() and not found(elsewhere), "Redis to go on")

            for incarnation in (1, 2, 3):
                fleet.wait_until(lambda it=incarnation: fleet.pid("worker", 1, it), f"life {incarnation}")  # type: ignore[misc]
                fleet.send(signal.SIGKILL, "worker", 1)
            fleet.wait_until(lambda: ("crash_loop", "worker-1") in found(elsewhere), "a crash loop")
            fleet.kill()
            fleet_of_the_dead = why("--run-dir", str(run))
            assert fleet_of_the_dead.returncode == ExitCode.FINDINGS
            assert f"headrace up --resume {run}" in fleet_of_the_dead.stdout


def test_why_needs_a_fleet_id_with_a_redis_url() -> None:
    assert why("--redis-url", "redis://127.0.0.1:1/0").returncode == ExitCode.CONFIG
    nothing = why("--redis-url", "redis://127.0.0.1:1/0", "--fleet-id", "a")
    assert nothing.returncode == ExitCode.FINDINGS
    assert "waiting for Redis to answer (" in nothing.stdout
