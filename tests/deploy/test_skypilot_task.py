"""The example task in deploy/skypilot can be loaded, and its scripts are scripts."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

yaml = pytest.importorskip("yaml")

TASK = Path(__file__).resolve().parents[2] / "deploy" / "skypilot" / "workers.yaml"


def test_the_task_has_only_keys_that_skypilot_knows() -> None:
    task = yaml.safe_load(TASK.read_text())
    assert set(task) <= {"name", "num_nodes", "resources", "envs", "file_mounts", "setup", "run"}
    assert all(isinstance(value, str) for value in task["envs"].values())
    for name in task["envs"]:
        assert f'"${name}"' in task["run"]


@pytest.mark.skipif(shutil.which("shellcheck") is None, reason="needs shellcheck")
@pytest.mark.parametrize("part", ["setup", "run"])
def test_shellcheck_accepts_the_scripts_of_the_task(part: str) -> None:
    script = "#!/bin/bash\n" + yaml.safe_load(TASK.read_text())[part]
    told = subprocess.run(
        ["shellcheck", "-e", "SC2088", "-"], input=script, capture_output=True, text=True, check=False
    )
    assert told.returncode == 0, told.stdout


def test_skypilot_accepts_the_task(monkeypatch: pytest.MonkeyPatch) -> None:
    sky = pytest.importorskip("sky")
    monkeypatch.chdir(TASK.parent)
    assert sky.Task.from_yaml(str(TASK)).num_nodes == 4
