"""The main program of the scripts here that bring a learner of their own: a fleet without one, and their training."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

Train = Callable[[Path, int, float], dict[str, Any]]
"""(run directory, seed, goal) -> the result to print."""


def run(script: str, train: Train, env: str, *, num_envs: int, length: int) -> None:
    """Start `headrace up` with the module `build` of `script`, train by `SEED RETURN` of the command line, end it.

    Each of two workers ships `length` steps of `num_envs` envs at a time.
    """
    seed, goal, file = int(sys.argv[1]), float(sys.argv[2]), Path(script).resolve()
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    environment = os.environ | {"PYTHONPATH": f"{file.parent}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"}
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "headrace", "up", "--env", env, "--workers", "2", "-q", "--seed", str(seed)]
        command += ["--num-envs", str(num_envs), "--run-dir", folder, "--set", "learner.enabled=false"]
        command += ["--set", f"sampling.rollout_fragment_length={length}", "--set", f"module.build={file.stem}:build"]
        with subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL) as fleet:
            try:
                print(json.dumps(train(Path(folder), seed, goal)))
            finally:
                fleet.terminate()
