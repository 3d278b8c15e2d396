"""All benches in one run: prints a table with ratios and spread, and writes JSON.

python tests/bench/run.py [--quick] [--only NAME ...] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

if not __package__:  # started as a script: start again as a module, so that child processes find `bench` too
    os.environ["PYTHONPATH"] = os.pathsep.join(
        filter(None, [str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
    )
    os.execv(sys.executable, [sys.executable, "-m", "bench.run", *sys.argv[1:]])

from bench import (
    adapter_costs,
    atari,
    books,
    compression,
    double_buffering,
    env_processes,
    hosts,
    learner,
    monitoring,
    multi_agent,
    observations,
    pipeline,
    sampler,
    serving,
    sessions,
    startup,
    transport,
    waiting,
    weights,
)
from bench.machine import machine
from bench.processes import FORKED, ONE_THREAD
from bench.table import Row, show

WIDTHS = [1, 8, 64]
NATIVE_WIDTHS = [64, 512]
BENCHES = [
    "sampler",
    "native",
    "multi_agent",
    "observations",
    "processes",
    "atari",
    "halves",
    "pipeline",
    "transport",
    "compression",
    "weights",
    "hosts",
    "serving",
    "waiting",
    "startup",
    "books",
    "sessions",
    "learner",
    "adapter_costs",
    "monitoring",
]


def main() -> None:
    """Measure what was asked for."""
    args = _arguments()
    os.environ.update(ONE_THREAD)  # before any child loads numpy, which then asks how many cores there are
    benches: dict[str, Callable[[bool], list[Row]]] = {
        "sampler": _sampler,
        "native": _native,
        "multi_agent": _multi_agent,
        "observations": _observations,
        "processes": lambda quick: env_processes.measure(*((0.5, 1) if quick else (2.0, 7))),
        "atari": lambda quick: atari.measure(*((0.5, 1) if quick else (4.0, 5))),
        "halves": lambda quick: double_buffering.measure(*((0.5, 1) if quick else (2.0, 5))),
        "pipeline": lambda quick: pipeline.measure(*((1.0, 1) if quick else (4.0, 7))),
        "transport": lambda quick: transport.measure(*((0.5, 1) if quick else (2.0, 7))),
        "compression": lambda quick: compression.measure(1 if quick else 7),
        "weights": lambda quick: weights.measure(*((0.5, 1) if quick else (2.0, 5))),
        "hosts": lambda quick: hosts.measure(*((0.5, 1) if quick else (2.0, 5))),
        "serving": lambda quick: serving.measure(*((0.5, 1) if quick else (2.0, 7))),
        "waiting": lambda quick: waiting.measure(*((1.0, 1) if quick else (4.0, 5))),
        "startup": lambda quick: startup.measure(1 if quick else 7),
        "books": lambda quick: books.measure(100 if quick else 1000),
        "learner": lambda quick: learner.measure(*((0.5, 1) if quick else (2.0, 7))),
        "adapter_costs": lambda quick: adapter_costs.measure(*((0.5, 1) if quick else (2.0, 7))),
        "monitoring": lambda quick: monitoring.measure(*((1.0, 1) if quick else (4.0, 9))),
        "sessions": lambda quick: sessions.measure(200, 1.0 if quick else 5.0),
    }
    rows: list[Row] = []
    for name in args.only or benches:
        print(f"measuring {name} ...", end="", file=sys.stderr, flush=True)
        began = time.monotonic()
        rows += benches[name](args.quick)
        print(f" {time.monotonic() - began:.0f} s", file=sys.stderr, flush=True)
    show(rows)
    path = args.json or Path("bench-results") / f"{datetime.now(UTC):%Y-%m-%d-%H%M%S}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"machine": machine(), "rows": [row.as_json() for row in rows]}, indent=2) + "\n")
    print(f"written to {path}")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one round of short turns: only says that all of it runs")
    parser.add_argument("--only", nargs="+", choices=BENCHES, help="leave out the others")
    parser.add_argument("--json", type=Path, help="write there rather than to bench-results/")
    return parser.parse_args()


def _sampler(quick: bool) -> list[Row]:
    """Run the sampler's bench on one core, in a process of its own."""
    seconds, rounds = (0.2, 1) if quick else (0.5, 7)
    with FORKED.Pool(1, initializer=_pin) as pool:
        return pool.apply(sampler.measure, (WIDTHS, seconds, rounds))


def _native(quick: bool) -> list[Row]:
    """Run the native vectors' bench on one core, in a process of its own."""
    seconds, rounds = (0.2, 1) if quick else (0.5, 7)
    with FORKED.Pool(1, initializer=_pin) as pool:
        native = pool.apply(sampler.measure_native, (NATIVE_WIDTHS, seconds, rounds))
        envpool = pool.apply(sampler.measure_envpool, (NATIVE_WIDTHS[:1], seconds, rounds))
    return native + envpool


def _multi_agent(quick: bool) -> list[Row]:
    """Run the multi-agent sampler's bench on one core, in a process of its own."""
    seconds, rounds = (0.2, 1) if quick else (0.5, 7)
    with FORKED.Pool(1, initializer=_pin) as pool:
        return pool.apply(multi_agent.measure, (WIDTHS, seconds, rounds))


def _observations(quick: bool) -> list[Row]:
    """Run the bench of large observations on one core, in a process of its own."""
    seconds, rounds = (0.2, 1) if quick else (0.5, 7)
    with FORKED.Pool(1, initializer=_pin) as pool:
        return pool.apply(observations.measure, (seconds, rounds))


def _pin() -> None:
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})


if __name__ == "__main__":
    main()
