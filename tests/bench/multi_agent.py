"""Our multi-agent sampler beside limit 6, in turns, in one process on one core: only ratios of a run mean anything."""

from __future__ import annotations

import time
from typing import Any

import torch

from bench import limits
from bench.multi_cartpole import MultiCartPole
from bench.table import Row, rows_of
from bench.turns import loops_in_turns
from headrace.workers import EnvRunnerConfig, MultiAgentEnvRunner

MARKS = {1: 0.6, 8: 0.7, 64: 0.9}
"""The target: our sampler's least ratio to limit 6, by number of envs."""
AGENTS = (2, 4)


class Headrace:
    """`sample_fragment` with one policy for all agents and all counters."""

    def __init__(self, width: int, agents: int) -> None:
        config = EnvRunnerConfig(
            env=MultiCartPole,
            env_config={"agents": agents},
            num_envs=width,
            seed=0,
            rollout_fragment_length=limits.HORIZON,
            policies=["shared"],
        )
        self._runner = MultiAgentEnvRunner(config)

    def run(self, seconds: float) -> float:
        """Sample for `seconds`; return env steps per second."""
        before, start = self._runner.totals.env_steps, time.perf_counter()
        while True:
            self._runner.sample_fragment()
            elapsed = time.perf_counter() - start
            if elapsed >= seconds:
                return (self._runner.totals.env_steps - before) / elapsed


def measure(widths: list[int], seconds: float, rounds: int) -> list[Row]:
    """Return rows of both loops for each width and number of agents."""
    torch.set_num_threads(1)
    rows = []
    for agents in AGENTS:
        for width in widths:
            loops: dict[str, Any] = {"limit 6": limits.limit_6(width, agents), "headrace": Headrace(width, agents)}
            turns = loops_in_turns(loops, seconds, rounds)
            case, marks = f"{width} envs of {agents} agents, one core", {"headrace": MARKS.get(width, 0.0)}
            rows += rows_of("multi-agent", case, "env steps/s", turns, "limit 6", marks)
    return rows
