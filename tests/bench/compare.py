"""The same work by other libraries, each in an environment of its own, beside Headrace and a bare loop.

python tests/bench/compare.py [PEER ...] [--measures NAME ...] [--seconds 4] [--rounds 5] [--seeds 5] [--folder FOLDER]

- sampling: env steps per second of one process, for 1, 8 and 64 CartPoles, as a ratio to a bare loop.
- workers: the same of two workers that feed a learner, which counts, as a ratio to a bare proxy.
- transport: chunks per second through a store or a broker, as a ratio to a loop that forwards.
- ray: env steps per second of two EnvRunners of RLlib and of a fleet's two workers, in turns on one Ray.
- training: seconds and env steps of a whole command, to a mean return of 475 on CartPole-v1.

`tests/bench/peers/peers.toml` pins what is installed. FOLDER keeps the environments. A peer that cannot be
installed, or fails, is named with the reason. Arms take turns, round by round. Nothing else should run meanwhile.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path

if not __package__:  # started as a script: start again as a module, so that child processes find `bench` too
    os.environ["PYTHONPATH"] = os.pathsep.join(
        filter(None, [str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
    )
    os.execv(sys.executable, [sys.executable, "-m", "bench.compare", *sys.argv[1:]])

from bench import time_to_return
from bench.machine import machine
from bench.peer_environments import PEERS, FailedError, Peer, install, read_peers, run, say, versions
from bench.processes import ONE_THREAD

CASES = {
    "sampling": ("1", "8", "64"),
    "workers": ("8", "64"),
    "transport": ("small", "pixel"),
    "ray": (),
    "training": (),
}
OWN = {"bare loop": "bare_loop_rates", "headrace": "headrace_rates"}
BARE = "bare loop"
RUN_S = 180.0
ENV, GOAL = "CartPole-v1", time_to_return.GOALS["CartPole-v1"]


@dataclass(frozen=True, slots=True)
class Rate:
    """One arm in one case: medians over the rounds, and the ratios' spread."""

    measure: str
    case: str
    arm: str
    rate: float
    ratio: float
    ratio_low: float
    ratio_high: float
    cpu_ratio: float
    """The ratio of the rates per second of processor time, which holds on a busy machine too."""


def one_rate(python: Path, script: Path, measure: str, case: str, seconds: float) -> dict[str, float]:
    """Return {"rate", "per_cpu_s"} of one arm in one round. Raises `FailedError`."""
    doing = f"{measure} {case} by {script.stem}"
    printed = run([str(python), str(script), measure, case, str(seconds)], doing, RUN_S + seconds, ONE_THREAD)
    found: dict[str, float] = json.loads(printed.strip().splitlines()[-1])
    return found


def rates(
    measure: str, peers: dict[str, tuple[Path, Path]], seconds: float, rounds: int, failed: dict[str, str]
) -> list[Rate]:
    """Measure all cases in turns. `peers` has (interpreter, script) of each arm; one that fails goes to `failed`."""
    rows = []
    for case in CASES[measure]:
        turns: dict[str, list[dict[str, float]]] = {arm: [] for arm in peers}
        for number in range(rounds):
            say(f"{measure} {case}: round {number + 1} of {rounds}")
            for arm, (python, script) in peers.items():
                if len(turns[arm]) < number:
                    continue  # it has failed
                try:
                    turns[arm].append(one_rate(python, script, measure, case, seconds))
                except FailedError as error:
                    if arm in OWN:
                        raise
                    failed[f"{arm}, {measure} {case}"] = str(error)
        rows += [_row(measure, case, arm, own, turns[BARE]) for arm, own in turns.items() if len(own) == rounds]
    return rows


def _row(measure: str, case: str, arm: str, own: list[dict[str, float]], bare: list[dict[str, float]]) -> Rate:
    ratios, cpu_ratios = (
        [turn[name] / limit[name] for turn, limit in zip(own, bare, strict=True)] for name in ("rate", "per_cpu_s")
    )
    rate = statistics.median(turn["rate"] for turn in own)
    low, high = min(ratios), max(ratios)
    return Rate(measure, case, arm, rate, statistics.median(ratios), low, high, statistics.median(cpu_ratios))


def on_one_ray(python: Path, script: Path, seconds: float, rounds: int) -> list[Rate]:
    """Measure both arms in turns, in one program that starts the Ray. Raises `FailedError`."""
    command = [str(python), str(script), str(seconds), str(rounds)]
    printed = run(command, "workers on one Ray", RUN_S + 4 * seconds * rounds, ONE_THREAD)
    turns = json.loads(printed.strip().splitlines()[-1])
    return [_row("ray", "8", arm, [turn[arm] for turn in turns], [turn["rllib"] for turn in turns]) for arm in turns[0]]


def training(peers: dict[str, Path], seeds: int, failed: dict[str, str]) -> list[time_to_return.Run]:
    """Train to the goal in turns, seed by seed. `peers` has the interpreter of each arm."""
    arms: dict[str, Callable[[int], time_to_return.Run]] = {"headrace": time_to_return.of_headrace(ENV)}
    arms |= {arm: time_to_return.of_peer(arm, str(python), ENV) for arm, python in peers.items()}
    runs: list[time_to_return.Run] = []
    for seed in range(1, seeds + 1):
        for arm, train in list(arms.items()):
            say(f"training: seed {seed} of {seeds}, {arm}")
            try:
                runs.append(train(seed))
            except (RuntimeError, subprocess.TimeoutExpired) as error:
                if arm == "headrace":
                    raise
                failed[f"{arm}, training"] = f"{error}"[-400:]
                del arms[arm]
    return runs


def show(rows: list[Rate], failed: dict[str, str]) -> None:
    """Print rows as a table, and what is left out."""
    print(f"{'measure':<10} {'case':<6} {'arm':<15} {'rate':>12} {'ratio':>6}  {'low..high':<12} {'a cpu-s':>7}")
    for row in rows:
        spread = f"{row.ratio_low:.2f}..{row.ratio_high:.2f}"
        print(
            f"{row.measure:<10} {row.case:<6} {row.arm:<15} {row.rate:>12,.0f} {row.ratio:>6.2f}  {spread:<12} "
            f"{row.cpu_ratio:>7.2f}"
        )
    for name, reason in failed.items():
        print(f"without {name}: {reason}")


def main() -> None:
    """Install, measure, print, and write JSON."""
    args, peers = _arguments()
    args.folder.mkdir(parents=True, exist_ok=True)
    failed: dict[str, str] = {}
    pythons: dict[str, Path] = {}
    for name, peer in peers.items():
        if not peer.scripts.keys() & set(args.measures):
            continue
        say(f"preparing {name} ...")
        try:
            pythons[name] = install(peer, args.folder.resolve())
        except FailedError as error:
            failed[name] = str(error)
    rows: list[Rate] = []
    for measure in (m for m in CASES if CASES[m] and m in args.measures):
        own = {arm: (Path(sys.executable), PEERS / f"{script}.py") for arm, script in OWN.items()}
        beside = {
            name: (python, PEERS / f"{peers[name].scripts[measure]}.py")
            for name, python in pythons.items()
            if measure in peers[name].scripts
        }
        rows += rates(measure, own | beside, args.seconds, args.rounds, failed)
    for name in (name for name in pythons if "ray" in args.measures and "ray" in peers[name].scripts):
        try:
            rows += on_one_ray(pythons[name], PEERS / f"{peers[name].scripts['ray']}.py", args.seconds, args.rounds)
        except FailedError as error:
            failed[f"{name}, ray"] = str(error)
    show(rows, failed)
    runs: list[time_to_return.Run] = []
    if "training" in args.measures:
        able = {name: python for name, python in pythons.items() if "training" in peers[name].scripts}
        runs = training(able, args.seeds, failed)
        time_to_return.show(runs)
    path = args.json or args.folder / f"{datetime.now(UTC):%Y-%m-%d-%H%M%S}.json"
    result = {
        "machine": machine(),
        "versions": {name: versions(python) for name, python in pythons.items()},
        "failed": failed,
        "rates": [asdict(row) for row in rows],
        "training": [asdict(run) for run in runs],
    }
    path.write_text(json.dumps(result, indent=2) + "\n")
    print(f"written to {path}")


def _arguments() -> tuple[argparse.Namespace, dict[str, Peer]]:
    known = read_peers()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("peers", nargs="*", choices=[*known, []], help="default: all")
    parser.add_argument("--measures", nargs="+", choices=list(CASES), default=list(CASES), help="default: all")
    parser.add_argument("--seconds", type=float, default=4.0, help="length of one turn of one arm")
    parser.add_argument("--rounds", type=int, default=5, help="turns of each arm")
    parser.add_argument("--seeds", type=int, default=5, help="runs of each arm to a mean return")
    parser.add_argument(
        "--folder", type=Path, default=Path("bench-results/compare"), help="for environments and results"
    )
    parser.add_argument("--json", type=Path, help="write there rather than to the folder")
    args = parser.parse_args()
    return args, {name: known[name] for name in args.peers or known}


if __name__ == "__main__":
    main()
