"""The example task in deploy/skypilot can be loaded, and its scripts are scripts."""

from __future__ import annotations

import os
import re
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from headrace.deploy.run.key_pairs import make_keys
from support.waiting import TIMEOUT_S

yaml = pytest.importorskip("yaml")

TASK = Path(__file__).resolve().parents[2] / "deploy" / "skypilot" / "workers.yaml"


def test_the_task_has_only_keys_that_skypilot_knows() -> None:
    task = yaml.safe_load(TASK.read_text())
    assert set(task) <= {"name", "num_nodes", "resources", "envs", "file_mounts", "setup", "run"}
    assert all(isinstance(value, str) for value in task["envs"].values())
    for name in task["envs"]:
        assert f'"${name}"' in task["run"]


def test_setup_installs_what_the_task_brings_along() -> None:
    task = yaml.safe_load(TASK.read_text())
    [wheels] = re.findall(r"pip install --quiet (\S+)/\*\.whl$", task["setup"], re.MULTILINE)
    assert wheels in task["file_mounts"]


@pytest.mark.skipif(shutil.which("shellcheck") is None, reason="needs shellcheck")
@pytest.mark.parametrize("part", ["setup", "run"])
def test_shellcheck_accepts_the_scripts_of_the_task(part: str) -> None:
    script = "#!/bin/bash\n" + yaml.safe_load(TASK.read_text())[part]
    told = subprocess.run(
        ["shellcheck", "-e", "SC2088", "-"], input=script, capture_output=True, text=True, check=False
    )
    assert told.returncode == 0, told.stdout


@pytest.mark.thorough
@pytest.mark.processes
def test_the_doctors_line_examines_a_node_as_one_of_workers(tmp_path: Path, free_port: int) -> None:
    (line,) = re.findall(r"^#   sky exec headrace-workers '(.*)'$", TASK.read_text(), re.MULTILINE)
    fleet, program = tmp_path / "fleet", tmp_path / "headrace" / "bin" / "headrace"
    make_keys(fleet / "keys")
    program.parent.mkdir(parents=True)
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -m headrace.deploy "$@"\n')
    program.chmod(0o755)
    with socket.create_server(("127.0.0.1", free_port)), socket.create_server(("127.0.0.1", free_port + 2)):
        (fleet / "fleet.toml").write_text(f'[broker]\nhost = "0.0.0.0"\nport = {free_port}\n')
        told = subprocess.run(
            ["bash", "-c", line.replace("broker.example", "localhost")],
            env={**os.environ, "HOME": str(tmp_path)},
            capture_output=True,
            text=True,
            check=False,
            timeout=TIMEOUT_S,
        )
    assert told.returncode == 0, told.stdout + told.stderr
    assert told.stdout.count("answers; our address there is 127.0.0.1") == len(("worker", "weights"))
    assert "needed for a worker" in told.stdout


def test_skypilot_accepts_the_task(monkeypatch: pytest.MonkeyPatch) -> None:
    sky = pytest.importorskip("sky")
    monkeypatch.chdir(TASK.parent)
    assert sky.Task.from_yaml(str(TASK)).num_nodes == 4
