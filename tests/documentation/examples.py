"""The learners of `docs/examples/`, started as their docstrings say."""

from __future__ import annotations

import ast
import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

EXAMPLES_FOLDER = Path(__file__).parents[2] / "docs/examples"
EXAMPLES = tuple(sorted(path.stem for path in EXAMPLES_FOLDER.glob("*.py") if "headrace up" in path.read_text()))
"""The examples that run beside a fleet. The others start one of their own."""


def words_of(example: str) -> list[str]:
    """Return the arguments of the `headrace up` in the example's docstring, without the run directory."""
    said = ast.get_docstring(ast.parse((EXAMPLES_FOLDER / f"{example}.py").read_text())) or ""
    [command] = re.findall(r"^ +headrace up (.*)$", said.replace("\\\n", ""), re.MULTILINE)
    words = shlex.split(command)
    at = words.index("--run-dir")
    return words[:at] + words[at + 2 :]


@contextmanager
def learner_of(example: str, run_dir: Path) -> Iterator[subprocess.Popen[str]]:
    """The example as a process, or as two ranks; what it says is read from its `stdout`."""
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "--max-restarts", "3"]
    command = [sys.executable, *(launcher if "ddp" in example else []), f"{example}.py", str(run_dir)]
    env = {**os.environ, "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    with subprocess.Popen(
        command, cwd=EXAMPLES_FOLDER, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        yield process
        kill(process)


def kill(learner: subprocess.Popen[str]) -> None:
    """Kill the learner with all its ranks. They would outlive their launcher, and might commit once more."""
    ranks = Path(f"/proc/{learner.pid}/task/{learner.pid}/children").read_text() if learner.poll() is None else ""
    learner.kill()
    for rank in ranks.split():
        with suppress(ProcessLookupError):
            os.kill(int(rank), signal.SIGKILL)
    learner.wait()
