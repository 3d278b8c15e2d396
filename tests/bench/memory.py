"""Resident memory of broker and workers while a fleet samples at full speed.

PYTHONPATH=tests python -m bench.memory [--minutes 10] [--num-envs 64] [--json FILE]

The learner counts, commits, and publishes new weights every second. The first two minutes are start-up.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from time import monotonic
from typing import Any

from bench.pipeline import Fleet
from bench.processes import Processes

FIRST_MINUTE = 2.0
PUBLISH_INTERVAL_S = 1.0
SAMPLE_INTERVAL_S = 10.0
MIB = 1 << 20


def measure(minutes: float, num_envs: int) -> list[dict[str, Any]]:
    """Return one measurement every ten seconds: {"minute", "steps", role: resident MiB, ...}."""
    samples = []
    with Processes() as processes, Fleet(num_envs, processes) as fleet:
        start, steps = monotonic(), 0
        next_publish = next_sample = start
        while (now := monotonic()) < start + minutes * 60 + 1:
            steps += fleet.take()
            if now >= next_publish:
                next_publish += PUBLISH_INTERVAL_S
                fleet.publish()
            if now >= next_sample:
                next_sample += SAMPLE_INTERVAL_S
                resident = {role: resident_mib(pid) for role, pid in fleet.pids.items()}
                samples.append({"minute": round((now - start) / 60, 2), "steps": steps, **resident})
    return samples


def resident_mib(pid: int) -> float:
    """Return the resident memory of a process."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return round(int(line.split()[1]) * 1024 / MIB, 1)
    raise ProcessLookupError(pid)


def show(samples: list[dict[str, Any]]) -> None:
    """Return resident memory at the minutes that count, and its growth between them."""
    first = next((s for s in samples if s["minute"] >= FIRST_MINUTE), samples[0])
    last = samples[-1]
    print(f"{'':<10} {'minute ' + str(first['minute']):>14} {'minute ' + str(last['minute']):>14} {'growth':>10}")
    for role in [name for name in first if name not in ("minute", "steps")]:
        grown = last[role] - first[role]
        print(f"{role:<10} {first[role]:>10.1f} MiB {last[role]:>10.1f} MiB {grown:>+6.1f} MiB")
    print(f"{last['steps']:,} env steps delivered")


def main() -> None:
    """Measure, print, and write JSON where asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--num-envs", type=int, default=64, help="envs of each worker")
    parser.add_argument("--json", type=Path, help="write all samples there")
    args = parser.parse_args()
    samples = measure(args.minutes, args.num_envs)
    show(samples)
    if args.json:
        args.json.write_text(json.dumps(samples, indent=2) + "\n")


if __name__ == "__main__":
    main()
