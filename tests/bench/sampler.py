"""Our sampler beside the limit loops, in turns, in one process on one core: only ratios of one run mean anything.

PYTHONPATH=tests taskset -c 1 python -m bench.sampler [--seconds 0.5] [--rounds 7] [--widths 1 8 64] [--json FILE]
"""

from __future__ import annotations

import argparse
import gc
import json
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from bench import limits
from bench.table import Row, rows_of, show
from bench.turns import loops_in_turns
from headrace.workers import EnvRunnerConfig, SingleAgentEnvRunner

MARKS = {1: 1.85, 8: 1.1, 64: 0.92}
"""Our sampler's least ratio to limit 2, by number of envs, on the slowest machine so far. The ratio depends on the
machine: one commit has 3.94 / 1.74 / 1.05 on one, and 2.1 / 1.21 / 1.0 on another, where torch is the faster part.
"""
LONG_MARKS = {1: 2.0, 8: 1.33, 64: 1.12}
"""The same where episodes last 500 steps."""
NATIVE_MARKS = {64: 0.9, 512: 0.75}
"""The targets for CartPole's own vector, relative to limit 4, and for EnvPool, relative to a bare loop of it."""


class Headrace:
    """`sample_fragment` with all counters, as a worker process calls it between two batches."""

    def __init__(self, width: int, *, balanced: bool = False, random_actions: bool = False, **settings: Any) -> None:
        self._random_actions = random_actions
        settings = {"env": limits.ENV, "seed": 0, "rollout_fragment_length": limits.HORIZON, **settings}
        config = EnvRunnerConfig(num_envs=width, **settings)
        self._runner = SingleAgentEnvRunner(config)
        self.module: Any = self._runner.module
        if balanced:
            module = self.module
            limits.balance(module.trunk[0], module.trunk[2], module.head)

    def run(self, seconds: float) -> float:
        """Sample for `seconds`; return env steps per second."""
        steps = 0
        start = time.perf_counter()
        while True:
            steps += self._runner.sample_fragment(random_actions=self._random_actions).steps
            elapsed = time.perf_counter() - start
            if elapsed >= seconds:
                return steps / elapsed

    def stop(self) -> None:
        """Close its envs."""
        self._runner.stop()


def measure(widths: list[int], seconds: float, rounds: int) -> list[Row]:
    """Return a row for each loop and width: of short episodes by an untrained policy, and of episodes of 500 steps."""
    _be_a_worker()
    rows = []
    for width in widths:
        loops: dict[str, Any] = {
            "limit 1": limits.limit_1(width),
            "limit 2": limits.limit_2(width),
            "limit 3": limits.limit_3(width),
            "limit 5": limits.limit_5(width),
            "headrace": Headrace(width),
        }
        rows += _rows("sampler", f"{width} envs, one core", loops, "limit 2", MARKS.get(width), seconds, rounds)
        loops = {"limit 2": limits.limit_2(width, balanced=True), "headrace": Headrace(width, balanced=True)}
        case = f"{width} envs, one core, episodes of 500"
        rows += _rows("sampler", case, loops, "limit 2", LONG_MARKS.get(width), seconds, rounds)
    return rows


def measure_native(widths: list[int], seconds: float, rounds: int) -> list[Row]:
    """Return rows of CartPole's own vector beside limit 4."""
    _be_a_worker()
    rows = []
    for width in widths:
        ours = Headrace(width, gym_env_vectorize_mode="vector_entry_point")
        loops = {"limit 4": limits.limit_4(width), "headrace": ours}
        rows += _rows("native", f"{width} envs, one core", loops, "limit 4", NATIVE_MARKS.get(width), seconds, rounds)
    return rows


def measure_envpool(widths: list[int], seconds: float, rounds: int) -> list[Row]:
    """Return rows of EnvPool beside a bare loop of it; none where it is not installed."""
    _be_a_worker()
    if find_spec("envpool") is None:
        return []
    rows = []
    for width in widths:
        ours = Headrace(width, env=lambda context: limits.make_envpool(context.num_envs))
        loops = {"envpool": limits.envpool_loop(width), "headrace": ours}
        rows += _rows("envpool", f"{width} envs, one core", loops, "envpool", NATIVE_MARKS.get(width), seconds, rounds)
    return rows


def _be_a_worker() -> None:
    """Set torch up as a worker process does before it samples. The plain loops profit from it too."""
    torch.set_num_threads(1)
    gc.freeze()


def _rows(
    bench: str, case: str, loops: dict[str, Any], limit: str, mark: float | None, seconds: float, rounds: int
) -> list[Row]:
    marks = {} if mark is None else {"headrace": mark}
    return rows_of(bench, case, "env steps/s", loops_in_turns(loops, seconds, rounds), limit, marks)


def main() -> None:
    """Measure, print, and write JSON where asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=0.5, help="length of one turn of one loop")
    parser.add_argument("--rounds", type=int, default=7, help="turns of each loop")
    parser.add_argument("--widths", type=int, nargs="+", default=[1, 8, 64])
    parser.add_argument("--json", type=Path, help="write the rows there")
    args = parser.parse_args()
    rows = measure(args.widths, args.seconds, args.rounds)
    show(rows)
    if args.json:
        args.json.write_text(json.dumps([row.as_json() for row in rows], indent=2))


if __name__ == "__main__":
    main()
