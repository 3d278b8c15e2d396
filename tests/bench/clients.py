"""Memory of a policy server while 100 clients connect, leave, repeat requests and are killed.

PYTHONPATH=tests python -m bench.clients [--episodes 10000] [--json FILE]

What the worker of a real fleet holds, before, each tenth on the way, and after so many episodes, and once all clients
are gone. The first thousand episodes are start-up. Every few hundred a process of four clients is killed, and another
one comes. What is remembered of finished episodes has its bounds, so resident memory grows until those are reached (64
answers a session, 10,000 ids) and no further: --episodes 20000 shows both.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from time import monotonic
from typing import Any

from support.fleets.storm_of_clients import Storm

START_UP = 1_000
A_KILL = 250
"""Episodes between two measurements."""
LOOKS = 10
TIMEOUT_S = 3600.0


def measure(episodes: int) -> dict[str, Any]:
    """Run the clients; return {"before", "after", "empty": sizes; "ledger", "seconds", "killed", "clients"; ...}."""
    with tempfile.TemporaryDirectory() as folder, Storm(Path(folder), timeout_s=TIMEOUT_S) as storm:
        storm.begin()
        _play(storm, START_UP)
        before, first, began = storm.sizes(), storm.episodes(), monotonic()
        course = []
        while (played := storm.episodes() - first) < episodes:
            if played >= len(course) * episodes / LOOKS:
                course.append({"played": played, **storm.sizes()})
            _play(storm, first + played + A_KILL)
        after, seconds = storm.sizes(), monotonic() - began
        told = storm.end_clients()
        storm.fleet.wait_until(lambda: storm.sizes()["sessions"] == 0, "the end of the last lease")
        empty = storm.sizes()
        storm.fleet.terminate()
        result = storm.fleet.finish()
        audit = storm.fleet.audit().returncode
    found = {"sizes": {"before": before, "after": after, "empty": empty}, "clients": told, "killed": storm.killed}
    books = {"ledger": result["ledger"], "balanced": result["balanced"] and audit == 0}
    return {**found, **books, "seconds": seconds, "episodes": played, "course": course}


def _play(storm: Storm, until: int) -> None:
    storm.fleet.wait_until(lambda: storm.episodes() >= until, f"{until} episodes")
    storm.kill_one()


def show(found: dict[str, Any]) -> None:
    """Return a table with a row for each size that must not grow, and the final ledger."""
    print(f"{found['episodes']:,} episodes in {found['seconds']:.0f} s, {found['killed']} clients killed")
    print(f"{'':<12}" + "".join(f"{name:>12}" for name in found["sizes"]))
    for thing in found["sizes"]["before"]:
        print(f"{thing:<12}" + "".join(f"{sizes[thing]:>12,}" for sizes in found["sizes"].values()))
    for look in found["course"]:
        print(f"after {look['played']:>7,} episodes {look['rss_kib']:>9,} KiB, {look['remembered']:>6,} remembered")
    harmed = sum(process["lost"] + len(process["failures"]) for process in found["clients"])
    print(f"episodes lost by clients that were not killed: {harmed}")
    print(f"ledger: {json.dumps(found['ledger'])}; it {'balances' if found['balanced'] else 'DOES NOT BALANCE'}")


def main() -> None:
    """Measure, print, and write JSON where asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--episodes", type=int, default=10_000)
    parser.add_argument("--json", type=Path, help="write it all there")
    args = parser.parse_args()
    found = measure(args.episodes)
    show(found)
    if args.json:
        args.json.write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
