"""The run directory and the fleet's page in it."""

from __future__ import annotations

import os
import shutil
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import orjson
import pytest

from headrace.broker.batches.limits import BrokerState
from headrace.broker.files.state_file import Endpoints, write_broker_file
from headrace.deploy.annexes.recording.recording_folder import RecordingFolder
from headrace.deploy.fleet.fleet_record import FleetRecord
from headrace.deploy.loggers.row_files import JsonlFile
from headrace.deploy.process.child import Child
from headrace.deploy.process.recorders import recorders_in
from headrace.deploy.process.supervisor import Role
from headrace.deploy.run.evaluation_log import EvaluationLog
from headrace.deploy.run.fleet_file import read_addresses, read_fleet_file
from headrace.deploy.run.run_dir import RunDir, write_private
from headrace.schemas.accounts.recorder import Recorder
from headrace.schemas.credentials.keys import keys_folder
from headrace.schemas.errors import ExitCode, RunDirError
from headrace.schemas.peers.fleet_address import RunDirAddresses
from headrace.schemas.peers.rendezvous import Rendezvous
from headrace.workers.reruns.kept_failures import KeptFailures

if TYPE_CHECKING:
    from tests.deploy.conftest import Nursery


def test_two_fleets_cannot_share_a_directory(tmp_path: Path) -> None:
    with (
        RunDir(tmp_path),
        pytest.raises(RunDirError, match=rf"another fleet runs in it .*{os.getpid()}"),
        RunDir(tmp_path),
    ):
        pass
    with RunDir(tmp_path):
        pass


def test_a_fleet_that_was_killed_leaves_no_lock(tmp_path: Path) -> None:
    script = f"""
import os, pathlib
from headrace.deploy.run.run_dir import RunDir
with RunDir(pathlib.Path({str(tmp_path)!r})):
    os.kill(os.getpid(), 9)
"""
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == -9
    with RunDir(tmp_path):
        pass


@pytest.mark.parametrize("place", ["file/in/the/way", "/proc/nowhere"])
def test_a_directory_that_cannot_be_used_is_one_typed_error(tmp_path: Path, place: str) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(RunDirError, match=r"cannot be used.*--run-dir") as caught, RunDir(tmp_path / place):
        pass
    assert caught.value.exit_code is ExitCode.RUN_DIR


def test_fleet_id_and_incarnations_go_on_from_an_earlier_fleet(tmp_path: Path) -> None:
    with RunDir(tmp_path) as run_dir:
        first = FleetRecord(run_dir, "", None)
        assert [first.next_incarnation("worker-0") for _ in range(3)] == [1, 2, 3]
    (tmp_path / "recorders" / "worker-1-9.rec").touch()
    with RunDir(tmp_path) as run_dir:
        second = FleetRecord(run_dir, "", None)
    assert second.content.fleet_id == first.content.fleet_id
    assert second.next_incarnation("worker-0") == 4
    assert second.next_incarnation("worker-1") == 10
    assert FleetRecord(run_dir, "of-my-own", None).content.fleet_id == "of-my-own"
    at = Endpoints(worker="ipc:///a", learner="ipc:///b", weights="ipc:///c")
    write_broker_file(tmp_path, "of-my-own", at, BrokerState())
    before = run_dir.fleet_json.read_bytes()
    with pytest.raises(RunDirError, match="it is of fleet 'of-my-own', not 'another'"):
        FleetRecord(run_dir, "another", None)
    assert run_dir.fleet_json.read_bytes() == before
    run_dir.fleet_json.unlink()
    assert FleetRecord(run_dir, "", None).content.fleet_id == "of-my-own", "the broker was alone"


def test_a_damaged_fleet_file_is_one_typed_error(tmp_path: Path) -> None:
    for content in (b"{", b"[]", b'{"fleet_id": 7}'):
        (tmp_path / "fleet.json").write_bytes(content)
        with pytest.raises(RunDirError, match="damaged"):
            read_fleet_file(tmp_path / "fleet.json")


def test_fleet_json_is_private_and_current_while_processes_start_and_end(tmp_path: Path, nursery: Nursery) -> None:
    with RunDir(tmp_path / "run") as run_dir:
        record = FleetRecord(run_dir, "", "fleet.toml")
        waited: list[str] = []

        def changed() -> None:
            record.note_processes(nursery.supervisor.services.values())
            page = read_fleet_file(run_dir.fleet_json)
            waited.extend(entry.name for entry in page.waiting if not page.processes)

        nursery.notes.changed = changed  # type: ignore[method-assign]
        record.note(redis_url="redis://:secret@127.0.0.1:1/0")
        assert stat.S_IMODE(run_dir.fleet_json.stat().st_mode) == 0o600
        service = nursery.start("import signal; signal.pause()", name="worker-0", role=Role.WORKER, slot=0)

        def pids() -> list[int]:
            return [entry["pid"] for entry in orjson.loads(run_dir.fleet_json.read_bytes())["processes"]]

        assert service.child is not None
        first = service.child.pid
        assert pids() == [first]
        os.kill(first, 9)
        nursery.until(lambda: service.restarts == 1 and service.child is not None)
        assert "worker-0" in waited
        assert service.child is not None
        (entry,) = read_fleet_file(run_dir.fleet_json).processes
        assert (entry.pid, entry.role, entry.slot, entry.incarnation) == (service.child.pid, "worker", 0, 2)
        nursery.supervisor.kill()
        nursery.until(nursery.supervisor.gone)
        assert pids() == []
    assert not list(run_dir.path.glob(".fleet.json*"))


def test_a_removed_run_directory_does_not_end_a_training_fleet(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with RunDir(tmp_path / "run") as run_dir:
        record = FleetRecord(run_dir, "", None)
        shutil.rmtree(run_dir.path)
        record.note(state="running")
        record.note(state="draining")
        assert caplog.text.count("fleet.json is out of date") == 1
        with pytest.raises(RunDirError):
            record.next_incarnation("worker-0")
        run_dir.path.mkdir()
        record.note(state="stopped")
        assert read_fleet_file(run_dir.fleet_json).state == "stopped"


def test_recorders_whose_folder_is_gone_are_one_typed_error(tmp_path: Path) -> None:
    with pytest.raises(RunDirError, match="recorders cannot be used: it was removed while the fleet ran; start"):
        list(recorders_in(tmp_path / "recorders"))


def test_the_address_of_a_broker_started_alone_is_found(tmp_path: Path) -> None:
    broker = {"pid": 1, "fleet_id": "f", "endpoints": {"worker": "tcp://127.0.0.1:1"}}
    (tmp_path / "broker.json").write_bytes(orjson.dumps(broker))
    assert read_addresses(tmp_path) == ("f", {"worker": "tcp://127.0.0.1:1"})


def test_a_link_in_the_run_directory_is_not_written_through(tmp_path: Path) -> None:
    """Another user's link would send our output to a file of our own."""
    precious = tmp_path / "precious"
    precious.write_text("mine")
    run = tmp_path / "run"
    with RunDir(run) as run_dir:
        for name in ("logs/worker-0.log", "recorders/worker-0-1.rec", "metrics.jsonl", "evaluations.jsonl"):
            (run / name).symlink_to(precious)
        (run / f".settings.json.{os.getpid()}").symlink_to(precious)
        write_private(run_dir.settings_json, b"{}")
        writers = (
            lambda: Child(["true"], run / "logs" / "worker-0.log"),
            lambda: Recorder(run / "recorders" / "worker-0-1.rec", 0, 1),
            lambda: JsonlFile(run / "metrics.jsonl").append([{}]),
            lambda: EvaluationLog(run).append({}),
        )
        for write in writers:
            with pytest.raises((RunDirError, OSError), match=r"(?i)symbolic link"):
                write()
    (run / "lock").unlink()
    (run / "lock").symlink_to(precious)
    with pytest.raises(RunDirError, match=r"(?i)symbolic link"), RunDir(run):
        pass
    assert precious.read_text() == "mine"


@pytest.mark.parametrize("umask", [0o000, 0o277])
def test_private_files_are_private_whatever_the_umask(tmp_path: Path, umask: int) -> None:
    before = os.umask(umask)
    try:
        write_private(tmp_path / "fleet.json", b"{}")
        write_private(tmp_path / "fleet.json", b"{}")
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "fleet.json").stat().st_mode) == 0o600


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may give a folder away")
def test_a_run_directory_in_which_all_users_may_write_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    os.chown(tmp_path, 4242, -1)
    monkeypatch.setattr(os, "geteuid", lambda: 4242)
    tmp_path.chmod(0o777)
    with (
        pytest.raises(RunDirError, match=r"every user of this machine may write in it; run: chmod o-w"),
        RunDir(tmp_path),
    ):
        pass
    assert not (tmp_path / "lock").exists()
    tmp_path.chmod(0o770)
    with RunDir(tmp_path):
        pass


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may give a folder away")
def test_another_users_run_directory_is_refused(tmp_path: Path) -> None:
    os.chown(tmp_path, 4242, -1)
    with pytest.raises(RunDirError, match=r"belongs to user 4242, and this is user 0; name a new"), RunDir(tmp_path):
        pass
    assert not (tmp_path / "lock").exists()


PLACES: dict[str, Callable[[], object]] = {
    "the address of a run": lambda: RunDirAddresses(Path("x")).path,
    "a rendezvous": lambda: Rendezvous("x").where,
    "keys": lambda: keys_folder("x"),
    "a recording": lambda: RecordingFolder(Path("x")).path,
    "failures of envs": lambda: KeptFailures(Path("x"), 0, 1)._run_dir,
}


@pytest.mark.parametrize("kind", PLACES)
def test_what_keeps_a_path_keeps_it_when_the_working_directory_changes(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert str(PLACES[kind]()) == str(tmp_path / "x")


@pytest.mark.parametrize("where", ["https://host/x.json", "dns://host"])
def test_a_rendezvous_that_is_no_file_stays_as_it_is(where: str) -> None:
    ports = {"worker": 1, "learner": 2, "weights": 3} if where.startswith("dns") else None
    assert Rendezvous(where, ports).where == where
