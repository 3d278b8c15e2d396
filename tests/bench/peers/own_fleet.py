"""A fleet without a learner, for the scripts here that bring one of their own."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def own_fleet(
    env: str, module: str, seed: int, *, num_envs: int, length: int, sets: tuple[str, ...] = ()
) -> Iterator[Path]:
    """Start `headrace up`, yield its run directory, and end it.

    Each of two workers ships `length` steps of `num_envs` envs at a time. `module`: "file:build", of a file here.
    """
    here = Path(__file__).resolve().parent
    environment = os.environ | {"PYTHONPATH": f"{here}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"}
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "headrace", "up", "--env", env, "--workers", "2", "-q", "--seed", str(seed)]
        command += ["--num-envs", str(num_envs), "--run-dir", folder]
        settings = (
            "learner.enabled=false",
            f"sampling.rollout_fragment_length={length}",
            f"module.build={module}",
            *sets,
        )
        for setting in settings:
            command += ["--set", setting]
        with subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL) as fleet:
            try:
                yield Path(folder)
            finally:
                fleet.terminate()
