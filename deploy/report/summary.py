"""The summary of a run: the final table, and the one JSON object of `--json`."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

import orjson
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from headrace.deploy.report.progress import name_restarts
from headrace.deploy.run.checkpoint_facts import NEWEST_FILE
from headrace.deploy.run.goal import RunNumbers
from headrace.schemas.accounts.ledger import FleetLedger
from headrace.schemas.errors import HeadraceError
from headrace.schemas.settings.config import FleetConfig


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
    console = Console(file=stream)
    table = Table(title=f"fleet {summary.fleet_id}", title_justify="left", show_header=False)
    steps_per_s, episodes_per_s = summary.rates.values()
    for what, value in (
        ("goal", _goal_in_words(summary)),
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
        console.print(escape(summary.bottleneck))
    if summary.ledger is None:
        console.print("ledger: not known, since Redis was not started, or did not answer at the end")
    else:
        console.print(ledger_table(summary.ledger))
        console.print(verdict(summary))


def next_command(summary: Summary, config: FleetConfig) -> str:
    """Return the command that plays the run's policy; empty where there is no checkpoint, or clients drive episodes."""
    run = Path(summary.run_dir)
    if config.serving.enabled or not (run / NEWEST_FILE).exists():
        return ""
    here = run.relative_to(Path.cwd()) if run.is_relative_to(Path.cwd()) else run
    return f"headrace evaluate {shlex.quote(str(here))}"


def _goal_in_words(summary: Summary) -> str:
    if summary.at_goal is not None:
        return "reached"
    return "not reached" if summary.failure else "none reached; a signal ended the run"


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


def verdict(summary: Summary) -> str:
    """Return one line that says whether the ledger adds up."""
    if summary.balanced:
        return "the ledger adds up: stepped = committed + queued + dropped + discarded"
    if summary.problems:
        return f"the ledger is NOT right: {summary.problems[0]} (`headrace audit` names all that is wrong)"
    off = summary.ledger.balance() if summary.ledger is not None else 0
    return f"the ledger does NOT add up: {off:+,} steps; `headrace audit` names the row"
