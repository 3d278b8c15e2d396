"""Lines of `headrace top`: the document of `fleet_state.py` as text, for any size of terminal or for a pipe.

Nothing here computes a number of the fleet. Every text of a peer is shown on one line, without control characters.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.text import Text

from headrace.deploy.report.progress import duration, short_number
from headrace.schemas.basics.printable import one_line

Document = Mapping[str, Any]
Curves = Mapping[str, Sequence[float | None]]

SHOWN_CURVES = ("env_steps_per_s", "episode_return_mean", "held_batches", "accepted_agent_steps_per_s")
_STYLES = {"ok": "bold green", "warning": "bold yellow", "error": "bold red", "ended": "bold", "unknown": "bold"}
_BLOCKS, _PLAIN_BLOCKS = "▁▂▃▄▅▆▇█", ".:-=+*#@"
_MOST_FINDINGS = 3
_SPARK = 14
_TROUBLE = "yellow"
_LONGEST = 400


@dataclass(frozen=True, slots=True)
class WorkerColumn:
    """A column of the table of workers: its header, width, and what it shows."""

    name: str
    width: int
    value: Callable[[Document], Any]
    show: Callable[[Any], str]
    is_text: bool = False


def _of(name: str) -> Callable[[Document], Any]:
    return lambda worker: worker.get(name)


def _count(value: Any) -> str:
    return short_number(value) if _is_number(value) else "-"


def _share(value: Any) -> str:
    return f"{100 * value:.0f} %" if _is_number(value) else "-"


def _megabytes(value: Any) -> str:
    return f"{value / (1 << 20):,.0f}" if _is_number(value) else "-"


def _lost(worker: Document) -> Any:
    return worker.get("ledger", {}).get("lost")


def _state(worker: Document) -> str:
    state = str(worker.get("state", ""))
    if worker.get("blocked"):
        return f"waits: {worker['blocked']}" if isinstance(worker["blocked"], str) else "waits for room"
    doing = worker.get("doing")
    if doing and (doing not in ("loading", "building") or not worker.get("is_connected")):
        return f"{state}, {doing}"  # the activity before it joined may be seconds old
    return state


def _behind(worker: Document) -> Any:
    behind = worker.get("weights_behind")
    return None if behind is None or (_is_number(behind) and behind < 0) else behind


COLUMNS = (
    WorkerColumn("slot", 6, _of("slot"), str),
    WorkerColumn("state", 16, _state, str, is_text=True),
    WorkerColumn("steps/s", 8, _of("env_steps_per_s"), _count),
    WorkerColumn("env steps", 10, _of("env_steps_all"), _count),
    WorkerColumn("lag", 5, _behind, _count),
    WorkerColumn("lost", 7, _lost, _count),
    WorkerColumn("failures", 9, _of("env_failures_all"), _count),
    WorkerColumn("restarts", 9, _of("restarts"), _count),
    WorkerColumn("CPU", 6, _of("cpu_share"), _share),
    WorkerColumn("MiB", 7, _of("rss_bytes"), _megabytes),
    WorkerColumn("episodes", 9, _of("episodes_all"), _count),
    WorkerColumn("held", 6, _of("held_batches"), _count),
    WorkerColumn("pid", 9, _of("pid"), lambda pid: str(pid) if _is_number(pid) else "-"),
    WorkerColumn("host", 20, _of("host"), lambda host: str(host or "-"), is_text=True),
)
"""In the order of their importance: those at the end are left out where the terminal is narrow."""


def screen(document: Document, curves: Curves, width: int, height: int, blocks: str) -> list[Text]:
    """Return exactly `height` lines, none wider than `width`."""
    foot = Text(" Ctrl-C quits, and the fleet goes on   headrace dashboard sorts and filters", style="reverse")
    body = height - 1
    lines = head(document, curves, width, blocks)[: max(1, body - 3)]
    lines += _table(document, width, max(0, body - len(lines)))
    lines = lines[:body] + [Text()] * (body - len(lines))
    for line in (*lines, foot):
        line.no_wrap = True
        line.truncate(width, overflow="ellipsis")
    foot.pad_right(max(0, width - foot.cell_len))
    return [*lines, foot][-height:] if height > 0 else []


def plain(document: Document, curves: Curves, width: int, blocks: str) -> list[Text]:
    """Return everything at once, for a pipe or a file."""
    lines = [*head(document, curves, width, blocks, most=len(document["findings"])), Text()]
    return [*lines, *_table(document, width, None)]


def head(document: Document, curves: Curves, width: int, blocks: str, most: int = _MOST_FINDINGS) -> list[Text]:
    """Return verdict, findings, numbers and ledger."""
    fleet = document["fleet"]
    about = " · ".join(said for said in (fleet.get("env"), fleet.get("id"), fleet.get("state")) if said)
    at = time.strftime("%H:%M:%S", time.localtime(document["unix_s"]))
    lines = [
        Text(f"headrace top  {_line(about)}  {at}", style="dim"),
        Text(_line(document["verdict"]), style=_STYLES.get(document["severity"], "bold")),
    ]
    lines += [Text(_line(document["bottleneck"]))] if document["bottleneck"] else []
    lines += _findings(document, most)
    if document["redis"]["is_old"] and document["severity"] != "ended":
        age = duration(document["redis"]["age_s"])
        lines.append(Text(f"These numbers are {age} old: Redis does not answer.", style="yellow"))
    lines += _ledger(document)
    lines += _numbers(document, curves, width, blocks)
    lines += _aborted(document["numbers"])
    lines += _shares(document)
    lines += _errors(document)
    return lines


def _findings(document: Document, most: int) -> Iterator[Text]:
    findings = document["findings"]
    for one in findings[:most]:
        yield _finding(one)
        if one["command"]:
            yield Text(f"    {_line(one['command'])}", style="cyan")
    if len(findings) > most:
        yield Text(f"  and {len(findings) - most} more: headrace why", style="dim")


def _finding(one: Document) -> Text:
    since = f" (for {duration(one['for_s'])})" if one["for_s"] is not None else ""
    limit = f" [{one['limit']}]" if one["limit"] else ""
    style = "red" if one["severity"] == "error" else "yellow"
    return Text(_line(f"! {one['sentence']}{since}{limit}"), style=style)


def _numbers(document: Document, curves: Curves, width: int, blocks: str) -> Iterator[Text]:
    numbers, learner = document["numbers"], document["learner"]
    wanted = document["fleet"].get("workers_wanted")
    workers = _count(numbers.get("workers_connected")) + (f" of {wanted}" if wanted else "")
    blocked = numbers.get("workers_blocked_now")
    epoch, seq = learner.get("epoch"), numbers.get("weights_seq")
    restarts = ", ".join(f"{count} ({role})" for role, count in numbers.get("restarts_by_role", {}).items() if count)
    cells = (
        ("env steps/s", _count(numbers.get("env_steps_per_s")), "env_steps_per_s"),
        ("mean return", _count(numbers.get("episode_return_mean")), "episode_return_mean"),
        ("env steps", _whole(numbers.get("env_steps_total")), ""),
        ("episodes", _whole(numbers.get("episodes_total")), ""),
        ("workers", workers + (f", {blocked} waiting" if blocked else ""), ""),
        ("weights", f"{_whole(epoch)}/{_whole(seq)}, lag {_count(numbers.get('weights_lag'))}", ""),
        ("queue", f"{_count(numbers.get('held_batches'))} batches", "held_batches"),
        ("oldest batch", _seconds(numbers.get("oldest_unsettled_age_s")), ""),
        ("restarts", restarts or "none", ""),
    )
    half = max(38, width // 2)
    rows = [cells[start : start + 2] for start in range(0, len(cells), 2)] if width >= 76 else [(c,) for c in cells]
    for row in rows:
        line = Text()
        for label, value, curve in row:
            cell = Text(f"{label:<13}", style="dim").append(_line(value), style="bold")
            if curve:
                spark = sparkline(curves.get(curve, ()), min(_SPARK, max(0, half - cell.cell_len - 3)), blocks)
                cell.pad_right(max(0, half - _SPARK - 2 - cell.cell_len))
                cell.append(f" {spark}", style="cyan")
            cell.pad_right(max(0, half - cell.cell_len))
            line.append_text(cell)
        yield line


def _aborted(numbers: Document) -> Iterator[Text]:
    """Yield return and length of aborted episodes beside those of finished ones, if some were aborted."""
    if numbers.get("aborted_window"):
        returns, lengths = (
            f"{_count(numbers.get(f'aborted_{name}_mean'))} (finished {_count(numbers.get(f'episode_{name}_mean'))})"
            for name in ("return", "len")
        )
        count = _whole(numbers.get("aborted_episodes_total"))
        yield Text(_line(f"aborted      {count}: return {returns}, length {lengths}"))


def _ledger(document: Document) -> Iterator[Text]:
    books = document["ledger"]
    if not document["fleet"]["id"]:
        yield Text("ledger       not known: nothing was read from Redis", style="dim")
        return
    stepped = books["stepped"]
    share = f" ({100 * books['committed'] / stepped:.1f} %)" if stepped else ""
    line = Text("ledger       ", style="dim")
    line.append(
        f"{stepped:,} = committed {books['committed']:,}{share} + queued {books['queued']:,} + lost {books['lost']:,}",
        style="default",
    )
    if books["balance"]:
        line.append(f"; does not add up by {books['balance']:+,}", style="bold red")
    yield line
    if books["losses"]:
        losses = ", ".join(f"{one['reason']} {one['agent_steps']:,}" for one in books["losses"])
        yield Text(_line(f"lost         {losses}"), style="yellow")


def _shares(document: Document) -> Iterator[Text]:
    for name, label in (("worker_time_share", "workers"), ("learner_time_share", "learner")):
        shares = document["labelled"].get(name, {})
        parts = [f"{part} {100 * share:.0f} %" for part, share in shares.items() if share >= 0.005]
        if parts:
            yield Text(f"{label + ' time':<13}", style="dim").append(_line(", ".join(parts)), style="default")


def _errors(document: Document) -> Iterator[Text]:
    for one in document["errors"][:1]:
        said = (
            f"{one.get('count', 1):,} x {one.get('exception', '')}: {one.get('message', '')} ({one.get('where', '')})"
        )
        yield Text(_line(f"env errors   {said}"), style="yellow")


def _table(document: Document, width: int, height: int | None) -> list[Text]:
    """Return the table of workers, those first that do not run. `height` is None for all of them."""
    workers = sorted(document["workers"], key=lambda worker: (_style(worker) != _TROUBLE, worker["slot"]))
    columns = _fitting(width)
    lines = [Text("".join(_cell(column.name, column) for column in columns), style="bold")]
    shown = workers if height is None or len(workers) < height else workers[: max(0, height - 2)]
    for worker in shown:
        lines.append(Text("".join(_cell(_line(c.show(c.value(worker))), c) for c in columns), style=_style(worker)))
    if len(workers) > len(shown):
        lines.append(Text(f"and {len(workers) - len(shown):,} workers more", style="dim"))
    if not workers:
        lines.append(Text("no worker yet", style="dim"))
    return lines


def _fitting(width: int) -> list[WorkerColumn]:
    taken = 0
    columns: list[WorkerColumn] = []
    for column in COLUMNS:
        taken += column.width
        if taken <= width or not columns:
            columns.append(column)
        else:
            break
    return columns


def _cell(value: str, column: WorkerColumn) -> str:
    text = Text(value)
    text.truncate(column.width - 1, overflow="ellipsis")
    space = " " * (column.width - 1 - text.cell_len)
    return f"{text.plain}{space} " if column.is_text else f"{space}{text.plain} "


def _style(worker: Document) -> str:
    if not worker.get("is_connected") or worker.get("state") != "running":
        return _TROUBLE if worker.get("state") != "connected" else ""
    return "dim" if worker.get("blocked") else ""


def sparkline(values: Sequence[float | None], width: int, blocks: str) -> str:
    """Return the newest values as a small chart of one line, from the smallest to the largest of them."""
    newest = list(values)[-width:] if width > 0 else []
    known = [value for value in newest if value is not None]
    if not known:
        return ""
    low, high = min(known), max(known)
    span = high - low or 1.0
    top = len(blocks) - 1
    return "".join(" " if value is None else blocks[round((value - low) / span * top)] for value in newest)


def blocks_for(encoding: str | None) -> str:
    """Return the characters for small charts that `encoding` supports."""
    try:
        _BLOCKS.encode(encoding or "ascii")
    except (UnicodeEncodeError, LookupError):
        return _PLAIN_BLOCKS
    return _BLOCKS


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _whole(value: Any) -> str:
    return f"{value:,.0f}" if _is_number(value) else "-"


def _seconds(value: Any) -> str:
    return f"{value:.1f} s" if _is_number(value) else "-"


def _line(value: object) -> str:
    """Return any value as one line of bounded length without control characters."""
    return one_line(str(value)[:_LONGEST])
