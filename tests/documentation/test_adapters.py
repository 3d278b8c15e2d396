"""The blocks of the page about other libraries that need more than a run: another library, or a program to change."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from documentation.blocks import blocks_of
from documentation.story import Story

PAGE = Path(__file__).parents[2] / "docs/guides/adapters.md"


@pytest.mark.slow
@pytest.mark.thorough
def test_torchrl_trains_from_a_fleet_as_the_page_shows(tmp_path: Path) -> None:
    pytest.importorskip("torchrl", reason="torchrl is not installed; pip install 'headrace[torchrl]'")
    fleet, plain, torchrl = (
        next(block for block in blocks_of(PAGE) if text in block.text)
        for text in ("headrace up", "DataLoader(", "TensorDictReplayBuffer(")
    )
    with Story(tmp_path, []) as story:
        for block in (fleet, plain, replace(torchrl, marks={"given": "update"})):
            story.run(block)


CLEANRL_FORM = Path(__file__).parent / "cleanrl_form.py"
MOST_CHANGED_LINES = 10


def applied(diff: str, text: str) -> str:
    """The text after the diff, whose hunks start with "@@". Each must fit at one place."""
    for hunk in re.split(r"^@@.*\n", diff, flags=re.MULTILINE):
        lines = hunk.splitlines(keepends=True)
        old, new = ("".join(line[1:] for line in lines if line[0] in kinds) for kinds in (" -", " +"))
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    return text


@contextmanager
def changed_program(folder: Path, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    """The program in CleanRL's form with the page's diff, as a process that tells each episode's return."""
    (diff,) = (block.text for block in blocks_of(PAGE) if block.language == "diff")
    assert len(re.findall(r"^[-+]", diff, re.MULTILINE)) <= MOST_CHANGED_LINES
    program = folder / "ppo.py"
    program.write_text(applied(diff, CLEANRL_FORM.read_text()))
    with subprocess.Popen([sys.executable, program, *arguments], stdout=subprocess.PIPE, text=True) as process:
        yield process
        process.kill()


def returns_of(process: subprocess.Popen[str]) -> Iterator[float]:
    assert process.stdout is not None
    return (float(line.rpartition("=")[2]) for line in process.stdout if "episodic_return" in line)


def env_process_of(pid: int) -> int:
    """A child of the process in which envs live."""
    children = map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split())
    return next(child for child in children if b"envs.process.child" in Path(f"/proc/{child}/cmdline").read_bytes())


@pytest.mark.processes
def test_a_program_in_cleanrls_form_trains_after_the_diff_of_the_page(tmp_path: Path) -> None:
    with changed_program(tmp_path, "--total-timesteps", "1024", "--num-steps", "64") as process:
        returns = list(returns_of(process))
        assert process.wait(60) == 0
    assert len(returns) > 10
    assert all(value >= 1 for value in returns)


@pytest.mark.slow
@pytest.mark.thorough
def test_cleanrls_form_learns_cartpole_though_a_process_of_envs_is_killed(tmp_path: Path) -> None:
    newest, killed = deque[float](maxlen=100), 0
    with changed_program(tmp_path) as process:
        for count, value in enumerate(returns_of(process)):
            newest.append(value)
            if count == 300:
                killed = env_process_of(process.pid)
                os.kill(killed, signal.SIGKILL)
            if len(newest) == 100 and np.mean(newest) >= 475:
                break
        else:
            pytest.fail(f"the program ended with {process.wait()} and a mean return of {np.mean(newest):.0f}")
    assert killed


@pytest.mark.processes
def test_the_loops_that_step_their_envs_run_as_the_page_shows(tmp_path: Path) -> None:
    with Story(tmp_path, []) as story:
        for start in ("envs = GymVectorEnv(EnvRunnerConfig(", "with_returns = VecMonitor("):
            [block] = [block for block in blocks_of(PAGE) if f"\n{start}" in block.text and block.is_run]
            story.run(block)
