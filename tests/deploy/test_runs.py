"""Runs: their directories, how a user resumes them, their goals, and the commands that a waiting fleet prints."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any, TextIO

import orjson
import pytest

from headrace.deploy.run.fleet_file import FleetFile
from headrace.deploy.run.resume import EarlierRun, write_settings
from headrace.deploy.run.run_dir import RunDir, file_name_of, new_run_dir
from headrace.schemas.errors import ExitCode, RunDirError
from headrace.schemas.settings.config_loading import build_config
from support.waiting import PATIENCE, TIMEOUT_S, wait_until

FRAGMENT = 8 * 64
"""Env steps of one fragment of one worker, by default."""
UNTIL = 1500


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "headrace.deploy", *arguments]


def headrace(cwd: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command(*arguments), cwd=cwd, capture_output=True, text=True, check=False, timeout=TIMEOUT_S)


def summary_of(result: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    assert result.returncode == 0, result.stderr
    found: dict[str, Any] = orjson.loads(result.stdout)
    assert (found["goal_reached"], found["balanced"]) == (True, True)
    return found


@pytest.mark.slow
@pytest.mark.thorough
def test_a_run_is_found_again_refuses_other_settings_and_is_resumed(tmp_path: Path) -> None:
    asked = headrace(tmp_path, "up", "--until-steps", str(UNTIL), "--json")
    first = summary_of(asked)
    assert "headrace evaluate" not in asked.stdout + asked.stderr
    assert UNTIL <= first["env_steps"] < UNTIL + 2 * FRAGMENT
    (run,) = (tmp_path / "runs").iterdir()
    assert re.fullmatch(r"CartPole-v1-\d{8}-\d{6}", run.name)

    for name in ("ps", "audit"):
        found = headrace(tmp_path, name)
        assert found.returncode == 0
        assert f"run directory: runs/{run.name}, the newest in runs/" in found.stderr

    other = headrace(tmp_path, "up", "--env", "Pendulum-v1", "--run-dir", str(run))
    assert other.returncode == ExitCode.RUN_DIR
    assert 'sampling.env: "CartPole-v1" -> "Pendulum-v1"' in other.stderr
    rate = ("--set", "learner.learning_rate=0.0003")
    changed = headrace(tmp_path, "up", *rate, "--run-dir", str(run))
    assert changed.returncode == ExitCode.RUN_DIR
    assert f"learner.learning_rate: 0.001 -> 0.0003); go on with the new ones by --resume {run}" in changed.stderr
    assert "started: pid" not in other.stderr + changed.stderr
    nowhere = headrace(tmp_path, "up", "--resume", "runs/nowhere")
    assert "there is no such folder, so no run to go on with; name another run with --resume" in nowhere.stderr

    again = headrace(tmp_path, "up", "--resume", run.name, *rate, "--until-steps", str(UNTIL), "--json")
    second = summary_of(again)
    taken = second["env_steps"] - first["env_steps"]
    assert UNTIL <= taken < UNTIL + 2 * FRAGMENT, "the goal counts from the resume"
    for part in (
        f"going on with the run in {run}",
        f"{first['env_steps']:,} env steps and {first['episodes']:,} episodes",
        "changed for this run: learner.learning_rate: 0.001 -> 0.0003",
        f"until {UNTIL:,} env steps, counted from here, where {first['env_steps']:,} env steps are done",
    ):
        assert part in again.stderr
    alarms = [line for line in again.stderr.splitlines() if re.search("WARNING|ERROR|unsettled", line)]
    if PATIENCE > 1:  # Redis may answer late where the machine is slow
        alarms = [line for line in alarms if "in Redis waits: Timeout" not in line]
    assert not alarms, "a normal end raises an alarm"
    assert headrace(tmp_path, "audit", "--strict").returncode == 0


@pytest.mark.one_in(3)
@pytest.mark.processes
@pytest.mark.parametrize("name", ["ps", "audit", "worker", "learner", "broker", "serve"])
def test_a_command_in_a_folder_without_runs_ends_with_an_error(tmp_path: Path, name: str) -> None:
    result = headrace(tmp_path, name)
    assert result.returncode == ExitCode.RUN_DIR
    assert result.stderr.splitlines()[-1].startswith(f"error: there is no run in {tmp_path}/runs; name one with")
    assert not (tmp_path / "runs").exists()


def test_a_run_directory_is_named_after_env_and_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert file_name_of("ale_py:ALE/Breakout-v5") == "ale_py-ALE-Breakout-v5"
    assert file_name_of("../..") == "run"
    first = new_run_dir("a/b")
    first.mkdir(parents=True)
    assert new_run_dir("a/b") != first


def test_a_resumed_run_may_change_training_settings_but_not_env_or_module(tmp_path: Path) -> None:
    before = build_config({"sampling": {"env": "A-v0", "env_config": {"size": 3}}})
    with RunDir(tmp_path) as run_dir:
        run_dir.settings_json.write_bytes(write_settings(before))
        FleetFile(fleet_id="f").write(run_dir.fleet_json)
        assert EarlierRun.of(run_dir) is None, "a run that took no step holds nobody to its settings"
        FleetFile(fleet_id="f", env_steps=1).write(run_dir.fleet_json)
        run = EarlierRun.of(run_dir)
    assert run is not None

    def with_(**sections: dict[str, Any]) -> Any:
        sections["sampling"] = {"env": "A-v0", "env_config": {"size": 3}} | sections.get("sampling", {})
        return build_config(sections)

    free = with_(
        fleet={"workers": 5, "until_steps": 9, "timeout_s": 3.0, "run_dir": "x"},
        sampling={"num_envs": 3, "env_placement": "process", "env_step_timeout_s": 2.0},
        learner={"enabled": False, "torch_threads": 2},
        redis={"url": "redis://127.0.0.1:1"},
    )
    assert run.check(free, resume=False) == []
    training = with_(sampling={"seed": 4}, learner={"gamma": 0.9})
    with pytest.raises(RunDirError, match=r"sampling\.seed: null -> 4; learner\.gamma: 0\.98 -> 0\.9\); go on"):
        run.check(training, resume=False)
    assert run.check(training, resume=True) == ["sampling.seed: null -> 4", "learner.gamma: 0.98 -> 0.9"]
    for fixed in (with_(sampling={"env_config": {"size": 4}}), with_(module={"config": {"hidden": [8]}})):
        with pytest.raises(RunDirError, match="name another run directory, or none, for a new run"):
            run.check(fixed, resume=True)


class Terminal:
    """The lines that a fleet has printed so far."""

    def __init__(self, stream: TextIO) -> None:
        self._lines: list[str] = []
        self._thread = threading.Thread(target=lambda: self._lines.extend(stream), daemon=True)
        self._thread.start()

    def says(self, pattern: str) -> re.Match[str]:
        """The first match of `pattern`, once it has been printed."""
        found = wait_until(lambda: re.search(pattern, "".join(self._lines)), f"a line with {pattern!r}", pause_s=0.05)
        assert found is not None
        return found


@contextmanager
def fleet(cwd: Path, *arguments: str) -> Iterator[tuple[Terminal, subprocess.Popen[str]]]:
    asked = command("up", "--run-dir", "run", "--until-steps", "600", "--timeout-s", "200", *arguments)
    with subprocess.Popen(asked, cwd=cwd, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        assert process.stdout is not None
        try:
            yield Terminal(process.stdout), process
        finally:
            process.terminate()


@contextmanager
def pasted(cwd: Path, line: str) -> Iterator[None]:
    """Run a command of ours that was printed."""
    words = shlex.split(line)
    assert words.pop(0) == "headrace"
    with subprocess.Popen(command(*words), cwd=cwd, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        try:
            yield
        finally:
            process.terminate()


@pytest.mark.thorough
@pytest.mark.slow
def test_a_waiting_fleet_prints_commands_that_start_a_worker_and_a_learner(tmp_path: Path) -> None:
    with fleet(tmp_path, "--workers", "0", "--set", "learner.enabled=false") as (terminal, process):
        worker = terminal.says(r"waiting for a worker \((headrace worker [^)]*)\)")[1]
        learner = terminal.says(r"or start the reference learner: (headrace learner --run-dir [^\s\"]+)")[1]
        assert 'EpisodeStream(\\"ipc://' in terminal.says(r"stream, weights = .*")[0].replace('("', '(\\"')
        with pasted(tmp_path, worker):
            terminal.says(r"waiting for first weights from a learner at ipc://")
            rows = orjson.loads(headrace(tmp_path, "ps", "--json", "--run-dir", "run").stdout)["processes"]
            (elsewhere,) = [row for row in rows if row["role"] == "worker"]
            assert (elsewhere["name"], elsewhere["alive"]) == ("worker-1000", True)
            assert elsewhere["host"]
            assert elsewhere["headrace_version"] == version("headrace")
            with pasted(tmp_path, learner):
                assert process.wait(200) == 0
        play = terminal.says(r"play its policy: headrace (evaluate run)")[1]
        played = headrace(tmp_path, *play.split(), "--episodes", "1")
        assert played.returncode == 0, played.stderr


@pytest.mark.thorough
@pytest.mark.slow
def test_a_worker_of_a_stopped_run_reports_it_and_joins_each_resumed_run(tmp_path: Path) -> None:
    summary_of(headrace(tmp_path, "up", "--run-dir", "run", "--workers", "1", "--until-steps", "600", "--json"))

    def why_none_joins() -> str:
        brief = headrace(tmp_path, "worker", "--run-dir", "run", "--set", "worker.connect_timeout_s=0.1")
        assert brief.returncode == ExitCode.RUN_DIR
        return brief.stderr

    again, run = f"; go on with `headrace up --resume {tmp_path}/run`", f"the fleet in {tmp_path}/run"
    assert re.search(rf"{run} reached its goal at \S+ \S+ after [\d,]+ env steps{again}", why_none_joins())
    words = tmp_path / "words"
    asked = command("worker", "--run-dir", "run")
    with words.open("wb") as lines, subprocess.Popen(asked, cwd=tmp_path, stderr=lines) as worker:
        try:
            wait_until(lambda: f"{again}; waiting for it" in words.read_text(), "the sentence of the worker")
            summary_of(headrace(tmp_path, "up", "--resume", "run", "--workers", "0", "--until-steps", "600", "--json"))
            assert "as slot 1000" in words.read_text()
            summary_of(headrace(tmp_path, "up", "--resume", "run", "--workers", "0", "--until-steps", "600", "--json"))
            assert words.read_text().count("as slot 1000") == 1, "the same life goes on"
        finally:
            worker.terminate()
    beyond = ("--workers", "0", "--until-steps", "1000000", "--timeout-s", "1")
    assert headrace(tmp_path, "up", "--resume", "run", *beyond).returncode == ExitCode.TIMEOUT
    assert re.search(rf"{run} was stopped at \S+ \S+ after \d\S+ env steps{again}", why_none_joins())


@pytest.mark.thorough
@pytest.mark.slow
def test_a_fleet_that_waits_for_env_hosts_prints_their_start_command(tmp_path: Path) -> None:
    with fleet(tmp_path, "--workers", "1", "--set", "sampling.env_placement=remote") as (terminal, process):
        host = terminal.says(r"waiting for env hosts for worker-0 \((headrace env-host [^)]*)\)")[1]
        with pasted(tmp_path, host):
            terminal.says(r"first env steps [\d.]+ s after the start")
            assert process.wait(200) == 0
