"""Wall time and env steps to a mean return of 475 on CartPole-v1, for whole commands, beside other libraries.

PYTHONPATH=tests python -m bench.time_to_return [--env Pendulum-v1] [--seeds 5] [--peers PYTHON]
    [--cleanrl PYTHON PPO_PY] [--json FILE]

With Pendulum-v1 the return is -200, and only the first two arms run:

- headrace: `headrace up` with the recipe of the env, from its start until the goal is reached and it has drained.
- sb3: Stable-Baselines3's PPO with the settings of rl-zoo3.
- rllib: RLlib's PPO with the settings of its tuned CartPole example.
- cleanrl: CleanRL's single file `ppo.py`, as it is, whose printed returns are read.

PYTHON is an interpreter with stable-baselines3 and ray[rllib]; what it lacks is left out by name. Arms take turns, seed
by seed. The mean is that of the newest 100 episodes. One command at a time uses the whole machine.
"""

from __future__ import annotations

import argparse
import json
import re
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

GOALS = {"CartPole-v1": 475.0, "Pendulum-v1": -200.0}
RECIPES = {"CartPole-v1": "cartpole", "Pendulum-v1": "pendulum"}
LIMIT_S = 600.0
PEERS = Path(__file__).parent / "peers"
_EPISODE = re.compile(r"global_step=(\d+), episodic_return=\[?([0-9.]+)")


@dataclass(frozen=True, slots=True)
class Run:
    """One command's result. `seconds` runs from the start of the process to the goal.

    `cpu_s` is the processor time of the command and its children, which holds on a busy machine too.
    """

    arm: str
    seed: int
    seconds: float
    env_steps: int
    mean_return: float
    cpu_s: float


def of_headrace(env: str) -> Callable[[int], Run]:
    """Return a function that trains by `headrace up`."""

    def run(seed: int) -> Run:
        with tempfile.TemporaryDirectory() as folder:
            command = ["up", "--config", RECIPES[env], "--seed", str(seed), "--set", f"learner.seed={seed}"]
            command += ["--until-return", str(GOALS[env]), "--timeout-s", str(LIMIT_S), "--run-dir", folder, "--json"]
            start, spent = time.monotonic(), _children_s()
            found = _last_json([sys.executable, "-m", "headrace.deploy", *command])
            elapsed = time.monotonic() - start
            return Run("headrace", seed, elapsed, found["steps"], found["mean_return"], _children_s() - spent)

    return run


def of_peer(arm: str, python: str, env: str) -> Callable[[int], Run]:
    """Return a function that trains by a script of `peers/`, started by `python`."""

    def run(seed: int) -> Run:
        start, spent = time.monotonic(), _children_s()
        found = _last_json([python, str(PEERS / f"{arm}_ppo.py"), str(seed), str(GOALS[env]), env])
        elapsed = time.monotonic() - start
        return Run(arm, seed, elapsed, found["env_steps"], found["mean_return"], _children_s() - spent)

    return run


def of_cleanrl(python: str, script: str) -> Callable[[int], Run]:
    """Return a function that runs CleanRL's `ppo.py` and ends it at the goal."""

    def run(seed: int) -> Run:
        start, spent, newest = time.monotonic(), _children_s(), deque[float](maxlen=100)
        command = [python, "-u", script, "--seed", str(seed), "--total-timesteps", "1000000", "--no-cuda"]
        with tempfile.TemporaryDirectory() as folder:
            process = subprocess.Popen(
                command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
            )
            assert process.stdout is not None
            steps = 0
            try:
                for line in process.stdout:
                    if told := episode_of(line):
                        steps = told[0]
                        newest.append(told[1])
                    if (
                        len(newest) == 100 and statistics.mean(newest) >= GOALS["CartPole-v1"]
                    ) or time.monotonic() - start > LIMIT_S:
                        break
            finally:
                process.kill()
                process.wait()
            elapsed = time.monotonic() - start
            return Run("cleanrl", seed, elapsed, steps, statistics.mean(newest), _children_s() - spent)

    return run


def episode_of(line: str) -> tuple[int, float] | None:
    """Return (env steps, return) where a line of CleanRL's output tells of the end of an episode."""
    matched = _EPISODE.search(line)
    return (int(matched[1]), float(matched[2])) if matched else None


def measure(seeds: int, arms: dict[str, Callable[[int], Run]]) -> list[Run]:
    """Run all arms in turns, seed by seed."""
    runs = []
    for seed in range(1, seeds + 1):
        for arm, train in arms.items():
            run = train(seed)
            figures = f"{run.seconds:.1f} s, {run.cpu_s:.1f} cpu-s, {run.env_steps:,} env steps"
            print(f"seed {seed}: {arm} {figures}", file=sys.stderr, flush=True)
            runs.append(run)
    return runs


def show(runs: list[Run]) -> None:
    """Print medians, spreads, and where there is sb3 the ratio of the seconds to its own."""
    arms = list(dict.fromkeys(run.arm for run in runs))
    median = {arm: statistics.median(run.seconds for run in runs if run.arm == arm) for arm in arms}
    base = median.get("sb3")
    print(f"{'arm':<10} {'seconds':>8}  {'low..high':<14} {'cpu-s':>6} {'env steps':>10}  {'low..high':<20} to sb3")
    for arm in arms:
        own = [run for run in runs if run.arm == arm]
        seconds, steps = [run.seconds for run in own], [run.env_steps for run in own]
        cpu_s = statistics.median(run.cpu_s for run in own)
        ratio = f"{median[arm] / base:.2f}" if base else ""
        print(
            f"{arm:<10} {median[arm]:>8.1f}  {f'{min(seconds):.1f}..{max(seconds):.1f}':<14} {cpu_s:>6.1f} "
            f"{statistics.median(steps):>10,.0f}  {f'{min(steps):,}..{max(steps):,}':<20} {ratio}"
        )


def main() -> None:
    """Measure, print, and write JSON where asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--env", choices=list(GOALS), default="CartPole-v1")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--peers", help="interpreter with stable-baselines3 and ray[rllib]")
    parser.add_argument("--cleanrl", nargs=2, help="interpreter with what CleanRL needs, and its ppo.py")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    arms: dict[str, Callable[[int], Run]] = {"headrace": of_headrace(args.env)}
    packages = {"sb3": "stable_baselines3", "rllib": "ray.rllib"}
    for arm in ("sb3", "rllib") if args.env == "CartPole-v1" else ("sb3",):
        package = packages[arm]
        if args.peers and _has(args.peers, package):
            arms[arm] = of_peer(arm, args.peers, args.env)
        else:
            print(f"without {arm}: --peers has no {package}", file=sys.stderr)
    if args.cleanrl and args.env == "CartPole-v1":
        arms["cleanrl"] = of_cleanrl(*args.cleanrl)
    runs = measure(args.seeds, arms)
    show(runs)
    if args.json:
        args.json.write_text(json.dumps([asdict(run) for run in runs], indent=2) + "\n")


def _children_s() -> float:
    """Return the processor time of all children that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def _has(python: str, package: str) -> bool:
    return subprocess.run([python, "-c", f"import {package}"], capture_output=True, check=False).returncode == 0


def _last_json(command: list[str]) -> dict[str, Any]:
    ended = subprocess.run(command, capture_output=True, text=True, check=False, timeout=2 * LIMIT_S)
    if ended.returncode:
        raise RuntimeError(f"{command[:3]} ended with {ended.returncode}: {ended.stderr[-2000:]}")
    found: dict[str, Any] = json.loads(ended.stdout.strip().splitlines()[-1])
    return found


if __name__ == "__main__":
    main()
