"""The summary of a run: the final table, and the one JSON object of `--json`."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass, fields
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
    steps: int
    """Number of agent steps, as in the ledger."""
    env_steps: int
    episodes: int
    mean_return: float | None
    episodes_window: int
    mean_returns: dict[str, float]
    """Mean return by module id; empty in envs of one agent."""
    env_steps_per_s: float
    episodes_per_s: float
    goal_reached: bool
    restarts: dict[str, int]
    weights_seq: int
    ledger: FleetLedger | None
    """The fleet's ledger; None if Redis could not be read at the end."""
    failure: HeadraceError | None = None
    """The error that ended the run; None when its goal or a signal ended it."""
    problems: Sequence[str] = ()
    """The audit's sentences about the ledger; empty when it adds up."""
    bottleneck: str = ""
    """A sentence on the limit of the pace for most of the run, with its remedy; "" without a clear limit."""

    @property
    def balanced(self) -> bool | None:
        """Return whether the ledger adds up; None without one."""
        return None if self.ledger is None else self.ledger.balance() == 0 and not self.problems

    def as_json(self) -> bytes:
        """Return one JSON object on one line."""
        facts = {f.name: getattr(self, f.name) for f in fields(self) if f.name not in ("ledger", "failure", "problems")}
        facts["rates"] = {key: facts.pop(key) for key in ("env_steps_per_s", "episodes_per_s")}
        facts["ledger"] = self.ledger.model_dump() if self.ledger else None
        facts["balanced"] = self.balanced
        facts["error"] = str(self.failure) if self.failure else None
        facts["exit_code"] = int(self.failure.exit_code) if self.failure else 0
        return orjson.dumps(facts)


def summarise(
    *,
    fleet_id: str,
    run_dir: str,
    seconds: float,
    start: RunNumbers,
    end: RunNumbers,
    at_goal: RunNumbers | None,
    restarts: dict[str, int],
    weights_seq: int,
    ledger: FleetLedger | None,
    failure: HeadraceError | None,
    problems: Sequence[str] = (),
    bottleneck: str = "",
) -> Summary:
    """Summarise a run that went from `start` to `end`.

    The mean return is from the moment when the goal was reached. Episodes that end during the drain do not count.
    """
    judged = at_goal or end
    per_s = 1.0 / seconds if seconds > 0 else 0.0
    return Summary(
        fleet_id=fleet_id,
        run_dir=run_dir,
        seconds=round(seconds, 3),
        steps=ledger.stepped if ledger else end.steps,
        env_steps=end.steps,
        episodes=end.episodes,
        mean_return=judged.mean_return,
        episodes_window=judged.window,
        mean_returns=dict(judged.mean_returns),
        env_steps_per_s=round((end.steps - start.steps) * per_s, 1),
        episodes_per_s=round((end.episodes - start.episodes) * per_s, 3),
        goal_reached=at_goal is not None,
        restarts=restarts,
        weights_seq=weights_seq,
        ledger=ledger,
        failure=failure,
        problems=problems,
        bottleneck=bottleneck,
    )


def print_summary(summary: Summary, stream: TextIO) -> None:
    """Print the final table with the ledger."""
    console = Console(file=stream)
    table = Table(title=f"fleet {summary.fleet_id}", title_justify="left", show_header=False)
    mean = RunNumbers(0, 0, summary.mean_return, summary.episodes_window, summary.mean_returns).show_mean_return()
    for what, value in (
        ("goal", _goal_in_words(summary)),
        ("time", f"{summary.seconds:.1f} s"),
        ("env steps", f"{summary.env_steps:,} ({summary.env_steps_per_s:,.0f}/s)"),
        ("episodes", f"{summary.episodes:,} ({summary.episodes_per_s:,.1f}/s)"),
        ("mean return", mean),
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
    if summary.goal_reached:
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
