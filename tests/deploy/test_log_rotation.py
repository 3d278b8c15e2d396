"""Log files of a run stay bounded while processes that hold them open go on writing."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from headrace.deploy.annexes.chaos.deep_audit import read_files
from headrace.deploy.process.child import Child
from headrace.deploy.terminal import log_rotation
from headrace.deploy.terminal.log_rotation import LogRotation, rotate, rotated_path
from support.waiting import wait_until

COUNTING = """
import os, pathlib, sys, time
for number in range(200_000):
    os.write(1, b"line %09d\\n" % number)  # one write a line: print has two where PYTHONUNBUFFERED is set
    if number % 1000 == 0:
        time.sleep(0.001)
pathlib.Path(sys.argv[1], "counted").touch()
while not pathlib.Path(sys.argv[1], "go on").exists():
    time.sleep(0.01)
print("error: it ended as it should", flush=True)
sys.exit(3)
"""


def test_a_log_that_is_cut_under_a_writing_process_has_whole_lines_in_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(log_rotation, "INTERVAL_S", 0.01)
    logs, most = tmp_path / "logs", 1 << 18
    monkeypatch.setattr(log_rotation, "MOST_BYTES", most)
    logs.mkdir()
    path = logs / "noisy.log"
    path.write_text("of an earlier life\n" * 20_000)
    with LogRotation(logs):
        child = Child([sys.executable, "-c", COUNTING, str(tmp_path)], path)
        wait_until((tmp_path / "counted").exists, "all lines")
    (tmp_path / "go on").touch()
    assert child.reap() == 3
    assert path.stat().st_size <= most
    assert rotated_path(path).stat().st_size <= most + (1 << 20)
    lines = (rotated_path(path).read_text() + path.read_text()).splitlines()
    numbers = [int(line.removeprefix("line ")) for line in lines[1:-1]]
    assert numbers == sorted(set(numbers))
    assert len(numbers) > 10_000

    assert child.last_error() == "it ended as it should"
    rotate(path, most)
    assert child.last_error() == "it ended as it should"
    assert {file.name for file in logs.iterdir()} == {"noisy.log", "noisy.log.1"}


def test_the_copy_has_no_part_of_a_line_that_is_being_written(tmp_path: Path) -> None:
    path = tmp_path / "a.log"
    path.write_text("whole\n" * 10 + "par")
    rotate(path, 1000)
    assert rotated_path(path).read_text() == "whole\n" * 10
    path.write_text("a progress bar without an end")
    rotate(path, 8)
    assert rotated_path(path).read_text() == "t an end"


def test_without_room_for_the_copy_the_log_stays(tmp_path: Path) -> None:
    path = tmp_path / "a.log"
    path.write_text("x" * 1000)
    (tmp_path / ".a.log.new").symlink_to("/dev/full")
    with pytest.raises(OSError, match="symbolic"):
        rotate(path, 10)
    assert path.read_text() == "x" * 1000
    assert not rotated_path(path).exists()


def test_the_deep_audit_reads_both_files_of_the_supervisor(tmp_path: Path) -> None:
    (tmp_path / "logs").mkdir()
    log = tmp_path / "logs" / "supervisor.log"
    log.write_text('{"message": "worker 0 incarnation 1 took 1,024 steps"}\n')
    rotate(log, 1 << 16)
    with log.open("a") as file:
        file.write('{"message": "worker 0 incarnation 2 took 5 steps"}\n')
    assert read_files(tmp_path, "any").log == {(0, 1): 1024, (0, 2): 5}
