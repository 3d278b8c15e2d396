"""The command as people type it: help, one-sentence errors with exit codes, ps, doctor, audit."""

from __future__ import annotations

import errno
import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import orjson
import pytest

from headrace.deploy.annexes.watch.state.ps import all_processes, table
from headrace.deploy.command import cli, entry
from headrace.deploy.command.option_table import TABLE
from headrace.deploy.process.stop_signals import StopSignals
from headrace.deploy.run.fleet_file import FleetFile, ProcessEntry, WaitingEntry
from headrace.deploy.run.options import recipes
from headrace.deploy.run.redis_view import Snapshot
from headrace.schemas.accounts.consumer_groups import GroupBooks, GroupRow
from headrace.schemas.errors import ExitCode
from headrace.schemas.settings.config_loading import known_keys
from support.ports import by_tcp
from support.waiting import TIMEOUT_S

pytestmark = pytest.mark.processes

COMMANDS = (
    *("up", "worker", "broker", "learner", "env-host", "ps", "audit", "doctor", "evaluate", "export", "chaos"),
    *("record", "report", "top", "why", "health", "scale", "ray up", "ray workers", "ray scale"),
)


def headrace(*arguments: str, cwd: Path | None = None, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "headrace.deploy", *arguments]
    return subprocess.run(
        command,
        cwd=cwd,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
        timeout=TIMEOUT_S,
    )


def assert_one_sentence(result: subprocess.CompletedProcess[str], code: ExitCode, *parts: str) -> None:
    assert result.returncode == code
    errors = [line for line in result.stderr.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1, result.stderr
    assert "Traceback" not in result.stderr
    for part in parts:
        assert part in errors[0]


@pytest.mark.one_in(4)
@pytest.mark.parametrize("command", COMMANDS)
def test_help_ends_with_examples_that_can_be_pasted(command: str) -> None:
    result = headrace(*command.split(), "--help")
    assert result.returncode == 0
    examples = result.stdout.rpartition("Examples:")[2].split("\n")
    assert [line for line in examples if line.startswith(f"    headrace {command}")]
    named = re.findall(r"--config (\S+)", "".join(examples))
    assert set(named) <= set(recipes()), "an example names a file that an installed Headrace lacks"


def test_each_option_of_the_table_gives_a_setting_that_exists() -> None:
    assert {row.setting for row in TABLE.values()} - {""} <= set(known_keys())


def test_the_version_option_prints_the_version() -> None:
    assert headrace("--version").stdout.startswith("headrace 0.")


def test_an_unknown_option_is_a_usage_error() -> None:
    assert headrace("up", "--wrokers", "3").returncode == ExitCode.USAGE


def test_an_unknown_key_in_the_file_names_file_and_nearest_key(tmp_path: Path) -> None:
    (tmp_path / "fleet.toml").write_text("[sampling]\nnum_env = 3\n")
    result = headrace("up", "--config", "fleet.toml", cwd=tmp_path)
    assert_one_sentence(result, ExitCode.CONFIG, "sampling.num_env: unknown key", "sampling.num_envs", "fleet.toml")
    assert_one_sentence(headrace("up", "--config", "nope.toml", cwd=tmp_path), ExitCode.CONFIG, "cartpole,")


@pytest.mark.one_in(6)
@pytest.mark.parametrize("recipe", recipes())
def test_a_recipe_runs_by_its_name(recipe: str, tmp_path: Path) -> None:
    """Its env is built, and its policy trained or at least sampled with."""
    result = headrace("up", "--config", recipe, "--until-steps", "1000", "--run-dir", "run", "--json", cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    summary = orjson.loads(result.stdout)
    assert summary["goal_reached"]
    assert summary["steps"] >= 1000


def test_a_run_to_resume_and_a_run_directory_do_not_go_together(tmp_path: Path) -> None:
    result = headrace("up", "--resume", "a", "--run-dir", "b", cwd=tmp_path)
    assert_one_sentence(result, ExitCode.CONFIG, "leave out --run-dir: --resume names the run directory")


def test_a_setting_name_of_another_framework_suggests_ours() -> None:
    result = headrace("up", "--set", "sampling.num_envs_per_env_runner=4")
    assert_one_sentence(result, ExitCode.CONFIG, "did you mean sampling.num_envs?")


def test_a_bad_value_from_the_environment_names_the_variable() -> None:
    result = headrace("up", HEADRACE_FLEET__WORKERS="many")
    assert_one_sentence(result, ExitCode.CONFIG, "fleet.workers", "'many'", "environment HEADRACE_FLEET__WORKERS")


@pytest.mark.thorough
def test_a_run_directory_that_cannot_be_used_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for place in (str(tmp_path / "file"), str(tmp_path / "file" / "below"), "/proc/nowhere"):
        assert_one_sentence(
            headrace("up", "--run-dir", place), ExitCode.RUN_DIR, place, "choose another with --run-dir"
        )


@pytest.mark.parametrize(
    ("number", "inherited", "ended"),
    [
        (signal.SIGINT, signal.default_int_handler, (130, b"")),
        (signal.SIGINT, signal.SIG_IGN, (130, b"")),
        (signal.SIGTERM, signal.default_int_handler, (143, b"stopped by SIGTERM\n")),
    ],
    ids=["Ctrl-C", "Ctrl-C that was ignored", "SIGTERM"],
)
def test_a_signal_in_the_midst_of_the_imports_ends_a_command_in_order(
    tmp_path: Path, number: signal.Signals, inherited: Any, ended: tuple[int, bytes]
) -> None:
    """Ctrl-C also ends it where SIGINT was inherited as ignored, as in a script's background."""
    endless = "import time\nprint('importing', flush=True)\nwhile True:\n    time.sleep(0.05)\n"
    (tmp_path / "typer.py").write_text(endless)
    before = signal.signal(signal.SIGINT, inherited)
    try:
        started = subprocess.Popen(
            [sys.executable, "-m", "headrace.deploy", "ps"],
            env={**os.environ, "PYTHONPATH": str(tmp_path)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
    finally:
        signal.signal(signal.SIGINT, before)
    with started as command:
        assert command.stdout is not None
        assert command.stdout.readline() == b"importing\n"
        command.send_signal(number)
        _, errors = command.communicate(timeout=TIMEOUT_S)
    assert (command.returncode, errors) == ended


def test_a_hangup_that_is_ignored_stays_ignored() -> None:
    """`nohup` relies on it."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with StopSignals() as signals:
            os.kill(os.getpid(), signal.SIGHUP)
            os.kill(os.getpid(), signal.SIGTERM)
            assert signals.count == 1
        assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


def test_up_without_an_answer_from_redis_ends_with_an_error(tmp_path: Path, free_port: int) -> None:
    url = f"redis://:secret@127.0.0.1:{free_port}/0"
    result = headrace("up", "--run-dir", str(tmp_path), "--redis-url", url, "--json")
    assert_one_sentence(result, ExitCode.REDIS_UNAVAILABLE, f"127.0.0.1:{free_port}", "--redis-url")
    assert "secret" not in result.stderr
    found = orjson.loads(result.stdout)
    assert (found["exit_code"], found["goal_reached"]) == (ExitCode.REDIS_UNAVAILABLE, False)


@pytest.mark.parametrize(
    "cause",
    [
        MemoryError("Unable to allocate 8 GiB"),
        ImportError("libtorch_cpu.so: failed to map segment from shared object"),
    ],
)
def test_a_lack_of_memory_is_one_sentence(
    cause: Exception, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def run() -> None:
        raise cause

    monkeypatch.setattr(cli, "command_line", lambda: run)
    with pytest.raises(SystemExit) as caught:
        cli.main()
    assert caught.value.code == ExitCode.FAILURE
    error = capsys.readouterr().err
    assert error.startswith(f"error: this process can get no more memory ({cause}); raise its limit")
    assert error.count("\n") == 1


@pytest.mark.parametrize(
    ("number", "said", "exit_code"),
    [
        (errno.EMFILE, "can open no more files and sockets", ExitCode.FAILURE),
        (errno.EIO, "(Input/output error); look for the disk's fault", ExitCode.RUN_DIR),
        (errno.EROFS, "(Read-only file system); mount it for writing", ExitCode.RUN_DIR),
        (errno.ESTALE, "(Stale file handle); mount the network's folder again", ExitCode.RUN_DIR),
        (errno.ENOSPC, "the disk is full", ExitCode.RUN_DIR),
        (errno.EDQUOT, "the disk is full", ExitCode.RUN_DIR),
    ],
)
def test_what_the_machine_refuses_is_one_sentence(
    number: int, said: str, exit_code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def run() -> None:
        raise OSError(number, os.strerror(number), "/run/a")

    monkeypatch.setattr(cli, "command_line", lambda: run)
    with pytest.raises(SystemExit) as caught:
        cli.main()
    assert caught.value.code == exit_code
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert said in error
    assert error.count("\n") == 1


@pytest.mark.parametrize(
    ("cause", "said"),
    [
        (MemoryError(), "MemoryError"),
        (OSError(12, "Cannot allocate memory"), "[Errno 12] Cannot allocate memory"),
        (ImportError("long\ntext\na.so: failed to map segment from shared object"), "a.so: failed to map segment"),
    ],
)
def test_a_lack_of_memory_for_the_imports_is_one_sentence(
    cause: Exception, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    class NoRoom:
        def __getattr__(self, name: str) -> object:
            raise cause

    monkeypatch.setitem(sys.modules, "headrace.deploy.command.cli", NoRoom())  # type: ignore[arg-type]
    with pytest.raises(SystemExit) as caught:
        entry._import_command_line()
    assert str(caught.value.code).startswith(f"error: this process can get no more memory ({said}")
    assert "\n" not in str(caught.value.code)


def test_another_failure_of_an_import_keeps_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def run() -> None:
        raise ImportError("no such name")

    monkeypatch.setattr(cli, "command_line", lambda: run)
    with pytest.raises(ImportError, match="no such name"):
        cli.main()


def test_debug_shows_the_traceback_as_well(tmp_path: Path) -> None:
    for result in (
        headrace("ps", "--run-dir", str(tmp_path), "--debug"),
        headrace("ps", "--run-dir", str(tmp_path), HEADRACE_DEBUG="1"),
    ):
        assert "Traceback" in result.stderr
        assert result.returncode == ExitCode.RUN_DIR


@pytest.mark.parametrize("command", ["ps", "audit", "worker", "learner"])
def test_a_directory_without_a_fleet_is_refused(tmp_path: Path, command: str) -> None:
    assert_one_sentence(headrace(command, "--run-dir", str(tmp_path)), ExitCode.RUN_DIR, str(tmp_path), "fleet.json")


def test_a_worker_needs_a_fleet_id(tmp_path: Path) -> None:
    result = headrace("worker", "--endpoint", "tcp://127.0.0.1:1", "--run-dir", str(tmp_path))
    assert_one_sentence(result, ExitCode.CONFIG, "--fleet-id")


def test_ps_lists_a_learner_of_ones_own_and_when_it_was_last_heard_of() -> None:
    lease = {"connected": 1.0, "epoch": 3.0, "pid": 71.0, "host": "box", "heard_unix_s": 100.0}
    fleet = FleetFile(fleet_id="f", state="running", supervisor_pid=0)

    def shown(fleet: FleetFile, **changes: float) -> list[str]:
        seen = Snapshot(lease=lease | changes, reported_unix_s=109.0)
        lines = table(fleet, all_processes(fleet, seen, 0.0)).splitlines()
        return [" ".join(line.split()) for line in lines if line.startswith("learner")]

    assert shown(fleet) == ["learner learner 3 71 - 0 - connected, on box"]
    assert shown(fleet, connected=0.0) == ["learner learner 3 71 - 0 - gone, last heard of 9 s ago, on box"]
    own = WaitingEntry(name="learner", role="learner", slot=None, restarts=1, state="restarting")
    assert shown(fleet.model_copy(update={"waiting": [own]})) == ["learner learner - - - 1 - restarting"]
    assert shown(fleet, heard_unix_s=0.0) == []


def test_ps_lists_readers_of_consumer_groups_that_have_come() -> None:
    fleet = FleetFile(fleet_id="f", state="running", supervisor_pid=0)
    reader = GroupRow(connected=True, pid=71, host="box", heard_unix_s=100.0)
    states = {"old": reader.model_copy(update={"connected": False}), "record": reader, "watch": GroupRow()}
    seen = Snapshot(groups={name: GroupBooks(state) for name, state in states.items()}, reported_unix_s=109.0)
    lines = table(fleet, all_processes(fleet, seen, 0.0)).splitlines()
    assert [" ".join(line.split()) for line in lines if line.startswith("group")] == [
        "group old group - 71 - 0 - gone, last heard of 9 s ago, on box",
        "group record group - 71 - 0 - connected, on box",
    ]


def test_ps_shows_which_processes_are_alive(tmp_path: Path) -> None:
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    processes = [
        ProcessEntry(name="broker", role="broker", incarnation=1, pid=os.getpid(), started=0.0),
        ProcessEntry(name="worker-0", role="worker", slot=0, incarnation=3, pid=gone.pid, started=0.0, restarts=2),
    ]
    page = FleetFile(fleet_id="f-1", state="running", supervisor_pid=os.getpid(), processes=processes)
    page.write(tmp_path / "fleet.json")
    rows = {
        row["name"]: row
        for row in orjson.loads(headrace("ps", "--json", "--run-dir", str(tmp_path)).stdout)["processes"]
    }
    assert (rows["broker"]["alive"], rows["worker-0"]["alive"]) == (True, False)
    assert rows["broker"]["age_s"] < time.clock_gettime(time.CLOCK_BOOTTIME)  # whatever its clock says
    assert (rows["worker-0"]["slot"], rows["worker-0"]["incarnation"], rows["worker-0"]["restarts"]) == (0, 3, 2)
    title, columns, broker, worker = headrace("ps", "--run-dir", str(tmp_path), COLUMNS="40").stdout.splitlines()
    assert title == f"fleet f-1: running, supervisor pid {os.getpid()}"
    assert columns.split() == ["name", "role", "inc.", "pid", "age", "restarts", "version", "state"]
    assert broker.startswith("broker    broker  1     "), "columns are aligned"
    assert worker.startswith("worker-0  worker  3     ")
    assert worker.endswith("running, but gone"), "a narrow terminal cuts nothing off"


@pytest.mark.parametrize("command", ["audit", "dashboard", "ps", "top", "why"])
def test_a_run_is_named_by_its_folder_or_by_the_option_but_not_by_both(command: str, tmp_path: Path) -> None:
    named = headrace(command, str(tmp_path / "none"))
    assert named.returncode == ExitCode.RUN_DIR
    assert f"{tmp_path / 'none'} cannot be used: there is no such folder" in named.stderr
    both = headrace(command, "a", "--run-dir", "a")
    assert both.returncode == ExitCode.CONFIG
    assert "RUN is the same as --run-dir: give one of them" in both.stderr


def test_print_config_needs_no_fleet() -> None:
    result = headrace("up", "--print-config", "--workers", "5")
    assert result.returncode == 0
    assert "workers = 5" in result.stdout


def test_doctor_passes_this_machine_and_fails_a_taken_port(tmp_path: Path) -> None:
    fit = headrace("doctor", "--run-dir", str(tmp_path / "new"), "--json")
    assert fit.returncode == 0, fit.stdout
    assert orjson.loads(fit.stdout)["fit"] is True
    assert not (tmp_path / "new").exists()
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        port = holder.getsockname()[1]
        sick = headrace("doctor", "--run-dir", str(tmp_path), *by_tcp(port))
    assert sick.returncode == 1
    # The broker's other ports follow on this one. Any program of this machine may hold one of them.
    (line,) = [line for line in sick.stdout.splitlines() if line.startswith("fail  worker port")]
    assert "choose another broker.port" in line


def test_doctor_says_when_redis_does_not_answer(tmp_path: Path, free_port: int) -> None:
    result = headrace("doctor", "--run-dir", str(tmp_path), "--redis-url", f"redis://127.0.0.1:{free_port}/0")
    assert result.returncode == 1
    (line,) = [line for line in result.stdout.splitlines() if line.startswith("fail  redis server")]
    assert line.endswith("start it, correct --redis-url, or leave it out"), "the whole sentence is shown"


def test_a_config_path_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    result = headrace("up", "--config", "a" * 300, cwd=tmp_path)
    assert result.returncode == ExitCode.CONFIG
    assert "cannot be read: File name too long" in result.stderr


def test_the_exporter_refuses_settings_without_a_fleet(tmp_path: Path) -> None:
    (tmp_path / "fleet.toml").write_text('[redis]\nurl = "redis://127.0.0.1:1/0"\n')
    result = headrace("exporter", "--config", "fleet.toml", cwd=tmp_path)
    assert result.returncode == ExitCode.CONFIG
    assert "fleet.toml names no fleet to export: it needs redis.url and fleet.fleet_id" in result.stderr
    result = headrace("exporter", "--config", "fleet.toml", "--run-dir", "run", cwd=tmp_path)
    assert result.returncode == ExitCode.CONFIG
    assert "name fleets by --config, or by the other options, not by both" in result.stderr


@pytest.mark.parametrize("command", [["audit", "--strict"], ["why"]])
def test_a_fleet_without_up_is_found_by_its_settings(command: list[str], tmp_path: Path) -> None:
    """Other engines start its roles, so it has no fleet.json; here its Redis is away, which is said of that Redis."""
    (tmp_path / "fleet.toml").write_text('[fleet]\nfleet_id = "demo"\n[redis]\nurl = "redis://127.0.0.1:1/0"\n')
    result = headrace(*command, "--config", "fleet.toml", cwd=tmp_path, HEADRACE_FLEET__RUN_DIR=str(tmp_path))
    assert result.returncode in (ExitCode.REDIS_UNAVAILABLE, ExitCode.FINDINGS)
    assert "127.0.0.1:1" in result.stdout + result.stderr


@pytest.mark.parametrize("words", [("why",), ("health",), ("up", "--until-steps", "100")], ids=" ".join)
def test_a_working_directory_that_was_removed_is_a_sentence(words: tuple[str, ...], tmp_path: Path) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    command = 'rmdir "$PWD"; exec "$@"'
    ended = subprocess.run(
        ["/bin/sh", "-c", command, "sh", sys.executable, "-m", "headrace.deploy", *words],
        cwd=gone,
        capture_output=True,
        text=True,
        check=False,
        timeout=TIMEOUT_S,
    )
    assert_one_sentence(ended, ExitCode.CONFIG, "the working directory was removed")


@pytest.mark.parametrize("words", [("why", "runs/é"), ("health", "--run-dir", "é"), ("up", "--run-dir", "é")])
def test_a_name_that_the_locale_lacks_is_a_sentence(words: tuple[str, ...], tmp_path: Path) -> None:
    ascii_only = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    assert_one_sentence(headrace(*words, cwd=tmp_path, **ascii_only), ExitCode.CONFIG, "set LC_ALL=C.UTF-8")
