"""All benches in one run: prints a table with ratios and spread, and writes JSON.

python tests/bench/run.py [--quick] [--only NAME ...] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

if not __package__:  # started as a script: start again as a module, so that child processes find `bench` too
    os.environ["PYTHONPATH"] = os.pathsep.join(
        filter(None, [str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
    )
    os.execv(sys.executable, [sys.executable, "-m", "bench.run", *sys.argv[1:]])

from bench import double_buffering, env_processes, multi_agent, pipeline, sampler, serving, startup, transport, waiting
from bench.processes import ONE_THREAD, SPAWN
from bench.table import Row, show

WIDTHS = [1, 8, 64]
NATIVE_WIDTHS = [64, 512]
BENCHES = [
    "sampler",
    "native",
    "multi_agent",
    "processes",
    "halves",
    "pipeline",
    "transport",
    "serving",
    "waiting",
    "startup",
]


def main() -> None:
    """Measure what was asked for."""
    args = _arguments()
    os.environ.update(ONE_THREAD)  # before any child loads numpy, which then asks how many cores there are
    benches: dict[str, Callable[[bool], list[Row]]] = {
        "sampler": _sampler,
        "native": _native,
        "multi_agent": _multi_agent,
        "processes": lambda quick: env_processes.measure(*((0.5, 3) if quick else (2.0, 7))),
        "halves": lambda quick: double_buffering.measure(*((1.0, 2) if quick else (2.0, 5))),
        "pipeline": lambda quick: pipeline.measure(*((2.0, 3) if quick else (4.0, 7))),
        "transport": lambda quick: transport.measure(*((1.0, 3) if quick else (2.0, 7))),
        "serving": lambda quick: serving.measure(*((1.0, 3) if quick else (2.0, 7))),
        "waiting": lambda quick: waiting.measure(*((2.0, 3) if quick else (4.0, 5))),
        "startup": lambda quick: startup.measure(3 if quick else 7),
    }
    rows: list[Row] = []
    for name in args.only or benches:
        print(f"measuring {name} ...", file=sys.stderr, flush=True)
        rows += benches[name](args.quick)
    show(rows)
    path = args.json or Path("bench-results") / f"{datetime.now(UTC):%Y-%m-%d-%H%M%S}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"machine": _machine(), "rows": [row.as_json() for row in rows]}, indent=2) + "\n")
    print(f"written to {path}")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="shorter turns and fewer rounds: wider spread")
    parser.add_argument("--only", nargs="+", choices=BENCHES, help="leave out the others")
    parser.add_argument("--json", type=Path, help="write there rather than to bench-results/")
    return parser.parse_args()


def _sampler(quick: bool) -> list[Row]:
    """Run the sampler's bench on one core, in a process of its own."""
    seconds, rounds = (0.2, 3) if quick else (0.5, 7)
    with SPAWN.Pool(1, initializer=_pin) as pool:
        return [_sampler_row("sampler", row) for row in pool.apply(sampler.measure, (WIDTHS, seconds, rounds))]


def _native(quick: bool) -> list[Row]:
    """Run the native vectors' bench on one core, in a process of its own."""
    seconds, rounds = (0.2, 3) if quick else (0.5, 7)
    with SPAWN.Pool(1, initializer=_pin) as pool:
        native = pool.apply(sampler.measure_native, (NATIVE_WIDTHS, seconds, rounds))
        envpool = pool.apply(sampler.measure_envpool, (NATIVE_WIDTHS[:1], seconds, rounds))
    return [_sampler_row("native", row) for row in native] + [_sampler_row("envpool", row) for row in envpool]


def _multi_agent(quick: bool) -> list[Row]:
    """Run the multi-agent sampler's bench on one core, in a process of its own."""
    seconds, rounds = (0.2, 3) if quick else (0.5, 7)
    with SPAWN.Pool(1, initializer=_pin) as pool:
        return pool.apply(multi_agent.measure, (WIDTHS, seconds, rounds))


def _pin() -> None:
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})


def _sampler_row(bench: str, row: dict[str, Any]) -> Row:
    return Row(
        bench,
        f"{row['num_envs']} envs, one core",
        row["loop"],
        "env steps/s",
        row["env_steps_per_s"],
        row["ratio"],
        row["ratio_low"],
        row["ratio_high"],
        mark=row["mark"],
    )


def _machine() -> dict[str, Any]:
    return {
        "cores": os.cpu_count(),
        "load_average_1m": os.getloadavg()[0],
        "platform": platform.platform(),
        "python": platform.python_version(),
        "unix_s": datetime.now(UTC).timestamp(),
    }


if __name__ == "__main__":
    main()
