"""While a fleet trains, its processes are killed and stopped by real signals. Each test ends with the same three looks:
the fleet went on to its goal, its books balance, and what happened is named."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import orjson
import pytest

from headrace.broker.redis.client import connect
from headrace.deploy.fleet import fleet as fleet_module
from headrace.deploy.fleet import watchdog
from headrace.deploy.fleet.fleet import Fleet
from headrace.deploy.fleet.snapshot_poller import SnapshotPoller
from headrace.deploy.monitoring.process_reporter import FleetLease
from headrace.deploy.process.stop_signals import StopSignals
from headrace.deploy.process.supervisor import ProcessSpec, Role, ServiceState
from headrace.deploy.run.fleet_file import read_fleet_file
from headrace.deploy.run.redis_server import check_url
from headrace.deploy.run.run_dir import RunDir
from headrace.learner_stub import EpisodeStream
from headrace.schemas.accounts.redis_keys import INCARNATIONS, key_name
from headrace.schemas.errors import ConfigError, ExitCode, HeadraceError, RedisUnavailableError
from headrace.schemas.settings.config_loading import build_config
from support.fleets.running_fleet import RunningFleet, redis_in
from support.waiting import PATIENCE, TIMEOUT_S

pytestmark = pytest.mark.chaos

SMALL = ("--workers", "2", "--num-envs", "8")
ALONE = ("--workers", "1", "--num-envs", "8")


def assert_goal_and_books(fleet: RunningFleet, result: dict[str, Any]) -> None:
    """Progress to the goal, and an audit that finds nothing."""
    assert result["goal_reached"] is True, result["stderr"]
    assert_end_and_books(fleet, result)


def assert_end_and_books(fleet: RunningFleet, result: dict[str, Any]) -> None:
    """A whole end, and an audit that finds nothing."""
    assert (result["returncode"], result["balanced"]) == (0, True), result["stderr"]
    audit = fleet.audit()
    assert audit.returncode == 0, audit.stdout + audit.stderr


@pytest.mark.parametrize("role", ["worker", "broker", "learner", "redis"])
def test_a_fleet_survives_a_kill_of_any_role_and_counts_the_restart(tmp_path: Path, role: str) -> None:
    learns = role == "learner"
    with RunningFleet(tmp_path, *SMALL, *(("--until-return", "150") if learns else ())) as fleet:
        fleet.wait_for_steps(3_000)
        fleet.send(signal.SIGKILL, role)
        if not learns:
            fleet.wait_for_steps(3_000)
            fleet.terminate()
        result = fleet.finish()
    assert_end_and_books(fleet, result)
    assert result["goal_reached"] is learns
    assert result["restarts"] == {"worker": 0, "broker": 0, "learner": 0, "redis": 0} | {role: 1}
    if role != "worker":
        assert result["ledger"]["dropped"] == {}, "only a worker's death may lose anything"


@pytest.mark.one_in(3)
@pytest.mark.parametrize("role", ["redis", "broker", "learner"])
def test_a_role_that_is_stopped_is_replaced(tmp_path: Path, role: str) -> None:
    arguments = ("--until-steps", "40000", "--set", "broker.lease_s=1.5")
    with RunningFleet(tmp_path, *SMALL, *arguments) as fleet:
        fleet.wait_until(lambda: fleet.steps() > 3_000, "training has begun")
        stopped = fleet.send(signal.SIGSTOP, role)
        fleet.wait_until(lambda: fleet.pid(role) not in (None, stopped), f"a new {role}")
        result = fleet.finish()
    assert_goal_and_books(fleet, result)
    assert result["restarts"] == {"worker": 0, "broker": 0, "learner": 0, "redis": 0} | {role: 1}
    assert f"{role} (pid {stopped}) has been s" in result["stderr"]


HANGS = """
import os, signal, sys, time

def hang(*_):
    while True: time.sleep(0.01)

signal.signal(signal.SIGUSR1, hang)
mark = os.environ.get("HANGS_AT_ITS_START", "")
if mark and "broker" in sys.orig_argv and not os.path.exists(mark):
    open(mark, "w").close()
    hang()
"""
"""Each Python process executes this at its start. Its main thread hangs at SIGUSR1; its other threads go on."""


@pytest.fixture
def processes_can_hang(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "site"
    folder.mkdir()
    (folder / "sitecustomize.py").write_text(HANGS)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")]))


@pytest.mark.thorough
@pytest.mark.usefixtures("processes_can_hang")
@pytest.mark.parametrize("role", ["learner", "broker"])
def test_a_role_that_hangs_is_replaced(tmp_path: Path, role: str) -> None:
    settings = {
        "broker.lease_s": 2 * PATIENCE,
        "supervisor.hung_after_s": 5 * PATIENCE,
    }
    arguments = ("--until-steps", "20000", *(part for key in settings for part in ("--set", f"{key}={settings[key]}")))
    with RunningFleet(tmp_path / "run", *SMALL, *arguments) as fleet:
        fleet.wait_until(lambda: fleet.steps() > 3_000, "training has begun")
        hung = fleet.send(signal.SIGUSR1, role)
        fleet.wait_until(lambda: fleet.pid(role) not in (None, hung), f"a new {role}")
        result = fleet.finish()
    assert_goal_and_books(fleet, result)
    assert result["restarts"] == {"worker": 0, "broker": 0, "learner": 0, "redis": 0} | {role: 1}
    assert f"{role} (pid {hung}) has been silent for" in result["stderr"]


@pytest.mark.usefixtures("processes_can_hang")
def test_a_broker_that_hangs_before_its_first_sign_of_life_is_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HANGS_AT_ITS_START", str(tmp_path / "hung"))
    monkeypatch.setattr(watchdog, "FIRST_SIGN_S", 5 * PATIENCE)
    monkeypatch.setattr(fleet_module, "BROKER_DEADLINE_S", TIMEOUT_S)
    with fleet_of_a_broker(tmp_path) as (fleet, _):
        fleet.start()
        assert (tmp_path / "hung").exists()
        assert fleet.supervisor.restarts()["broker"] >= 1
        turn(fleet, lambda: fleet.facts().snapshot.gauges, "the next broker reports")


@pytest.mark.thorough
@pytest.mark.parametrize("redis_answers", [True, False])
def test_the_fleets_own_learner_is_back_after_another_came_and_left(tmp_path: Path, redis_answers: bool) -> None:
    arguments = ("--until-steps", "40000", "--set", "broker.lease_s=1.5")
    with (
        redis_in(tmp_path / "elsewhere") as (url, server),
        RunningFleet(tmp_path / "run", *SMALL, *arguments, "--redis-url", url) as fleet,
    ):
        fleet.wait_until(lambda: fleet.steps() > 3_000, "training has begun")
        with EpisodeStream(fleet.endpoint("learner")) as other:
            fleet.wait_until(lambda: fleet.pid("learner") is None, "the fleet's own learner has ended")
            assert other.next(timeout_s=TIMEOUT_S) is not None
            if not redis_answers:
                server.send_signal(signal.SIGSTOP)
        fleet.wait_until(lambda: fleet.pid("learner"), "the fleet's own learner is back")
        server.send_signal(signal.SIGCONT)
        result = fleet.finish()
        assert_goal_and_books(fleet, result)
    assert result["restarts"]["learner"] == 1
    assert "learner starts again: no learner was connected for" in result["stderr"]


FENCED_ONCE = f"""
import sys, time
from headrace.deploy.process.exit_record import exit_record_path, write_exit_record
if int(sys.argv[1]) > 1:
    time.sleep(600)
write_exit_record(exit_record_path(), {ExitCode.FENCED:d}, "fenced")
sys.exit({ExitCode.FENCED:d})
"""


@contextmanager
def fleet_of_a_broker(folder: Path) -> Iterator[tuple[Fleet, subprocess.Popen[bytes]]]:
    """A fleet in this process that has a broker alone, and the process of its Redis. It is not started yet."""
    with redis_in(folder / "elsewhere") as (url, server), RunDir(folder / "run") as run_dir, StopSignals() as signals:
        config = build_config(
            {
                "fleet": {"workers": 0},
                "learner": {"enabled": False},
                "dashboard": {"enabled": False},
                "redis": {"url": url},
                "broker": {"lease_s": PATIENCE},
            }
        )
        with Fleet(config, run_dir, signals, None) as fleet:
            yield fleet, server
            server.send_signal(signal.SIGCONT)


def test_while_redis_is_away_a_fenced_learner_is_back_once_the_other_has_left(tmp_path: Path) -> None:
    with fleet_of_a_broker(tmp_path) as (fleet, server):
        fleet.start()
        with EpisodeStream(fleet.endpoints["learner"]):
            turn(fleet, lambda: fleet.facts().snapshot.lease.get("connected") == 1, "the other learner in Redis")
            server.send_signal(signal.SIGSTOP)
            command = [sys.executable, "-c", FENCED_ONCE]
            own = fleet.supervisor.start(ProcessSpec("learner", Role.LEARNER, lambda life: [*command, str(life)]))
            turn(fleet, lambda: own.state is ServiceState.FENCED, "the fence")
            assert not fleet.loop.turn_until(lambda: own.restarts > 0, 2 * PATIENCE), "the other learner is connected"
        turn(fleet, lambda: own.restarts == 1 and own.state is ServiceState.RUNNING, "the fleet's own learner")


@pytest.mark.parametrize("name", ["a-long-name-" * 10, pytest.param("run", marks=pytest.mark.thorough)])
def test_a_removed_folder_of_sockets_is_made_again_before_a_worker_needs_it(tmp_path: Path, name: str) -> None:
    with RunningFleet(tmp_path / name, *SMALL) as fleet:
        fleet.wait_for_steps(2_000)
        before = fleet.endpoint("worker")
        shutil.rmtree(Path(before.removeprefix("ipc://")).parent)
        fleet.wait_until(lambda: "has lost its socket" in fleet.said(), "the supervisor notices")
        fleet.send(signal.SIGKILL, "worker", slot=0)
        fleet.wait_until(lambda: fleet.pid("worker", 0, incarnation=2), "the worker's next life")
        fleet.wait_until(lambda: fleet.snapshot().workers.get(0, {}).get("incarnation") == 2, "it joins")  # type: ignore[union-attr]
        fleet.wait_for_steps(2_000)
        assert fleet.endpoint("worker") == before
        fleet.terminate()
        result = fleet.finish()
    assert_end_and_books(fleet, result)
    assert result["restarts"] == {"worker": 1, "broker": 1, "learner": 0, "redis": 0}
    assert set(result["ledger"]["dropped"]) <= {"worker_killed"}


@pytest.mark.parametrize("how", ["refuses", pytest.param("gone", marks=pytest.mark.thorough)])
def test_a_fleet_reaches_its_goal_and_balances_while_redis_refuses_or_is_gone(tmp_path: Path, how: str) -> None:
    run = tmp_path / "run"

    def tell(*command: str) -> tuple[int, str]:
        done = subprocess.run(
            [sys.executable, "-m", "headrace.deploy", *command, "--run-dir", str(run)],
            check=False,
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
        )
        return done.returncode, done.stdout + done.stderr

    with redis_in(tmp_path / "elsewhere") as (url, server):
        goal = ("--until-steps", "30000", "--set", f"redis.url={url}", "--set", "logging.interval_s=0.2")
        with RunningFleet(run, *ALONE, *goal) as fleet:
            fleet.wait_for_steps(2_000)
            before = fleet.steps_of_envs()
            if how == "gone":
                server.kill()
            else:
                with connect(url) as client:
                    client.replicaof("127.0.0.1", "1")  # a master that is away
            result = fleet.finish()
        assert result["goal_reached"] is True, result["stderr"]
        assert (result["returncode"], result["balanced"], result["ledger"]["queued"]) == (0, True, 0)
        assert result["env_steps"] >= 30_000 > before
        rows = [orjson.loads(line) for line in (run / "metrics.jsonl").read_bytes().splitlines()]
        assert rows[-1]["env_steps"] == result["env_steps"]
        assert [row["learner_row"] for row in rows if "learner_row" in row], "the learner's rows came by the broker"
        code, said = tell("audit", "--strict")
        assert code == 0, said


@pytest.mark.parametrize("comes_back", [True, False])
def test_a_fleet_starts_no_broker_before_redis_has_told_what_it_knows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, comes_back: bool
) -> None:
    began: list[bool] = []
    """Whether the fleet had a broker, at each read of Redis that failed."""
    with fleet_of_a_broker(tmp_path) as (fleet, server):

        def check_then_stop(url: str, fleet_id: str) -> None:
            check_url(url, fleet_id)
            with connect(url) as client:
                client.hset(key_name(fleet_id, INCARNATIONS), mapping={"0": "7"})
            server.send_signal(signal.SIGSTOP)

        def read_and_note(poller: SnapshotPoller) -> bool:
            answered = read(poller)
            if not answered:
                began.append("broker" in fleet.supervisor.services)
                if comes_back and len(began) == 2:
                    server.send_signal(signal.SIGCONT)
            return answered

        read = SnapshotPoller.read
        monkeypatch.setattr(SnapshotPoller, "read", read_and_note)
        monkeypatch.setattr(fleet_module, "check_url", check_then_stop)
        if comes_back:
            fleet.start()
            assert fleet.facts().snapshot.incarnations == {0: 7}
            assert "broker" in fleet.supervisor.services
        else:
            monkeypatch.setattr(fleet_module, "BOOKS_DEADLINE_S", 0.5)
            with pytest.raises(RedisUnavailableError, match=r"Redis at redis://:?\*\*\*@"):
                fleet.start()
            assert not fleet.supervisor.services
    assert not any(began)


def test_a_start_that_waits_for_the_lease_of_another_fleet_notes_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[str] = []
    with fleet_of_a_broker(tmp_path) as (fleet, _):
        assert FleetLease(fleet.config.redis.url, fleet.fleet_id, "another host").take()

        def wait(done: Callable[[], bool], deadline_s: float, what: str) -> None:
            seen.append(read_fleet_file(fleet.run_dir.fleet_json).waits_for)
            fleet.loop.wait(done, 0.2, lambda: what)

        monkeypatch.setattr(fleet, "wait", wait)
        with pytest.raises(ConfigError, match="another host"):
            fleet.start()
        assert read_fleet_file(fleet.run_dir.fleet_json).waits_for == ""
    assert [whom.partition(" (")[0] for whom in seen] == [
        "another `headrace up` of this fleet to give up its lease in Redis"
    ]


def turn(fleet: Fleet, done: Callable[[], bool], what: str) -> None:
    assert fleet.loop.turn_until(done, TIMEOUT_S), what


@pytest.mark.thorough
def test_a_fleet_survives_kills_of_every_role_one_after_another(tmp_path: Path) -> None:
    with RunningFleet(tmp_path, *SMALL, "--set", "learner.epochs=1") as fleet:
        for role in ("broker", "worker", "learner", "redis", "broker"):
            fleet.wait_for_steps(5_000)
            fleet.send(signal.SIGKILL, role)
        fleet.wait_for_steps(5_000)
        fleet.terminate()
        result = fleet.finish()
    assert_end_and_books(fleet, result)
    assert result["restarts"] == {"worker": 1, "broker": 2, "learner": 1, "redis": 1}, result["stderr"]
    assert set(result["ledger"]["dropped"]) <= {"worker_killed", "broker_lost"}


class Consumer(threading.Thread):
    """A learner that takes every batch at once, so that workers are sampling nearly all the time."""

    def __init__(self, endpoint: str) -> None:
        super().__init__(daemon=True)
        self.endpoint = endpoint
        self.stop = threading.Event()

    def run(self) -> None:
        while not self.stop.is_set():
            # It comes back after a lease that it lost because this process stood still.
            with suppress(HeadraceError), EpisodeStream(self.endpoint) as stream:
                while not self.stop.is_set():
                    stream.next(timeout_s=0.1)


def test_a_worker_stopped_beyond_its_lease_is_replaced_and_its_late_frames_are_fenced(tmp_path: Path) -> None:
    settings = {
        "learner.enabled": "false",
        "worker.random_actions_before_weights": "true",
        "broker.lease_s": "10",  # the replacement has three leases to deliver
        "sampling.rollout_fragment_length": "512",
    }
    sets = [part for key, value in settings.items() for part in ("--set", f"{key}={value}")]
    with RunningFleet(tmp_path, *SMALL, *sets) as fleet:
        fleet.wait_until(lambda: (tmp_path / "broker.json").exists(), "the broker serves")
        consumer = Consumer(fleet.endpoint("learner"))
        consumer.start()
        fleet.wait_until(lambda: _accepted(fleet, 0, 1) and _accepted(fleet, 1, 1), "both workers deliver")
        zombie = fleet.send(signal.SIGSTOP, "worker", slot=0)
        fleet.wait_until(lambda: _accepted(fleet, 0, 2), "the replacement delivers")
        os.kill(zombie, signal.SIGCONT)
        fleet.wait_until(lambda: _closed(fleet, 0, 1), "the zombie's books are closed")
        before = fleet.steps()
        fleet.wait_until(lambda: fleet.steps() > before, "the fleet goes on")
        fleet.terminate()
        result = fleet.finish()
        consumer.stop.set()
        consumer.join(10)
    assert result["balanced"] is True
    assert fleet.audit().returncode == 0
    lost = result["ledger"]["dropped"].get("fenced", [0, 0])[0] + result["ledger"]["discarded"].get("fenced", 0)
    assert lost > 0, "a worker stopped while it sampled has late steps, and they must be counted as fenced"
    assert result["restarts"]["worker"] == 1


def _row(fleet: RunningFleet, slot: int, incarnation: int) -> Any:
    snapshot = fleet.snapshot()
    return snapshot.rows.get((slot, incarnation)) if snapshot else None


def _accepted(fleet: RunningFleet, slot: int, incarnation: int) -> bool:
    row = _row(fleet, slot, incarnation)
    return row is not None and row.accepted[0] > 0


def _closed(fleet: RunningFleet, slot: int, incarnation: int) -> bool:
    row = _row(fleet, slot, incarnation)
    return row is not None and row.closed


@pytest.mark.thorough
def test_three_of_eight_envs_that_fail_all_the_time_cost_only_their_own_steps(tmp_path: Path) -> None:
    with RunningFleet(
        tmp_path, *ALONE, "--env", "support.envs.fleet:three_of_eight", "--until-steps", "20000"
    ) as fleet:
        result = fleet.finish()
    assert_goal_and_books(fleet, result)
    assert set(result["ledger"]["discarded"]) == {"env_exception"}
    assert result["restarts"]["worker"] == 0


def test_an_env_that_always_fails_ends_in_a_typed_error(tmp_path: Path) -> None:
    with RunningFleet(
        tmp_path, *ALONE, "--env", "support.envs.fleet:always_failing", "--until-steps", "40000", "--no-check-env"
    ) as fleet:
        result = fleet.finish()
    assert result["returncode"] == 13, result["stderr"]
    assert "the simulator diverged" in result["stderr"]
