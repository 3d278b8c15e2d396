"""Our multi-agent sampler beside limit 6, in turns, in one process on one core: only ratios of a run mean anything."""

from __future__ import annotations

import statistics
import time
from typing import Any

import limits
import torch
from multi_cartpole import MultiCartPole

from headrace.workers import EnvRunnerConfig, MultiAgentEnvRunner

MARKS = {1: 0.6, 8: 0.7, 64: 0.7}
"""Least ratio to limit 6 that our sampler is to reach, by number of envs."""
AGENTS = (2, 4)


class Headrace:
    """`sample_fragment` of one policy for all agents, with full bookkeeping."""

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
        """Sample for `seconds`; env steps a second."""
        before, start = self._runner.totals.env_steps, time.perf_counter()
        while True:
            self._runner.sample_fragment()
            elapsed = time.perf_counter() - start
            if elapsed >= seconds:
                return (self._runner.totals.env_steps - before) / elapsed


def measure(widths: list[int], seconds: float, rounds: int) -> list[dict[str, Any]]:
    """One row for each loop, width and number of agents: median rate, and ratio to limit 6 of the same round."""
    torch.set_num_threads(1)
    rows = []
    for agents in AGENTS:
        for width in widths:
            loops: dict[str, Any] = {"limit 6": limits.limit_6(width, agents), "headrace": Headrace(width, agents)}
            for loop in loops.values():
                loop.run(seconds / 4)
            rates = [{name: loop.run(seconds) for name, loop in loops.items()} for _ in range(rounds)]
            rows += [_row(name, agents, width, rates) for name in loops]
    return rows


def _row(name: str, agents: int, width: int, rates: list[dict[str, float]]) -> dict[str, Any]:
    ratios = [rate[name] / rate["limit 6"] for rate in rates]
    return {
        "loop": name,
        "setting": f"{width} envs of {agents} agents",
        "env_steps_per_s": statistics.median(rate[name] for rate in rates),
        "ratio": statistics.median(ratios),
        "ratio_low": min(ratios),
        "ratio_high": max(ratios),
        "mark": MARKS.get(width) if name == "headrace" else None,
    }
