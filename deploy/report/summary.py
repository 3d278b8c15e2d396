"""The summary of a run: the final table, the one JSON object of `--json`, and `RUN/summary.json`.

That file has facts about a run and its end, for a report of the run when its Redis is gone. `up` writes it at its
start, with the machine and the versions, and again at its end, with the final books. A run whose supervisor was killed
has only the first part.
"""

from __future__ import annotations

import logging
import os
import platform
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, TextIO

import orjson
from rich.table import Table

from headrace.deploy.process.supervisor import Service
from headrace.deploy.report.progress import name_restarts
from headrace.deploy.run.annexes import part
from headrace.deploy.run.checkpoint_facts import NEWEST_FILE
from headrace.deploy.run.goal import RunNumbers
from headrace.deploy.run.redis_view import Snapshot
from headrace.deploy.run.run_dir import write_private
from headrace.deploy.terminal.console import PrintableConsole
from headrace.schemas.accounts.env_errors import EnvErrorGroup
from headrace.schemas.accounts.ledger import FleetLedger
from headrace.schemas.basics.printable import to_paste
from headrace.schemas.basics.run_files import read_object
from headrace.schemas.errors import HeadraceError, RunDirError
from headrace.schemas.settings.config import FleetConfig

log = logging.getLogger("headrace.supervisor")

SUMMARY_FILE = "summary.json"
MOST_PROCESSES = 1000
_OF_BOOKS = (
    *("steps", "env_steps", "episodes", "mean_return", "mean_returns", "episodes_window", "episodes_window_aborted"),
    *("weights_seq", "ledger", "balanced", "problems", "errors", "tasks", "groups"),
)
_PACKAGES = ("headrace", "torch", "numpy", "gymnasium")


@dataclass(frozen=True)
class Summary:
    """The result of a run. Counts cover the fleet's whole life; rates cover this run alone."""

    fleet_id: str
    run_dir: str
    seconds: float
    start: RunNumbers
    end: RunNumbers
    at_goal: RunNumbers | None
    """The numbers when the goal was reached, if it was. Episodes that end during the drain do not count for it."""
    restarts: dict[str, int]
    weights_seq: int
    ledger: FleetLedger | None
    """The fleet's ledger; None if Redis could not be read at the end."""
    failure: HeadraceError | None = None
    """The error that ended the run; None when its goal or a signal ended it."""
    problems: Sequence[str] = ()
    """The audit's sentences about the ledger; empty when it adds up."""
    bottleneck: str = ""
    """A sentence on the last limit of the pace, with its remedy; "" where none was found."""

    @property
    def steps(self) -> int:
        """Return the number of agent steps, as in the ledger."""
        return self.ledger.stepped if self.ledger else self.end.steps

    @property
    def judged(self) -> RunNumbers:
        """Return the numbers whose mean return counts."""
        return self.at_goal or self.end

    @property
    def balanced(self) -> bool | None:
        """Return whether the ledger adds up; None without one."""
        return None if self.ledger is None else self.ledger.balance() == 0 and not self.problems

    @property
    def rates(self) -> dict[str, float]:
        """Return the env steps and episodes of this run per second."""
        per_s = 1.0 / self.seconds if self.seconds > 0 else 0.0
        return {
            "env_steps_per_s": round((self.end.steps - self.start.steps) * per_s, 1),
            "episodes_per_s": round((self.end.episodes - self.start.episodes) * per_s, 3),
        }

    def as_json(self) -> bytes:
        """Return one JSON object on one line."""
        facts = {
            "fleet_id": self.fleet_id,
            "run_dir": self.run_dir,
            "seconds": round(self.seconds, 3),
            "steps": self.steps,
            "env_steps": self.end.steps,
            "episodes": self.end.episodes,
            "mean_return": self.judged.mean_return,
            "episodes_window": self.judged.window,
            "episodes_window_aborted": self.judged.aborted,
            "mean_returns": dict(self.judged.mean_returns),
            "goal_reached": self.at_goal is not None,
            "restarts": self.restarts,
            "weights_seq": self.weights_seq,
            "bottleneck": self.bottleneck,
            "rates": self.rates,
            "ledger": self.ledger.model_dump() if self.ledger else None,
            "balanced": self.balanced,
            "error": str(self.failure) if self.failure else None,
            "exit_code": int(self.failure.exit_code) if self.failure else 0,
        }
        return orjson.dumps(facts)


def print_summary(summary: Summary, stream: TextIO) -> None:
    """Print the final table with the ledger."""
    console = PrintableConsole(stream)
    table = Table(title=f"fleet {summary.fleet_id}", title_justify="left", show_header=False)
    steps_per_s, episodes_per_s = summary.rates.values()
    goal = "not reached" if summary.failure else "none reached; a signal ended the run"
    for what, value in (
        ("goal", "reached" if summary.at_goal is not None else goal),
        ("time", f"{summary.seconds:.1f} s"),
        ("env steps", f"{summary.end.steps:,} ({steps_per_s:,.0f}/s)"),
        ("episodes", f"{summary.end.episodes:,} ({episodes_per_s:,.1f}/s)"),
        ("mean return", summary.judged.show_mean_return()),
        ("weights", f"version {summary.weights_seq}"),
        ("restarts", name_restarts(summary.restarts)),
    ):
        table.add_row(what, value)
    console.print(table)
    if summary.bottleneck:
        console.print(summary.bottleneck)
    if summary.ledger is None:
        console.print("ledger: not known, since Redis was not started, or did not answer at the end")
    else:
        console.print(ledger_table(summary.ledger))
        console.print(verdict(summary))
        if left := queued_in_words(summary.ledger.queued, in_order=summary.failure is None):
            console.print(left)


def next_commands(summary: Summary, config: FleetConfig) -> list[str]:
    """Return what to do next, with a command each: play the policy, where a fleet of no clients has one; a rerun."""
    run = Path(summary.run_dir)
    here = run.relative_to(Path.cwd()) if run.is_relative_to(Path.cwd()) else run
    plays = not config.serving.enabled and (run / NEWEST_FILE).exists() and (not summary.failure or summary.steps)
    rerun = part("rerun_of")(here)
    return [
        *([f"play its policy: headrace evaluate {to_paste(here)}"] if plays else []),
        *([f"repeat the newest failure of an env: {rerun}"] if rerun else []),
    ]


def ledger_table(ledger: FleetLedger) -> Table:
    """Return the ledger as a table: the steps taken, then a line for each place where they are."""
    table = Table(title="ledger, in agent steps", title_justify="left", show_header=False)
    table.add_row("stepped", f"{ledger.stepped:,}", "")
    table.add_row("committed", f"{ledger.committed[0]:,}", "trained on")
    table.add_row("queued", f"{ledger.queued:,}", "with a worker, the broker or the learner")
    for reason, (steps, _) in sorted(ledger.dropped.items()):
        table.add_row(f"dropped: {reason}", f"{steps:,}", "became chunks")
    for reason, steps in sorted(ledger.discarded.items()):
        table.add_row(f"discarded: {reason}", f"{steps:,}", "never became a chunk")
    return table


def queued_in_words(queued: int, *, in_order: bool) -> str:
    """Return a sentence on the steps that a fleet left queued, which ended `in_order` or not; "" for none."""
    later = ", dropped when the run goes on unless the learner saved them" if in_order else ""
    return f"{queued:,} agent steps still queued{later}." if queued else ""


def verdict(summary: Summary) -> str:
    """Return one line that says whether the ledger adds up."""
    if summary.balanced:
        return "the ledger adds up: stepped = committed + queued + dropped + discarded"
    if summary.problems:
        return f"the ledger is NOT right: {summary.problems[0]} (`headrace audit` names all that is wrong)"
    off = summary.ledger.balance() if summary.ledger is not None else 0
    return f"the ledger does NOT add up: {off:+,} steps; `headrace audit` names the row"


class RunFacts:
    """Writes the file. On a full disk the file is missing or old: the error is logged, and the run goes on."""

    def __init__(self, run_dir: Path) -> None:
        self._path, self._before = run_dir / SUMMARY_FILE, read_run_facts(run_dir)
        self._about = {"started_unix_s": round(time.time(), 3), "versions": _versions(), "machine": _machine()}
        self._write({"state": "running"})

    def finish(self, summary: Summary, services: Iterable[Service], seen: Snapshot) -> None:
        """Write how the run ended, with failures of envs, tasks and consumer groups as Redis had them.

        The figures of an end without a look at Redis are those of the earlier end.
        """
        told: dict[str, Any] = orjson.loads(summary.as_json())
        ended = {"state": "ended", "ended_unix_s": round(time.time(), 3), "problems": list(summary.problems)}
        processes = [_process(service) for service in services][:MOST_PROCESSES]
        figures: dict[str, Any] = {"errors": plain_errors(seen.errors.values()), "tasks": dict(seen.task_figures)}
        figures["groups"] = {name: books.state.model_dump() for name, books in seen.groups.items()}
        kept = {} if summary.ledger else {key: self._before[key] for key in _OF_BOOKS if key in self._before}
        self._write({**told, **ended, "processes": processes, **figures, **kept})

    def _write(self, facts: Mapping[str, Any]) -> None:
        try:
            write_private(self._path, orjson.dumps({**facts, **self._about}, option=orjson.OPT_INDENT_2))
        except RunDirError as error:
            log.error("a report of this run will lack how it ended: %s", error)


def read_run_facts(run_dir: Path) -> dict[str, Any]:
    """Return the content of the file; empty where there is none."""
    return read_object(run_dir / SUMMARY_FILE)


def plain_errors(errors: Iterable[EnvErrorGroup]) -> list[dict[str, Any]]:
    """Return groups of failures as plain values, the newest first."""
    groups = sorted(errors, key=lambda group: -group.last_unix_s)
    return [group.model_dump(mode="json", exclude={"lives"}) for group in groups]


def _versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for package in _PACKAGES:
        with suppress(PackageNotFoundError):
            found[package] = version(package)
    return found


def _machine() -> dict[str, Any]:
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {"host": platform.node(), "system": platform.platform(), "cpus": os.cpu_count(), "memory_bytes": memory}


def _process(service: Service) -> dict[str, Any]:
    return {
        "name": service.spec.name,
        "role": service.spec.role.value,
        "restarts": service.restarts,
        "state": service.state.value,
        "last_words": service.last_words,
    }
