"""Measure the cost of a recorder to a fleet of a fixed rate, and the bytes of a step, beside Minari's HDF5.

PYTHONPATH=tests python -m bench.recording [--env cartpole atari] [--seconds 25] [--rounds 2] [--minari] [--json FILE]

Two fleets take turns: one whose learner counts, and one with `headrace record` beside it, for which workers wait. Two
workers step CartPole 20,000 times a second together, or Breakout, with its frames of 210 x 160 x 3, 400 times: the
first env of each worker waits for its next step. It takes about six minutes on a machine with two free cores. A
line for each case says the rate with and without the recorder, their ratio, and what the recorder takes of the fleet's
processor time. A turn of CartPole is long enough for a file that is written by its age. With --minari,
the recording is exported by `headrace export` after the last turn, and the files of both are counted; it takes longest.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import gymnasium as gym
import pyarrow.parquet as pq

from bench.pipeline import HORIZON, WORKERS, Fleet
from bench.processes import Processes
from bench.turns import cpu_s, rest
from headrace.schemas.settings.config_loading import build_config

HEADRACE = [sys.executable, "-m", "headrace.deploy"]
CASES = {"cartpole": ("CartPole-v1", 64, 20_000.0, HORIZON), "atari": ("ALE/Breakout-v5", 4, 400.0, 32)}
"""By name: the env, the envs of each worker, env steps a second of both, and the steps of a chunk."""

TURNS = {"cartpole": 1.0, "atari": 0.4}
"""By name: the length of its turns, as a share of --seconds."""

_START_S = 60.0


class Paced(gym.Wrapper[Any, Any, Any, Any]):
    """An env that waits for its next step, so that its worker takes `polls_per_s` in a second."""

    def __init__(self, env: Any, polls_per_s: float) -> None:
        super().__init__(env)
        self._pause_s, self._due = 1 / polls_per_s, 0.0

    def step(self, action: Any) -> Any:
        now = time.monotonic()
        self._due = max(self._due + self._pause_s, now - 0.1)
        time.sleep(max(0.0, self._due - now))
        return self.env.step(action)


def paced(config: Any) -> Any:
    """Make the env; the first one of each worker waits for all of them."""
    if config["env"].startswith("ALE/"):
        import ale_py

        gym.register_envs(ale_py)
    env = gym.make(config["env"])
    return env if config.vector_index else Paced(env, config["polls_per_s"])


def measure(case: str, seconds: float, rounds: int, *, minari: bool) -> dict[str, Any]:
    """Return medians of both arms, and the bytes of a step."""
    env, width, rate, length = CASES[case]
    sampling = {"env": "bench.recording:paced", "num_envs": width, "rollout_fragment_length": length, "seed": 0}
    sampling["env_config"] = {"env": env, "polls_per_s": rate / WORKERS / width}
    if case == "atari":
        sampling["seed_every_episode"] = False  # a reset with a seed loads the game again
    own = {"sampling": sampling, "learner": {"enabled": False}}
    turns: list[dict[str, dict[str, float]]] = []
    with Processes() as processes:
        run_dir, folder = processes.folder / "recorded", processes.folder / "recording"
        run_dir.mkdir()
        waits = build_config({**own, "broker": {"consumer_groups": {"record": "wait"}}})
        with (
            Fleet(width, processes, config=build_config(own)) as bare,
            Fleet(width, processes, config=waits, run_dir=run_dir) as recorded,
            subprocess.Popen([*HEADRACE, "record", str(run_dir), "--dir", str(folder)]) as recorder,
        ):
            deadline = time.monotonic() + _START_S
            while not (folder / "unmerged").exists():
                assert time.monotonic() < deadline, "the recorder did not start"
                time.sleep(0.1)
            recorded.pids["recorder"] = recorder.pid
            arms = {"bare": bare, "recorded": recorded}
            for number in range(rounds + 1):
                taken = {name: turn(arm, seconds if number else seconds / 4) for name, arm in arms.items()}
                turns += [taken] if number else []
            recorder.terminate()
            assert recorder.wait(_START_S) == 0
        sizes = bytes_a_step(folder, processes.folder / f"{case}-v0" if minari else None)
    told: dict[str, Any] = {"case": case, "env": env, "steps/s wanted": rate}
    for arm in arms:
        told[arm] = {name: statistics.median(taken[arm][name] for taken in turns) for name in turns[0][arm]}
    for name in ("steps/s", "all"):
        ratios = sorted(taken["recorded"][name] / taken["bare"][name] for taken in turns)
        told[f"recorded / bare, {name}"] = [ratios[0], statistics.median(ratios), ratios[-1]]
    return {**told, **sizes}


def in_words(told: dict[str, Any]) -> str:
    """Return the rates, their ratio, and the recorder's processor time, on one line."""
    bare, recorded = told["bare"], told["recorded"]
    least, ratio, most = told["recorded / bare, steps/s"]
    others = bare["all"] - bare["learner"]
    return (
        f"{told['case']}, paced at {told['steps/s wanted']:,.0f} steps/s: {bare['steps/s']:,.0f} without a recorder, "
        f"{recorded['steps/s']:,.0f} with it, ratio {ratio:.3f} ({least:.3f} to {most:.3f}). Processor time a step: "
        f"recorder {recorded['recorder']:.2f} us, {recorded['recorder'] / others:.1%} of the {others:.2f} us of the "
        f"workers and the broker without it; broker {bare['broker']:.2f} us without, {recorded['broker']:.2f} with it"
    )


def turn(fleet: Fleet, seconds: float) -> dict[str, float]:
    """Take batches for `seconds`. Return the rate, and microseconds of processor time a step by process."""
    pids = {**fleet.pids, "learner": os.getpid()}
    taken(fleet, seconds / 4)
    before = {name: cpu_s([pid]) for name, pid in pids.items()}
    steps, elapsed = taken(fleet, seconds)
    spent = {name: 1e6 * (cpu_s([pid]) - before[name]) / steps for name, pid in pids.items()}
    rest(fleet.pids.values())
    return {"steps/s": steps / elapsed, **spent, "all": sum(spent.values())}


def taken(fleet: Fleet, seconds: float) -> tuple[int, float]:
    """Take batches for `seconds`. Return the steps, and the seconds that it took."""
    steps, start = 0, time.perf_counter()
    while (elapsed := time.perf_counter() - start) < seconds:
        steps += fleet.take()
    return steps, elapsed


def bytes_a_step(folder: Path, out: Path | None) -> dict[str, float]:
    """Return the bytes of a step in the recording, and in the HDF5 of its whole episodes, which is made at `out`."""
    steps = sum(pq.read_metadata(file).num_rows for file in folder.rglob("steps-*.parquet"))
    told = {"steps recorded": float(steps), "bytes a step, Parquet": size_of(folder) / steps}
    if out is not None:
        import minari

        subprocess.run([*HEADRACE, "export", str(folder), "--to", "minari", "--out", str(out)], check=True)
        dataset = minari.MinariDataset(out / "data")
        told |= {
            "steps exported": float(dataset.total_steps),
            "bytes a step, Minari": size_of(out) / dataset.total_steps,
        }
    return told


def size_of(folder: Path) -> int:
    """Return the bytes of all files in a folder."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def main() -> None:
    """Measure, print, and write JSON where asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--env", nargs="+", choices=CASES, default=[*CASES])
    parser.add_argument("--seconds", type=float, default=25.0, help="of each turn; of Atari 0.4 of it")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--minari", action="store_true", help="count the bytes of Minari's HDF5 too")
    parser.add_argument("--json", type=Path, help="write all results there")
    args = parser.parse_args()
    results = []
    for case in args.env:
        results.append(measure(case, TURNS[case] * args.seconds, args.rounds, minari=args.minari))
        print(in_words(results[-1]), flush=True)
    if args.json:
        args.json.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
