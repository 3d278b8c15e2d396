"""`up` over a real Redis and pretended roles: start, goal, signals, failures, the order of the drain, the summary."""

from __future__ import annotations

import os
import re
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import orjson
import pytest

from headrace.deploy.fleet import fleet as fleet_module
from headrace.deploy.fleet.up import up
from headrace.deploy.process import child_commands
from headrace.deploy.process.fleet_errors import FleetError
from headrace.deploy.process.proc_stat import is_alive
from headrace.deploy.process.supervisor import ProcessSpec, Role
from headrace.deploy.report.summary import Summary
from headrace.deploy.run.fleet_file import FleetFile, read_fleet_file
from headrace.deploy.run.redis_server import wait_ready
from headrace.deploy.terminal import log_rotation
from headrace.deploy.terminal.log_rotation import rotated_path
from headrace.schemas.errors import ExitCode, HeadraceError, RedisUnavailableError
from headrace.schemas.messages import shared_weights
from headrace.schemas.settings.config import FleetConfig
from headrace.schemas.settings.config_loading import build_config
from support.waiting import TIMEOUT_S, wait_until

pytestmark = pytest.mark.processes

PRETEND = "support.fleets.pretend_role"
ENDS = """
import sys
from headrace.deploy.process.exit_record import exit_record_path, write_exit_record
write_exit_record(exit_record_path(), {code}, "{sentence}")
sys.exit({code})
"""


def pretend(role: Role, run_dir: Path, slot: int | None = None) -> ProcessSpec:
    name = role.value if slot is None else f"{role.value}-{slot}"

    def command(incarnation: int) -> list[str]:
        return [sys.executable, "-m", PRETEND, role.value, str(run_dir), str(slot), str(incarnation)]

    return ProcessSpec(name, role, command, slot=slot)


@pytest.fixture(autouse=True)
def roles_are_pretended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(child_commands, "broker", lambda config_json, run_dir, *_: pretend(Role.BROKER, run_dir))
    monkeypatch.setattr(
        child_commands, "learner", lambda config, path, run_dir, endpoint, fleet_id: pretend(Role.LEARNER, run_dir)
    )
    monkeypatch.setattr(
        child_commands,
        "worker",
        lambda config, path, run_dir, endpoint, fleet_id, slot: pretend(Role.WORKER, run_dir, slot),
    )


def config_for(run_dir: Path, **fleet: object) -> FleetConfig:
    supervisor = {"restart_attempts": 2}
    broker = {"report_interval_s": 0.05}
    sections = {"supervisor": supervisor, "broker": broker, "dashboard": {"enabled": False}}
    return build_config({"fleet": {"run_dir": str(run_dir), **fleet}, **sections})


@pytest.fixture
def meanwhile() -> Iterator[Callable[[Callable[[], object]], None]]:
    """Runs a function in a thread beside `up`, which needs the main thread; its failure fails the test.

    A signal that finds `up` ended already ends nothing else.
    """
    signals = (signal.SIGINT, signal.SIGTERM)
    before = [signal.signal(number, lambda *_: None) for number in signals]
    errors: list[BaseException] = []
    threads: list[threading.Thread] = []

    def start(action: Callable[[], object]) -> None:
        def run() -> None:
            try:
                action()
            except BaseException as error:
                errors.append(error)

        threads.append(threading.Thread(target=run))
        threads[-1].start()

    yield start
    for thread in threads:
        thread.join(TIMEOUT_S)
    for number, handler in zip(signals, before, strict=True):
        signal.signal(number, handler)
    assert not errors, errors


def page_when(run_dir: Path, ready: Callable[[FleetFile], bool]) -> FleetFile:
    """fleet.json, once it is there and `ready` with it."""

    def find() -> FleetFile | None:
        page = read_fleet_file(path) if (path := run_dir / "fleet.json").exists() else None
        return page if page is not None and ready(page) else None

    page = wait_until(find, "fleet.json that is ready")
    assert page is not None
    return page


def pid_of(page: FleetFile, name: str) -> int:
    return next(process.pid for process in page.processes if process.name == name)


def all_up(page: FleetFile) -> bool:
    return page.state == "running" and len(page.processes) == 5


def stepping(run_dir: Path) -> FleetFile:
    """The page once both workers and the learner have begun."""
    ready = run_dir / "ready"
    return page_when(run_dir, lambda page: all_up(page) and ready.exists() and len(ready.read_text().split()) >= 3)


def test_up_runs_to_its_goal_and_drains_workers_learner_and_broker_in_order(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    summary = up(config_for(tmp_path, until_return=20.0), as_json=True)
    assert summary.failure is None
    assert summary.at_goal is not None
    assert summary.judged.mean_return is not None
    assert summary.judged.mean_return >= 20.0
    assert (tmp_path / "drained").read_text().split() == ["worker", "worker", "learner", "broker"]
    told = set((tmp_path / "obituaries").read_text().splitlines())  # each until it is acknowledged, so perhaps twice
    assert told == {"0/1 shutdown 7", "1/1 shutdown 7"}
    assert summary.balanced is True
    assert summary.ledger is not None
    assert summary.ledger.queued == 0
    page = read_fleet_file(tmp_path / "fleet.json")
    assert (page.state, page.processes) == ("stopped", [])
    printed = capsys.readouterr()
    assert printed.out == ""
    assert "without keys" not in printed.err


@pytest.mark.thorough
def test_a_run_cuts_logs_that_are_too_large(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = tmp_path / "logs" / "worker-0.log"
    log.parent.mkdir()
    log.write_text("printed by an env\n" * 10_000)
    monkeypatch.setattr(log_rotation, "MOST_BYTES", 1 << 16)
    assert up(config_for(tmp_path, until_steps=500), as_json=True).at_goal is not None
    assert log.stat().st_size <= 1 << 16
    assert "printed by an env\n" * 3000 in rotated_path(log).read_text()


@pytest.mark.thorough
def test_the_summary_as_json_is_one_object_on_one_line(tmp_path: Path) -> None:
    line = up(config_for(tmp_path, until_steps=500), as_json=True).as_json()
    assert b"\n" not in line
    found = orjson.loads(line)
    assert found["goal_reached"] is True
    assert found["balanced"] is True
    assert found["steps"] == found["ledger"]["stepped"] >= 500
    assert found["restarts"] == {"redis": 0, "broker": 0, "learner": 0, "worker": 0}
    assert found["rates"]["env_steps_per_s"] > 0
    assert {"fleet_id", "run_dir", "seconds", "episodes", "mean_return", "error", "exit_code"} <= found.keys()


@pytest.mark.thorough
def test_a_second_run_in_a_directory_continues_and_ignores_old_numbers(tmp_path: Path) -> None:
    first = up(config_for(tmp_path, until_return=15.0), as_json=True)
    (tmp_path / "drained").unlink()
    (tmp_path / "ready").unlink()
    second = up(config_for(tmp_path, until_return=15.0, timeout_s=TIMEOUT_S), as_json=True)
    assert second.fleet_id == first.fleet_id
    assert second.at_goal is not None
    assert second.steps > first.steps
    assert read_fleet_file(tmp_path / "fleet.json").incarnations["worker-0"] == 2


@pytest.mark.thorough
def test_a_timeout_drains_and_has_an_exit_code_of_its_own(tmp_path: Path) -> None:
    summary = up(config_for(tmp_path, until_return=1e9, timeout_s=1.5), as_json=True)
    assert summary.failure is not None
    assert summary.failure.exit_code is ExitCode.TIMEOUT
    assert "not reached within 1.5 s" in str(summary.failure)
    assert "raise --timeout-s" in str(summary.failure)
    page = read_fleet_file(tmp_path / "fleet.json")
    assert (page.state, page.processes) == ("stopped", [])


def test_the_first_signal_drains_and_is_no_failure(
    tmp_path: Path, meanwhile: Callable[[Callable[[], object]], None]
) -> None:
    def interrupt() -> None:
        stepping(tmp_path)
        os.kill(os.getpid(), signal.SIGINT)

    meanwhile(interrupt)
    summary = up(config_for(tmp_path), as_json=True)
    assert (summary.failure, summary.at_goal, summary.balanced) == (None, None, True)
    assert (tmp_path / "drained").read_text().split() == ["worker", "worker", "learner", "broker"]


def test_the_second_signal_stops_the_fleet_without_a_drain(
    tmp_path: Path, meanwhile: Callable[[Callable[[], object]], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker that is stopped cannot drain: without the second signal it would be waited for."""
    pids: list[int] = []
    monkeypatch.setattr(shared_weights, "MEMORY", tmp_path)
    weights = tmp_path / f"headrace-{os.geteuid()}" / "of a broker that was killed"
    weights.mkdir(mode=0o700, parents=True)
    weights.parent.chmod(0o700)

    def interrupt() -> None:
        page = stepping(tmp_path)
        pids.extend(process.pid for process in page.processes)
        os.kill(pid_of(page, "worker-0"), signal.SIGSTOP)
        os.kill(os.getpid(), signal.SIGTERM)
        page_when(tmp_path, lambda page: page.state == "draining")
        os.kill(os.getpid(), signal.SIGTERM)

    meanwhile(interrupt)
    summary = up(config_for(tmp_path), as_json=True)
    assert "second signal; what was still queued is not delivered" in str(summary.failure)
    assert len(pids) == 5
    assert not [pid for pid in pids if is_alive(pid)]
    assert not weights.exists()


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["worker-0", "broker", "learner", "redis"])
def test_a_killed_process_is_restarted_and_the_run_ends_without_failure(
    tmp_path: Path, name: str, meanwhile: Callable[[Callable[[], object]], None]
) -> None:
    def kill() -> None:
        os.kill(pid_of(stepping(tmp_path), name), signal.SIGKILL)
        page = page_when(tmp_path, lambda page: all_up(page) and any(p.restarts for p in page.processes))
        assert [p.name for p in page.processes if p.restarts] == [name]
        os.kill(os.getpid(), signal.SIGTERM)

    meanwhile(kill)
    summary = up(config_for(tmp_path), as_json=True)
    assert summary.failure is None
    assert sum(summary.restarts.values()) == 1
    assert summary.restarts[name.partition("-")[0]] == 1
    if name == "worker-0":
        assert "0/1 worker_killed 7" in (tmp_path / "obituaries").read_text().splitlines()


def failing(summary: Summary) -> HeadraceError:
    assert summary.failure is not None
    return summary.failure


def test_an_error_of_a_role_ends_the_fleet_with_its_code_and_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = ENDS.format(code=4, sentence="environment Nope cannot be found")
    spec = ProcessSpec("worker-0", Role.WORKER, lambda _: [sys.executable, "-c", script], slot=0)
    monkeypatch.setattr(child_commands, "worker", lambda *_: spec)
    error = failing(up(config_for(tmp_path, workers=1), as_json=True))
    assert (str(error), error.exit_code) == ("worker-0: environment Nope cannot be found", ExitCode.ENV)
    assert read_fleet_file(tmp_path / "fleet.json").processes == []


def test_a_broker_whose_port_is_taken_ends_the_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = ENDS.format(code=6, sentence="tcp://127.0.0.1:1 is already in use")
    spec = ProcessSpec("broker", Role.BROKER, lambda _: [sys.executable, "-c", script])
    monkeypatch.setattr(child_commands, "broker", lambda *_: spec)
    error = failing(up(config_for(tmp_path), as_json=True))
    assert (str(error), error.exit_code) == ("broker: tcp://127.0.0.1:1 is already in use", ExitCode.PORT_IN_USE)


def test_a_crash_loop_ends_the_fleet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = ProcessSpec("learner", Role.LEARNER, lambda _: [sys.executable, "-c", "raise RuntimeError('diverged')"])
    monkeypatch.setattr(child_commands, "learner", lambda *_: spec)
    error = failing(up(config_for(tmp_path), as_json=True))
    assert isinstance(error, FleetError)
    assert error.exit_code is ExitCode.CRASH_LOOP
    assert "RuntimeError: diverged" in str(error)


def test_an_own_redis_that_cannot_start_is_an_error_with_its_reason(tmp_path: Path) -> None:
    files = tmp_path / "redis" / "appendonlydir"
    files.mkdir(parents=True)
    (files / "appendonly.aof.manifest").write_bytes(b"garbage")
    error = failing(up(config_for(tmp_path), as_json=True))
    assert error.exit_code is ExitCode.REDIS_UNAVAILABLE
    for part in ("own Redis server does not start", "AOF", "redis.log", str(tmp_path / "redis"), "move it away"):
        assert part in str(error)


def test_an_own_redis_that_nobody_reaches_names_the_loopback_device(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unreachable(url: str, deadline_s: float = 0.0) -> None:
        wait_ready("redis://127.0.0.1:1/0", deadline_s)

    monkeypatch.setattr(fleet_module, "answers", lambda _: False)
    monkeypatch.setattr(fleet_module, "wait_ready", unreachable)
    monkeypatch.setattr(fleet_module, "REDIS_DEADLINE_S", 0.2)
    error = failing(up(config_for(tmp_path), as_json=True))
    assert error.exit_code is ExitCode.REDIS_UNAVAILABLE
    assert re.search(r"own server has not answered for 0.2 s: it is not ready \(Error.*ip link set lo up", str(error))
    assert "--redis-url" not in str(error)


def test_a_redis_that_does_not_answer_is_one_typed_error(tmp_path: Path, free_port: int) -> None:
    config = config_for(tmp_path)
    redis = config.redis.model_copy(update={"url": f"redis://127.0.0.1:{free_port}/0"})
    error = failing(up(config.model_copy(update={"redis": redis}), as_json=True))
    assert isinstance(error, RedisUnavailableError)
    assert "--redis-url" in str(error)
