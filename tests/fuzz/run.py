"""Fuzzing of all input that a fleet reads from others: messages of peers.

Run every target for N minutes in all with `python tests/fuzz/run.py N`, or `make fuzz MINUTES=N`. A finding names its
target and its seed, which go into `corpus.json`; `python tests/fuzz/run.py 0 TARGET SEED` plays it again.

    broker      the broker's core, beside honest peers (tests/simulation/fuzz.py)
    learner     a learner's stream, from a broker that lies
    worker      a worker's session and weights, from a broker that lies
    teacher     a publisher of tasks, from a broker that lies, and a broker's tasks, from teachers that lie
    serving     policy servers of one agent and of several, from clients by ZeroMQ and by HTTP
    raw         a broker's Unix sockets and a policy server's port, from peers that speak ZMTP by hand
    fleet       a whole fleet of real processes, from strangers at its Unix sockets
    keyed-fleet the same fleet by TCP, from strangers who have its keys, and some who have none
"""

from __future__ import annotations

import itertools
import json
import logging
import math
import resource
import sys
import threading
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path

if __name__ == "__main__":
    for folder in (Path(__file__).resolve().parents[1], Path(__file__).resolve().parents[1] / "golden"):
        sys.path.insert(0, str(folder))

from fuzz.mutations import Refusals
from simulation.fuzz import play_honestly

Play = Callable[[int, Counter[str]], None]
"""Plays the schedule of a seed, and counts what was said to it. Raises whatever should not have left the product."""


@contextmanager
def _broker() -> Iterator[Play]:
    def play(seed: int, said: Counter[str]) -> None:
        said += play_honestly(seed)

    yield play


def _in(module: str, name: str) -> Callable[[], AbstractContextManager[Play]]:
    return lambda: getattr(import_module(module), name)()  # type: ignore[no-any-return]


TARGETS: dict[str, Callable[[], AbstractContextManager[Play]]] = {
    "broker": _broker,
    "learner": _in("fuzz.learner", "learner"),
    "worker": _in("fuzz.worker", "worker"),
    "teacher": _in("fuzz.teacher", "teacher"),
    "serving": _in("fuzz.serving", "serving"),
    "raw": _in("fuzz.raw_peers", "raw_peers"),
    "fleet": _in("fuzz.fleet", "fleet"),
    "keyed-fleet": _in("fuzz.fleet", "keyed_fleet"),
}

MOST_GROWTH = 512 << 20
"""Bytes by which a target may grow this process, with all that it loads."""
MOST_FINDINGS = 20
"""Findings of a target after which it ends: most are alike."""
CORPUS = Path(__file__).with_name("corpus.json")
"""The seeds that have found something. The test suite plays them again."""


@dataclass
class Outcome:
    """The result of a target: its schedules, messages by kind, refusals, and findings by seed."""

    schedules: int = 0
    said: Counter[str] = field(default_factory=Counter)
    refused: int = 0
    findings: dict[int, BaseException] = field(default_factory=dict)


def fuzz(target: str, seconds: float, seeds: Iterable[int]) -> Outcome:
    """Play schedules of a target until the time is over, at least one; without a time, all of `seeds`.

    An exception that leaves the product is a finding. It has a note of the seed.
    """
    outcome, before, end = Outcome(), _rss(), time.monotonic() + (seconds or math.inf)
    with warnings.catch_warnings(), _of_threads() as errors, Refusals() as refusals, TARGETS[target]() as play:
        warnings.simplefilter("error")
        for seed in seeds:
            try:
                play(seed, outcome.said)
                if errors:
                    raise errors.pop()
                grown = _rss() - before
                assert grown < MOST_GROWTH, f"memory grew by {grown >> 20} MiB"
            except Exception as error:
                error.add_note(f"python tests/fuzz/run.py 0 {target} {seed} plays it")
                outcome.findings[seed] = error
                errors.clear()
                before = _rss()
            outcome.schedules += 1
            if time.monotonic() > end or len(outcome.findings) == MOST_FINDINGS:
                break
    taken = sum(count for kind, count in outcome.said.items() if kind.endswith(": taken"))
    outcome.refused = sum(outcome.said.values()) - taken if target == "serving" else refusals.count
    return outcome


@contextmanager
def _of_threads() -> Iterator[list[BaseException]]:
    """Yield a list that gets each exception that ends a thread."""
    errors: list[BaseException] = []
    before = threading.excepthook
    threading.excepthook = lambda told: errors.append(told.exc_value or told.exc_type())
    try:
        yield errors
    finally:
        threading.excepthook = before


def _rss() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10


def main(minutes: float, targets: list[str], first: int) -> bool:
    """Fuzz, and print what was tried. Return whether something was found; its seeds are added to the corpus."""
    logging.disable(logging.CRITICAL)
    found, in_all = False, 0
    for target in targets:
        outcome = fuzz(target, 60.0 * minutes / len(targets), itertools.count(first) if minutes else [first])
        total, failed = sum(outcome.said.values()), outcome.findings
        counts = f"{total:,} messages, {outcome.refused:,} refused, {len(failed)} findings"
        lines = [f"{target}: {counts}; {outcome.schedules:,} schedules from seed {first}"]
        lines += [f"{count:12,}  {kind}" for kind, count in sorted(outcome.said.items())]
        alike = {repr(error): error for error in failed.values()}
        lines += ["".join(traceback.format_exception(error)) for error in alike.values()]
        sys.stdout.write("\n".join(lines) + "\n")
        sys.stdout.flush()
        if failed and minutes:
            corpus = read_corpus()
            corpus[target] = sorted({*corpus.get(target, []), *failed})
            CORPUS.write_text(json.dumps(corpus, indent=2) + "\n")
        found |= bool(failed)
        in_all += total
    sys.stdout.write(f"{in_all:,} messages in all\n")
    return found


def read_corpus() -> dict[str, list[int]]:
    """Return the seeds that have found something, by target."""
    return json.loads(CORPUS.read_text())  # type: ignore[no-any-return]


if __name__ == "__main__":
    one = sys.argv[2:3]
    sys.exit(main(float(sys.argv[1]), one or list(TARGETS), int(sys.argv[3]) if len(sys.argv) > 3 else 0))
