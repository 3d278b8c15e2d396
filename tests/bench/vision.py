"""Actions a second of the vision policy of docs/guides/large-policies.md, whose envs live on one or two env hosts.

One runner, in this process, batches the envs of its hosts, which are processes of their own on this machine. The limit
is a bare loop of the same module and as many envs in one process: no books, no columns, no other process.

The rows `a cpu-s` are actions for each second of processor time, of all processes; `of the worker`: without the hosts'.

PYTHONPATH=tests python -m bench.vision
"""

from __future__ import annotations

import importlib
import os
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path
from time import process_time
from types import ModuleType
from typing import Any

import numpy as np
import torch
from documentation.blocks import Page

from bench.processes import Processes
from bench.table import Row, rows_of, show
from bench.turns import Turn, in_turns
from headrace.schemas.chunks.spaces import Spaces
from headrace.workers import EnvRunnerConfig, SingleAgentEnvRunner
from headrace.workers.envs.remote.host.process import run_env_host
from headrace.workers.envs.spaces import convert

WIDTHS = (8, 64)
HOSTS = (1, 2)
_PAGE = Path(__file__).parents[2] / "docs/guides/large-policies.md"


def measure(seconds: float, rounds: int) -> list[Row]:
    """Return rows of the bare loop and of each number of hosts, for each number of envs."""
    torch.set_num_threads(1)
    rows = []
    for width in WIDTHS:
        with Processes() as processes, ExitStack() as stack:
            vision = _module_of_the_page(processes.folder)
            arms: dict[str, Any] = {"bare loop": Bare(vision, width)}
            for hosts in HOSTS:
                arms[f"{hosts} host{'s' * (hosts > 1)}"] = stack.enter_context(Hosted(processes, width, hosts))
            turns = in_turns(arms, seconds, rounds)
        units = {"actions/s": turns, "a cpu-s": [_by_cpu(turn) for turn in turns]}
        for unit, each in units.items():
            rows += rows_of("vision", f"{width} envs", unit, each, "bare loop", {})
        own = [{name: Turn(arm.per_own_cpu_s, arm.per_own_cpu_s) for name, arm in arms.items()}]
        rows += rows_of("vision", f"{width} envs", "of the worker", own, "bare loop", {})
    return rows


def _by_cpu(turn: dict[str, Turn]) -> dict[str, Turn]:
    return {name: Turn(one.per_cpu_s, one.per_cpu_s) for name, one in turn.items()}


def _module_of_the_page(folder: Path) -> ModuleType:
    """Import the page's vision.py, from a folder in which processes started later find it too."""
    (folder / "vision.py").write_text(Page(_PAGE).block_with("# vision.py"))
    sys.path.insert(0, str(folder))
    sys.modules.pop("vision", None)
    return importlib.import_module("vision")


class Acting:
    """An arm that notes the processor time of this process alone."""

    def __init__(self) -> None:
        self.pids: dict[str, int] = {}
        self._actions, self._spent = 0, 0.0

    @property
    def per_own_cpu_s(self) -> float:
        """Actions for each second of processor time of this process, in all turns."""
        return self._actions / self._spent

    def begin(self) -> None:
        """Do nothing: hosts wait for the runner."""

    end = begin

    def take(self) -> int:
        """Return how many actions were chosen."""
        before = process_time()
        actions = self.act()
        self._spent += process_time() - before
        self._actions += actions
        return actions

    def act(self) -> int:
        """Choose actions, and return how many."""
        raise NotImplementedError


class Bare(Acting):
    """The module, and envs in a list."""

    def __init__(self, vision: ModuleType, width: int) -> None:
        super().__init__()
        self._envs = [vision.Pictures() for _ in range(width)]
        env = self._envs[0]
        observation, action = (convert(space, "it") for space in (env.observation_space, env.action_space))
        self._module = vision.Vision(Spaces(observation=observation, action=action))
        self._random = np.random.default_rng(0)
        self._seen = np.stack([env.reset(seed=number)[0] for number, env in enumerate(self._envs)])

    def act(self) -> int:
        """Make one pass and one step of each env."""
        noise = torch.from_numpy(self._random.random((len(self._envs), 1), np.float32))
        answer = self._module.forward_exploration({"obs": torch.from_numpy(self._seen), "noise": noise})
        for row, (env, action) in enumerate(zip(self._envs, answer["actions"].tolist(), strict=True)):
            self._seen[row], _, terminated, truncated, _ = env.step(action)
            if terminated or truncated:
                self._seen[row], _ = env.reset()
        return len(self._envs)


class Hosted(Acting):
    """One runner here, and its envs in processes of env hosts, in equal shares."""

    def __init__(self, processes: Processes, width: int, hosts: int) -> None:
        super().__init__()
        folder = tempfile.mkdtemp(dir=processes.folder)
        self.pids = {
            f"host {number}": processes.start(_lend, f"ipc://{folder}/envs-0", width // hosts)
            for number in range(hosts)
        }
        self._steps = 8 * width
        self._runner = SingleAgentEnvRunner(
            EnvRunnerConfig(
                env="vision:Pictures",
                module="vision:Vision",
                num_envs=width,
                seed=0,
                env_placement="remote",
                socket_dir=folder,
                rollout_fragment_length=32,
            )
        )

    def act(self) -> int:
        """Sample eight steps of each env."""
        return sum(len(chunk) for chunk in self._runner.sample(num_timesteps=self._steps))

    def __enter__(self) -> Hosted:
        return self

    def __exit__(self, *_: object) -> None:
        self._runner.stop()


def _lend(endpoint: str, num_envs: int) -> None:
    run_env_host(EnvRunnerConfig(env="vision:Pictures", num_envs=num_envs), endpoint, None)


if __name__ == "__main__":
    print(f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}")
    show(measure(4.0, 3))
