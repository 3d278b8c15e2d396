"""`headrace up` with the real roles: a short run that balances, and bad input that a role notices."""

from __future__ import annotations

import re
import signal
import socket
import subprocess
import sys
from pathlib import Path

import orjson
import pytest

from headrace.deploy.annexes.watch.exporter.metrics_text import metrics_text
from headrace.deploy.monitoring.facts import FactsReader
from headrace.deploy.process.proc_stat import is_alive
from headrace.deploy.run.fleet_file import FleetFile, read_fleet_file
from headrace.schemas.errors import ExitCode
from support.fleets import slow_training
from support.fleets.running_fleet import RunningFleet
from support.ports import by_tcp
from support.waiting import TIMEOUT_S, wait_until

pytestmark = pytest.mark.slow

FRAGMENT = 8 * 64
"""Env steps of one fragment of one worker, by default."""
SMALL = ("--num-envs", "2", "--seed", "0", "--timeout-s", "180", "--json")


def up_command(run_dir: Path, *arguments: str) -> list[str]:
    return [sys.executable, "-m", "headrace.deploy", "up", "--run-dir", str(run_dir), *SMALL, *arguments]


def up(run_dir: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = up_command(run_dir, *arguments)
    return subprocess.run(command, cwd=run_dir, capture_output=True, text=True, check=False, timeout=TIMEOUT_S)


def exported(run_dir: Path) -> dict[str, str]:
    """Return the metrics `up`, `broker_up` and `ended` of an exporter beside the run directory, as text by name."""
    with FactsReader(run_dir) as reader:
        text, _ = metrics_text({"fleet": reader.read()})
    return dict(re.findall(r"^headrace_(up|broker_up|ended)\{.*\} (\S+)$", text.decode(), re.MULTILINE))


def page_when(run_dir: Path, role: str) -> FleetFile:
    """fleet.json once a process of `role` stands in it."""

    def find() -> FleetFile | None:
        page = read_fleet_file(path) if (path := run_dir / "fleet.json").exists() else None
        return page if page is not None and any(process.role == role for process in page.processes) else None

    page = wait_until(find, f"the start of a {role}")
    assert page is not None
    return page


def test_a_short_run_ends_at_its_goal_with_books_that_balance(tmp_path: Path) -> None:
    result = up(tmp_path, "--workers", "2", "--until-steps", "5000")
    assert result.returncode == 0, result.stderr
    found = orjson.loads(result.stdout)
    assert found["goal_reached"] is True
    assert found["balanced"] is True
    assert found["steps"] >= 5000
    assert found["ledger"]["committed"][0] > 0
    assert read_fleet_file(tmp_path / "fleet.json").processes == []
    assert not list((tmp_path / "recorders").iterdir()), "an obituary was not acknowledged"
    audit = [sys.executable, "-m", "headrace.deploy", "audit", "--strict", "--json", "--run-dir", str(tmp_path)]
    audited = subprocess.run(audit, capture_output=True, text=True, check=False, timeout=TIMEOUT_S)
    assert audited.returncode == 0, audited.stderr
    assert orjson.loads(audited.stdout)["balanced"] is True
    assert exported(tmp_path) == {"up": "0.0", "broker_up": "0.0", "ended": "1.0"}, "its own Redis has ended too"


@pytest.mark.one_in(2)
@pytest.mark.parametrize("goal", [("--until-steps", "3000"), ("--until-return", "12")])
def test_a_goal_is_noticed_when_it_is_reached_not_with_the_next_report(tmp_path: Path, goal: tuple[str, str]) -> None:
    result = up(tmp_path, *goal, "--set", "broker.report_interval_s=10000")
    assert result.returncode == 0, result.stderr
    found = orjson.loads(result.stdout)
    assert (found["goal_reached"], found["balanced"]) == (True, True)


@pytest.mark.parametrize(
    ("arguments", "codes", "parts"),
    [
        (
            ("--no-check-env", "--set", 'sampling.env_config={"gravity": 1}'),
            {ExitCode.ENV},
            ("worker-0: env 0 ('CartPole-v1') could not be built", "unexpected keyword argument 'gravity'"),
        ),
    ],
)
def test_bad_input_that_a_role_notices_ends_the_fleet_with_its_sentence(
    tmp_path: Path, arguments: tuple[str, ...], codes: set[ExitCode], parts: tuple[str, ...]
) -> None:
    result = up(tmp_path, "--workers", "1", *arguments)
    assert result.returncode in codes, result.stderr
    (error,) = [line for line in result.stderr.splitlines() if line.startswith("error: ")]
    for part in parts:
        assert part in error
    assert orjson.loads(result.stdout)["exit_code"] == result.returncode
    assert read_fleet_file(tmp_path / "fleet.json").processes == []


def test_a_port_in_use_ends_the_fleet_with_the_brokers_sentence(tmp_path: Path) -> None:
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        port = holder.getsockname()[1]
        result = up(tmp_path, "--workers", "1", *by_tcp(port))
    assert result.returncode == ExitCode.PORT_IN_USE, result.stderr
    (error,) = [line for line in result.stderr.splitlines() if line.startswith("error: ")]
    assert str(port) in error
    assert "already in use" in error


@pytest.mark.thorough
def test_a_stop_during_a_long_update_kills_no_process_and_loses_no_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The update would take a minute and a half, and a process that is told to stop has 20 s."""
    monkeypatch.setenv(slow_training.MARK, str(tmp_path / "training"))
    settings = ("learner.minibatch_size=64", "module.build=support.fleets.slow_training:build")
    arguments = [part for setting in settings for part in ("--set", setting)]
    with RunningFleet(tmp_path / "run", "--env", "CartPole-v1", "--workers", "1", *arguments) as fleet:
        fleet.wait_until((tmp_path / "training").exists, "a step of training")
        fleet.terminate()
        result = fleet.finish()
        audited = fleet.audit()
    assert result["returncode"] == 0, result["stderr"]
    assert "is killed" not in result["stderr"]
    assert result["ledger"]["queued"] == 0
    assert result["ledger"]["committed"][0] > 0
    assert audited.returncode == 0, audited.stderr


@pytest.mark.thorough
def test_the_progress_line_names_lost_steps_and_the_newest_and_first_failure_of_an_env(tmp_path: Path) -> None:
    env = ("--env", "support.envs.fleet:one_leaves_its_space", "--set", "sampling.strict_bounds=true")
    arguments = (*env, "--workers", "1", "--num-envs", "8")
    with RunningFleet(tmp_path, *arguments) as fleet:
        lost = r"discarded [\d,]+ steps \([\d.]+ % of all: .*env_bad_data [\d,]+.*\)"
        newest = r"env failures [\d,]+, the newest \d+ s ago \(worker-0: env_\w+ in env [01] at step \d+: .*\)"
        first = r"the first \(env_bad_data: EnvContractError: observation should be within .*, [\d,]+ of this kind\)"
        whole = re.compile(f"{lost}.*{newest}, {first}")
        fleet.wait_until(lambda: whole.search(fleet.said()), "a line of progress with them")


@pytest.mark.thorough
def test_a_timeout_error_names_the_process_that_the_run_waited_for(tmp_path: Path) -> None:
    result = up(tmp_path, "--workers", "0", "--timeout-s", "15", "--until-steps", "10")
    assert result.returncode == ExitCode.TIMEOUT, result.stderr
    sentence = result.stderr.rpartition("error: ")[2]
    assert f"it stood still, waiting for a worker (headrace worker --run-dir {tmp_path})" in sentence


@pytest.mark.thorough
def test_a_worker_from_elsewhere_pauses_while_the_fleet_drains(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "headrace.deploy", "worker", "--run-dir", str(tmp_path / "run")]
    with RunningFleet(tmp_path / "run", "--env", "CartPole-v1", "--workers", "0") as fleet:
        fleet.wait_until((tmp_path / "run" / "broker.json").exists, "the broker")
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as worker:
            try:
                fleet.wait_until(lambda: fleet.steps() > 0, "a step")
                fleet.terminate()
                result = fleet.finish()
                audited = fleet.audit()
            finally:
                worker.terminate()
                said = worker.communicate(timeout=TIMEOUT_S)[0]
    assert result["returncode"] == 0, result["stderr"]
    assert "the fleet has reached its goal or is being stopped" in said
    assert result["ledger"]["queued"] <= FRAGMENT, "the worker went on while the learner stopped"
    assert audited.returncode == 0, audited.stderr


def test_no_process_outlives_a_killed_supervisor(tmp_path: Path) -> None:
    with subprocess.Popen(
        up_command(tmp_path, "--workers", "1"), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    ) as supervisor:
        page = page_when(tmp_path, "worker")
        supervisor.send_signal(signal.SIGKILL)
        supervisor.wait()
    assert {process.role for process in page.processes} == {"redis", "broker", "learner", "worker"}
    pids = [process.pid for process in page.processes]
    wait_until(lambda: not any(is_alive(pid) for pid in pids), "the end of all processes")
    assert exported(tmp_path) == {"up": "0.0", "broker_up": "0.0", "ended": "0.0"}
