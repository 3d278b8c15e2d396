"""The report of a trial: on the terminal, and as JSON."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from rich.table import Table

from headrace.deploy.annexes.chaos.checks import Judgement
from headrace.deploy.annexes.chaos.trial import Injected, TrialResult


def as_facts(outcome: TrialResult, judgement: Judgement, replay: str) -> dict[str, Any]:
    """Return the report as plain values, for JSON."""
    return {
        "held": not judgement.problems,
        "problems": judgement.problems,
        "replay": replay,
        "folder": str(outcome.folders.root),
        "plan": outcome.plan.model_dump(mode="json"),
        "cut_short": outcome.cut_short,
        "checks": [asdict(check) for check in judgement.checks],
        "steps": {
            "true": judgement.true_steps,
            "ledger": judgement.booked_steps,
            "unfinished_poll": judgement.unfinished,
            "recorded": judgement.recorded_steps,
            "dropped": judgement.dropped,
            "discarded": judgement.discarded,
        },
        "episodes": {"ended": judgement.episodes, "aborted": judgement.aborted},
        "events": [_event_facts(injected, outcome.began) for injected in outcome.injected],
        "recovery": {
            name: {"events": count, "skipped": skipped, "median_s": median, "max_s": longest}
            for name, (count, skipped, median, longest) in judgement.recovery.items()
        },
        "lives": outcome.lives,
        "drained": [{"slot": slot, "incarnation": incarnation} for slot, incarnation in sorted(outcome.living)],
    }


def recovery_table(judgement: Judgement) -> Table:
    """Return the time of recovery from each kind of event, for the terminal."""
    shown = Table("event", title="time to the next new step at the learner", title_justify="left")
    for column in ("times", "skipped", "median s", "max s"):
        shown.add_column(column, justify="right")
    for name, (count, skipped, median, longest) in judgement.recovery.items():
        shown.add_row(name, str(count), str(skipped or ""), _seconds(median), _seconds(longest))
    return shown


def _event_facts(injected: Injected, began: float) -> dict[str, Any]:
    return {
        **injected.event.model_dump(mode="json"),
        "injected_at_s": round(injected.at - began, 3),
        "skipped": injected.skipped,
        "recovery_s": injected.recovery_s,
    }


def _seconds(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds:.2f}"
