"""The report of a trial: on the terminal, as JSON, and as one HTML file that needs nothing else."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict
from typing import Any

from rich.table import Table

from headrace.deploy.annexes.chaos.checks import Judgement
from headrace.deploy.annexes.chaos.trial import Injected, TrialResult, Usage
from headrace.deploy.monitoring.html_page import Rows, page, paragraph, text
from headrace.deploy.monitoring.html_page import table as html_table


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
        "usage": {
            name: {
                "start": asdict(start) if start is not None else None,
                "end": asdict(end) if end is not None else None,
            }
            for name, start, end in outcome.usage
        },
    }


def tables(outcome: TrialResult, judgement: Judgement) -> list[Table]:
    """Return the tables for the terminal: recovery by kind of event, and what processes took."""
    return [_rich(*table) for table in _tables(outcome, judgement)]


def as_html(outcome: TrialResult, judgement: Judgement, replay: str) -> str:
    """Return the report as one page."""
    broken = len(judgement.problems)
    verdict = f"{broken} promises were broken." if broken else "Every promise held."
    events = [
        (
            injected.event.name,
            f"{injected.at - outcome.began:.1f}",
            f"{injected.event.seconds:g}" if injected.event.seconds else "",
            injected.skipped or _seconds(injected.recovery_s),
        )
        for injected in outcome.injected
    ]
    return page(
        "headrace chaos",
        (
            f"<h1>headrace chaos, seed {outcome.plan.seed}</h1>",
            paragraph(verdict, "verdict bad" if broken else "verdict good"),
            f"<p>Replay: <code>{text(replay)}</code></p><h2>Promises</h2><ul>",
            *(_check_html(check.promise, check.seen, check.problems) for check in judgement.checks),
            "</ul><h2>What happened</h2>",
            *(html_table(*shown) for shown in _tables(outcome, judgement)),
            html_table("events", ("event", "s", "lasts s", "recovery s"), events),
        ),
    )


def _tables(outcome: TrialResult, judgement: Judgement) -> Iterable[tuple[str, Sequence[str], Rows]]:
    recovery = [
        (name, str(count), str(skipped) if skipped else "", _seconds(median), _seconds(longest))
        for name, (count, skipped, median, longest) in judgement.recovery.items()
    ]
    yield "time to the next new step at the learner", ("event", "times", "skipped", "median s", "max s"), recovery
    usage = [(name, *_usage(start), *_usage(end)) for name, start, end in outcome.usage]
    yield (
        "processes at the start and at the end",
        ("process", "MiB", "files", "threads", "MiB then", "files then", "threads then"),
        usage,
    )


def _event_facts(injected: Injected, began: float) -> dict[str, Any]:
    return {
        **injected.event.model_dump(mode="json"),
        "injected_at_s": round(injected.at - began, 3),
        "skipped": injected.skipped,
        "recovery_s": injected.recovery_s,
    }


def _usage(usage: Usage | None) -> tuple[str, str, str]:
    if usage is None:
        return "-", "-", "-"
    return f"{usage.rss_bytes / (1 << 20):.0f}", str(usage.files), str(usage.threads)


def _seconds(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds:.2f}"


def _rich(title: str, columns: Sequence[str], rows: Rows) -> Table:
    table = Table(*columns[:1], title=title, title_justify="left")
    for column in columns[1:]:
        table.add_column(column, justify="right")
    for row in rows:
        table.add_row(*row)
    return table


def _check_html(promise: str, seen: str, problems: Sequence[str]) -> str:
    shown = f' <span class="{"bad" if problems else "good"}">{"broken" if problems else "held"}</span>'
    inner = "".join(f"<li>{text(problem)}</li>" for problem in problems)
    return f"<li>{text(promise)} ({text(seen)}){shown}{f'<ul>{inner}</ul>' if inner else ''}</li>"
