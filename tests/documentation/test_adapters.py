"""The blocks of the pages about other libraries that need more than a run: another library, or a program to change."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections import deque
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from documentation.blocks import blocks_of
from documentation.story import Story

from bench.sb3_env_costs import COSTS_MS, NUM_ENVS, WORKERS, Pace
from headrace.deploy.run.key_pairs import make_keys
from headrace.workers import EnvRunnerConfig, GymVectorEnv
from support.ports import free_port

GUIDES = Path(__file__).parents[2] / "docs/guides"
LEARNERS, LOOPS = GUIDES / "adapters.md", GUIDES / "env-loops.md"
FROM_SB3 = GUIDES.parent / "coming-from/sb3.md"


@pytest.mark.slow
@pytest.mark.thorough
@pytest.mark.parametrize(
    ("needs", "text", "given"),
    [
        ("torchrl", "TensorDictReplayBuffer(", "update"),
        ("ray.rllib.env.single_agent_episode", "learner.update(episodes=to_episodes(batch))", "learner"),
    ],
    ids=["torchrl", "rllib"],
)
def test_a_block_of_another_library_trains_from_a_fleet(tmp_path: Path, needs: str, text: str, given: str) -> None:
    library = {"torchrl": "headrace[torchrl]"}.get(needs, "ray[rllib]")
    pytest.importorskip(needs, reason=f"not installed; pip install '{library}'", exc_type=ImportError)
    fleet, plain, its = (
        next(block for block in blocks_of(LEARNERS) if part in block.text)
        for part in ("headrace up", "DataLoader(", text)
    )
    with Story(tmp_path, []) as story:
        for block in (fleet, plain, replace(its, marks={"given": given})):  # the second one publishes weights
            story.run(block)


@pytest.mark.processes
def test_the_env_hosts_of_the_page_serve_its_loop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    port = free_port()
    make_keys(tmp_path / "keys")
    monkeypatch.chdir(tmp_path)
    loop, hosts = (
        next(block for block in blocks_of(LOOPS) if part in block.text)
        for part in ('env_placement="remote"', "headrace env-host --connect")
    )
    names = {"EnvRunnerConfig": EnvRunnerConfig, "GymVectorEnv": GymVectorEnv}
    with ExitStack() as ends:
        for number, line in enumerate(hosts.text.splitlines()):
            command = [
                sys.executable,
                "-m",
                "headrace.deploy",
                *line.replace("LOOP:5800", f"127.0.0.1:{port}").split()[1:],
            ]
            log = ends.enter_context((tmp_path / f"host-{number}.log").open("wb"))
            process = ends.enter_context(subprocess.Popen(command, stdout=log, stderr=log))
            ends.callback(process.terminate)
        exec(loop.text.replace("5800", str(port)), names)  # noqa: S102 - the page is our own
        envs: Any = names["envs"]
        ends.callback(envs.close)
        envs.reset(seed=1)
        _, rewards, *_ = envs.step(envs.action_space.sample())
        assert rewards.tolist() == [1.0] * 8


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
    (diff,) = (block.text for block in blocks_of(LOOPS) if block.language == "diff")
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
            [block] = [block for block in blocks_of(LOOPS) if f"\n{start}" in block.text and block.is_run]
            story.run(block)


@pytest.mark.processes
def test_the_program_of_the_sb3_page_trains_a_model_on_a_fleet(tmp_path: Path) -> None:
    [block] = [block for block in blocks_of(FROM_SB3) if "headrace.fleet(" in block.text]
    assert "in updates(model, stream, weights," in block.text
    with Story(tmp_path, []) as story:
        story.run(block)
    assert (tmp_path / "cartpole.zip").is_file()
    assert list(tmp_path.glob("runs/*/learner.checkpoint"))


def test_the_sb3_page_has_the_ratio_of_each_cost_and_the_envs_of_the_bench() -> None:
    text = FROM_SB3.read_text()
    costs = "".join(f" {cost} ms |" for cost in COSTS_MS)
    assert re.search(
        rf"^\| a step takes longer by \|{re.escape(costs)}\n.*\n\| fleet / SB3 \|( \d\.\d\d \|){{{len(COSTS_MS)}}}$",
        text,
        re.M,
    )
    assert f"SB3 has {NUM_ENVS} envs, the fleet {WORKERS * NUM_ENVS}." in text


def test_neither_side_of_the_sb3_bench_counts_its_first_updates(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bench.sb3_env_costs.time.monotonic", iter([0.0, 10.0, 20.0, 30.0, 31.0, 32.0]).__next__)
    pace = Pace(seconds=2.0)
    assert [pace.update(steps) for steps in (256, 512, 768, 1024, 1280, 1536)] == [False] * 5 + [True]
    assert pace.rate == 256.0
