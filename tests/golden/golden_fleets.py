"""Runs of each release, which every later version reads and resumes.

    python tests/golden/golden_fleets.py

writes `fleets_VERSION.tar.xz` of the version that the code has, and nothing if it is there. Run it for a release. The
archive has two run directories, each with the data of its own Redis: `drained`, which has reached its goal, and
`killed`, whose processes all ended by SIGKILL while they sampled and trained.
"""

from __future__ import annotations

import subprocess
import sys
import tarfile
import tempfile
import time
from pathlib import Path

import orjson

import headrace

FOLDER = Path(__file__).parent
RUNS = ("drained", "killed")
_UP = [sys.executable, "-m", "headrace.deploy", "up", "--env", "CartPole-v1", "--workers", "2", "--num-envs", "4"]
_SMALL = ["--seed", "0", "--no-dashboard", "--set", "module.config.hidden=[8]", "--set", "learner.epochs=1"]
_STEPS = 4000


def path_of(version: str) -> Path:
    """The record of a version."""
    return FOLDER / f"fleets_{version}.tar.xz"


def main() -> None:
    """Write the record of this version, if there is none."""
    path = path_of(headrace.__version__)
    if path.exists():
        return
    with tempfile.TemporaryDirectory() as folder:
        for name in RUNS:
            record(Path(folder), name)
        with tarfile.open(path, "w:xz") as archive:
            for name in RUNS:
                archive.add(Path(folder) / name, name)


def record(folder: Path, name: str) -> None:
    """Make the run directory `name`."""
    goal = ["--until-steps", str(_STEPS)] if name == "drained" else []
    with subprocess.Popen([*_UP, *_SMALL, *goal, "--run-dir", name, "--quiet"], cwd=folder) as fleet:
        if not goal:
            while steps_in(folder / name) < _STEPS:
                time.sleep(0.1)
            fleet.kill()  # its processes are killed with it


def steps_in(run: Path) -> int:
    """Return the env steps that the supervisor of a run has noted."""
    try:
        return int(orjson.loads((run / "fleet.json").read_bytes())["env_steps"])
    except FileNotFoundError:
        return 0


if __name__ == "__main__":
    main()
