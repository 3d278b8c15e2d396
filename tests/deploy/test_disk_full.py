"""A disk that is full or refuses writes: the fleet is drained, ends with one sentence, and can be resumed."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from itertools import repeat
from pathlib import Path

import orjson
import pytest

from headrace.broker.files.books_file import BooksFile
from headrace.broker.files.lifetime_file import LifetimeFile
from headrace.broker.files.state_file import read_broker_file
from headrace.deploy.process.exit_record import exit_record_path, take_exit_record, write_exit_record
from headrace.deploy.run.fleet_file import read_fleet_file
from headrace.deploy.terminal.std_streams import ignore_closed_reader
from headrace.learner_stub.checkpoints.checkpoint import Checkpoint, load_checkpoint, save_checkpoint
from headrace.schemas.accounts.recorder import Recorder
from headrace.schemas.errors import ExitCode, RunDirError
from support.waiting import wait_until

UP = [sys.executable, "-m", "headrace.deploy", "up"]


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 6 MiB of its own."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=6m", "none", str(folder)], capture_output=True, text=True, check=False
    )
    if mounted.returncode:
        pytest.skip(f"needs the right to mount: {mounted.stderr.strip()}")
    yield folder
    subprocess.run(["umount", "--lazy", str(folder)], check=True)


def fill(disk: Path) -> None:
    with (disk / "filler").open("wb", buffering=0) as file:
        for size in (1 << 16, 1 << 12, 1):
            with pytest.raises(OSError, match="No space left"):
                file.writelines(repeat(b"\0" * size))


@pytest.mark.slow
def test_a_fleet_on_a_full_disk_ends_with_an_error_and_can_be_resumed(disk: Path, tmp_path: Path) -> None:
    run = disk / "run"
    settings = ["--env", "CartPole-v1", "--workers", "1", "--num-envs", "4", "--set", "learner.steps_per_update=512"]
    with (tmp_path / "said").open("w+") as said:
        fleet = subprocess.Popen(
            [*UP, *settings, "--run-dir", str(run), "--timeout-s", "200"], stdout=said, stderr=said, text=True
        )
        wait_until((run / "learner.checkpoint").exists, "a checkpoint")
        fill(disk)
        assert fleet.wait(120) == ExitCode.RUN_DIR
        text = (tmp_path / "said").read_text()
    (error,) = [line for line in text.splitlines() if line.startswith("error: ")]
    assert "the disk is full: " in error
    assert f" cannot be written at {run}" in error
    assert "free some space there (or raise your quota), then go on with headrace up --resume" in error
    assert "of yours" not in text
    assert "Traceback" not in text

    (disk / "filler").unlink()
    again = subprocess.run(
        [*UP, "--resume", str(run), "--until-steps", "2000", "--json"], capture_output=True, text=True, check=False
    )
    assert again.returncode == 0, again.stderr
    assert orjson.loads(again.stdout)["balanced"]


@pytest.mark.thorough
def test_a_fleet_whose_run_directory_is_removed_is_drained_and_says_so(tmp_path: Path) -> None:
    run = tmp_path / "run"
    settings = [
        "--env",
        "CartPole-v1",
        "--workers",
        "1",
        "--set",
        "learner.enabled=false",
        "--set",
        "dashboard.enabled=true",
        "--set",
        "fleet.timeout_s=200",
    ]
    command = [*UP, *settings, "--run-dir", str(run)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as fleet:
        wait_until(lambda: list(run.glob("recorders/*.rec")), "a recorder")
        # Before its start is over, a fleet has nothing to drain.
        wait_until(lambda: "dashboard" in read_fleet_file(run / "fleet.json").endpoints, "the end of the start")
        while run.exists():  # the fleet writes to it in the meantime
            shutil.rmtree(run, ignore_errors=True)
        said, _ = fleet.communicate(timeout=120)
    assert fleet.returncode == ExitCode.RUN_DIR, said
    error = said.splitlines()[-1]
    assert error.startswith(f"error: run directory {run}"), said
    assert error.endswith("start the fleet again")
    assert "broker stopped with exit code 0" in said, said
    assert "of yours" not in said, said


def test_a_full_disk_is_named_by_recorder_checkpoint_and_exit_record(
    disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    record = disk / "record"
    monkeypatch.setenv("HEADRACE_EXIT_RECORD", str(record))
    place = exit_record_path()
    fill(disk)
    with pytest.raises(RunDirError, match=f"the disk is full: the recorder cannot be written at {disk}"):
        Recorder(disk / "worker-0-1.rec", 0, 1)
    with pytest.raises(RunDirError, match=f"the disk is full: the checkpoint cannot be written at {disk}"):
        save_checkpoint(disk / "learner.checkpoint", Checkpoint(1, []))
    write_exit_record(place, 7, "the disk is full")
    told = take_exit_record(record, os.getpid())
    assert told is not None
    assert (told.exit_code, told.sentence) == (7, "the disk is full")


def test_output_to_a_full_disk_ends_no_process_and_goes_on_later(disk: Path) -> None:
    fill(disk)
    with (disk / "filler").open("r+b") as filler, (disk / "log").open("w") as log:
        with ignore_closed_reader(log):
            print("lost", file=log, flush=True)
        filler.truncate(0)
        with ignore_closed_reader(log):
            print("kept", file=log, flush=True)
    assert (disk / "log").read_text() == "kept\n"


def test_output_and_exit_records_on_a_read_only_disk_end_no_process(
    disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    record = disk / "record"
    monkeypatch.setenv("HEADRACE_EXIT_RECORD", str(record))
    write_exit_record(exit_record_path(), 7, "no more")
    subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
    told = take_exit_record(record, os.getpid())
    assert told is not None
    assert (told.exit_code, told.sentence) == (7, "no more")
    with record.open() as log, os.fdopen(os.dup(log.fileno()), "w") as unwritable, ignore_closed_reader(unwritable):
        print("lost", file=unwritable, flush=True)


def test_a_save_to_a_read_only_disk_names_the_checkpoint(disk: Path) -> None:
    path = disk / "learner.checkpoint"
    save_checkpoint(path, Checkpoint(1, []))
    subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
    with pytest.raises(RunDirError, match=r"the checkpoint cannot be written \(Read-only file system\); mount it for"):
        save_checkpoint(path, Checkpoint(1, []))


@pytest.mark.parametrize("number", [errno.EIO, errno.ESTALE, errno.EMFILE, errno.EACCES])
@pytest.mark.parametrize(
    ("name", "read"),
    [
        ("broker.json", read_broker_file),
        ("books.json", lambda run: BooksFile(run, "f").read()),
        ("lifetime.json", lambda run: LifetimeFile(run, "f").read()),
        ("learner.checkpoint", lambda run: load_checkpoint(run / "learner.checkpoint")),
        ("learner.checkpoint", lambda run: save_checkpoint(run / "learner.checkpoint", Checkpoint(1, []))),
    ],
)
def test_a_file_that_the_machine_does_not_give_is_not_called_damaged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, read: Callable[[Path], object], number: int
) -> None:
    (tmp_path / name).write_bytes(b"whole")
    opened = os.open

    def refuse(path: str | Path, flags: int, *mode: int) -> int:
        if Path(path).name == name:
            raise OSError(number, os.strerror(number), str(path))
        return opened(path, flags, *mode)

    with monkeypatch.context() as patched:
        patched.setattr(os, "open", refuse)
        with pytest.raises(RunDirError, match=rf"cannot be read \({os.strerror(number)}\)") as caught:
            read(tmp_path)
    assert "remove" not in str(caught.value)
    assert [path.read_bytes() for path in tmp_path.iterdir()] == [b"whole"]


def disk_with_ext4(tmp_path: Path) -> Path:
    """Mount a file system whose image is `tmp_path / "image"`."""
    disk, image = tmp_path / "disk", tmp_path / "image"
    disk.mkdir()
    with image.open("wb") as file:
        file.truncate(128 << 20)
    for command in (["mkfs.ext4", "-q", "-F", str(image)], ["mount", "-o", "loop", str(image), str(disk)]):
        made = subprocess.run(command, capture_output=True, text=True, check=False)
        if made.returncode:
            pytest.skip(f"needs a disk of its own: {made.stderr.strip()}")
    return disk


@pytest.mark.thorough
@pytest.mark.slow
def test_a_file_system_that_was_aborted_costs_no_step_that_redis_or_the_checkpoint_knows(tmp_path: Path) -> None:
    """ext4 is read-only at once. What it had not written yet, recorders among it, is zeros once it is repaired."""
    disk = disk_with_ext4(tmp_path)
    run = disk / "run"
    settings = ["--env", "CartPole-v1", "--workers", "2", "--num-envs", "8", "--set", "learner.epochs=1"]
    try:
        with (tmp_path / "said").open("w+") as said:
            fleet = subprocess.Popen([*UP, *settings, "--run-dir", str(run), "--timeout-s", "200"], stderr=said)
            wait_until((run / "learner.checkpoint.previous").exists, "checkpoints")
            subprocess.run(["mount", "-o", "remount,abort", str(disk)], check=True)
            assert fleet.wait(120) == ExitCode.RUN_DIR
        text = (tmp_path / "said").read_text()
        assert "Read-only file system" in text.splitlines()[-1]
        assert "broker stopped with exit code 0" in text
        assert "Traceback" not in text
        subprocess.run(["umount", str(disk)], check=True)
        repaired = tmp_path / "repaired"  # a copy: a sandbox of another test may still have the aborted one mounted
        shutil.copy(tmp_path / "image", repaired)
        subprocess.run(["e2fsck", "-fy", str(repaired)], capture_output=True, check=False)
        subprocess.run(["mount", "-o", "loop", str(repaired), str(disk)], check=True)
        again = [*UP, "--resume", str(run), "--until-steps", "2000", "--json"]
        resumed = subprocess.run(again, capture_output=True, text=True, check=False)
        assert resumed.returncode == 0, resumed.stderr
        assert orjson.loads(resumed.stdout)["balanced"], resumed.stderr
        deep = [sys.executable, "-m", "headrace.deploy", "audit", "--deep", str(run)]
        audit = subprocess.run(deep, capture_output=True, text=True, check=False)
        assert audit.returncode == 0, audit.stdout + audit.stderr
    finally:
        subprocess.run(["umount", "--lazy", str(disk)], check=True)


@pytest.mark.thorough
@pytest.mark.slow
def test_a_disk_that_does_not_answer_is_said_and_the_fleet_goes_on_with_it(tmp_path: Path) -> None:
    disk = disk_with_ext4(tmp_path)
    said = tmp_path / "said"
    settings = ["--env", "CartPole-v1", "--workers", "1", "--num-envs", "4", "--run-dir", str(disk / "run"), "--json"]
    try:
        with said.open("w") as words, (tmp_path / "end").open("w") as end:
            fleet = subprocess.Popen([*UP, *settings, "--timeout-s", "200"], stdout=end, stderr=words)
            wait_until((disk / "run" / "learner.checkpoint").exists, "a checkpoint")
            subprocess.run(["fsfreeze", "--freeze", str(disk)], check=True)
            try:
                wait_until(lambda: "stood still for 10 s in " in said.read_text(), "a sentence on the disk")
            finally:
                subprocess.run(["fsfreeze", "--unfreeze", str(disk)], check=True)
            fleet.terminate()
            assert fleet.wait(120) == 0, said.read_text()
        assert orjson.loads((tmp_path / "end").read_bytes())["balanced"]
    finally:
        subprocess.run(["umount", "--lazy", str(disk)], check=True)


@pytest.mark.thorough
@pytest.mark.slow
def test_a_fleet_whose_run_directory_becomes_immutable_is_drained_and_can_be_resumed(tmp_path: Path) -> None:
    run = tmp_path / "run"
    settings = ["--env", "CartPole-v1", "--workers", "1", "--num-envs", "4", "--set", "learner.steps_per_update=512"]
    with (tmp_path / "said").open("w+") as said:
        fleet = subprocess.Popen(
            [*UP, *settings, "--run-dir", str(run), "--timeout-s", "200"], stdout=said, stderr=said, text=True
        )
        wait_until((run / "learner.checkpoint").exists, "a checkpoint")
        made = subprocess.run(["chattr", "+i", str(run)], capture_output=True, text=True, check=False)
        if made.returncode:
            fleet.terminate()
            fleet.wait(120)
            pytest.skip(f"needs chattr: {made.stderr.strip()}")
        try:
            assert fleet.wait(120) == ExitCode.RUN_DIR
        finally:
            subprocess.run(["chattr", "-i", str(run)], check=True)
    text = (tmp_path / "said").read_text()
    assert "the checkpoint cannot be written (Operation not permitted); repair that" in text
    assert "broker stopped with exit code 0" in text
    assert "Traceback" not in text
    again = subprocess.run(
        [*UP, "--resume", str(run), "--until-steps", "2000", "--json"], capture_output=True, text=True, check=False
    )
    assert again.returncode == 0, again.stderr
    assert orjson.loads(again.stdout)["balanced"]
