"""Our sampler beside the limit loops, in turns, in one process on one core: only ratios of one run mean anything.

PYTHONPATH=tests taskset -c 1 python -m bench.sampler [--seconds 0.5] [--rounds 7] [--widths 1 8 64] [--json FILE]
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from bench import limits
from headrace.workers import EnvRunnerConfig, SingleAgentEnvRunner

MARKS = {1: 0.8, 8: 0.9, 64: 0.95}
"""The target: our sampler's least ratio to limit 2, by number of envs."""
NATIVE_MARKS = {64: 0.7, 512: 0.7}
"""The targets for CartPole's own vector, relative to limit 4, and for EnvPool, relative to a bare loop of it."""


class Headrace:
    """`sample_fragment` with all counters, as a worker process calls it between two batches."""

    def __init__(self, width: int, **settings: Any) -> None:
        settings = {"env": limits.ENV, "seed": 0, **settings}
        config = EnvRunnerConfig(num_envs=width, rollout_fragment_length=limits.HORIZON, **settings)
        self._runner = SingleAgentEnvRunner(config)

    def run(self, seconds: float) -> float:
        """Sample for `seconds`; return env steps per second."""
        steps = 0
        start = time.perf_counter()
        while True:
            steps += self._runner.sample_fragment().steps
            elapsed = time.perf_counter() - start
            if elapsed >= seconds:
                return steps / elapsed

    def stop(self) -> None:
        """Close its envs."""
        self._runner.stop()


def measure(widths: list[int], seconds: float, rounds: int) -> list[dict[str, Any]]:
    """Return a row for each loop and width: median rate and median ratio to limit 2 in the same round, with spread."""
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
        rows += _compare(loops, "limit 2", MARKS, width, seconds, rounds)
    return rows


def measure_native(widths: list[int], seconds: float, rounds: int) -> list[dict[str, Any]]:
    """Return rows of CartPole's own vector beside limit 4."""
    _be_a_worker()
    rows = []
    for width in widths:
        ours = Headrace(width, gym_env_vectorize_mode="vector_entry_point")
        loops = {"limit 4": limits.limit_4(width), "headrace": ours}
        rows += _compare(loops, "limit 4", NATIVE_MARKS, width, seconds, rounds)
    return rows


def measure_envpool(widths: list[int], seconds: float, rounds: int) -> list[dict[str, Any]]:
    """Return rows of EnvPool beside a bare loop of it; none where it is not installed."""
    _be_a_worker()
    if find_spec("envpool") is None:
        return []
    rows = []
    for width in widths:
        ours = Headrace(width, env=lambda context: limits.make_envpool(context.num_envs))
        loops = {"envpool": limits.envpool_loop(width), "headrace": ours}
        rows += _compare(loops, "envpool", NATIVE_MARKS, width, seconds, rounds)
    return rows


def _be_a_worker() -> None:
    """Set torch up as a worker process does before it samples. The plain loops profit from it too."""
    torch.set_num_threads(1)
    gc.freeze()


def _compare(
    loops: dict[str, Any], limit: str, marks: dict[int, float], width: int, seconds: float, rounds: int
) -> list[dict[str, Any]]:
    for loop in loops.values():
        loop.run(seconds / 4)
    rates = [{name: loop.run(seconds) for name, loop in loops.items()} for _ in range(rounds)]
    rows = []
    for name in loops:
        ratios = [r[name] / r[limit] for r in rates]
        rows.append(
            {
                "loop": name,
                "num_envs": width,
                "env_steps_per_s": statistics.median(r[name] for r in rates),
                "ratio": statistics.median(ratios),
                "ratio_low": min(ratios),
                "ratio_high": max(ratios),
                "mark": marks.get(width) if name == "headrace" else None,
            }
        )
    return rows


def show(rows: list[dict[str, Any]]) -> None:
    """Print the rows as a table."""
    print(f"{'envs':>5} {'loop':<10} {'env steps/s':>12} {'to limit':>11}  {'low..high':<12} mark")
    for row in rows:
        spread = f"{row['ratio_low']:.2f}..{row['ratio_high']:.2f}"
        mark = "" if row["mark"] is None else f">= {row['mark']:.2f}"
        rate, ratio = f"{row['env_steps_per_s']:,.0f}", f"{row['ratio']:.2f}"
        print(f"{row['num_envs']:>5} {row['loop']:<10} {rate:>12} {ratio:>11}  {spread:<12} {mark}")


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
        args.json.write_text(json.dumps(rows, indent=2))


if __name__ == "__main__":
    main()
