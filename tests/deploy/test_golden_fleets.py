"""A run directory of each release goes on with today's code, whether its fleet had ended or was killed."""

from __future__ import annotations

import subprocess
import sys
import tarfile
from pathlib import Path

import golden_fleets
import orjson
import pytest

import headrace

RECORDED = sorted(golden_fleets.FOLDER.glob("fleets_*.tar.xz"))


def headrace_command(*words: str | Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "headrace.deploy", *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_this_version_has_a_record() -> None:
    assert golden_fleets.path_of(headrace.__version__) in RECORDED


@pytest.mark.processes
@pytest.mark.parametrize("name", golden_fleets.RUNS)
@pytest.mark.parametrize("record", RECORDED, ids=lambda path: path.name)
def test_a_recorded_run_is_read_and_goes_on(tmp_path: Path, record: Path, name: str) -> None:
    with tarfile.open(record) as archive:
        archive.extractall(tmp_path, filter="data")
    run = tmp_path / name
    before = golden_fleets.steps_in(run)
    played = headrace_command("evaluate", run, "--episodes", "2", "--json")
    assert orjson.loads(played.stdout)["episodes"] == 2, played.stderr

    resumed = headrace_command("up", "--resume", run, "--until-steps", "1000", "--timeout-s", "100", "--json")
    assert resumed.returncode == 0, resumed.stderr
    summary = orjson.loads(resumed.stdout)
    assert summary["balanced"]
    assert summary["goal_reached"]
    assert golden_fleets.steps_in(run) >= before + 1000
    audit = headrace_command("audit", "--strict", "--run-dir", run)
    assert audit.returncode == 0, audit.stdout + audit.stderr
