"""`headrace top`: a fleet in a terminal, read again each second; plain text once where there is no terminal.

Nothing here computes a number of the fleet. Every text of a peer is shown on one line, without control characters.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from textwrap import wrap

import orjson
from rich.console import Group
from rich.live import Live
from rich.text import Text

from headrace.deploy.annexes.watch.state.fleet_state import Document, StateReader
from headrace.deploy.annexes.watch.state.series import CurvesReader
from headrace.deploy.annexes.watch.state.shown_figures import TILES, as_text
from headrace.deploy.monitoring.facts import FactsReader
from headrace.deploy.report.progress import duration, short_number
from headrace.deploy.terminal.console import PrintableConsole
from headrace.deploy.terminal.std_streams import ignore_closed_reader, say
from headrace.schemas.accounts.env_errors import INFO_LEFT_OUT
from headrace.schemas.accounts.redis_keys import RINGS
from headrace.schemas.basics.printable import one_line
from headrace.schemas.basics.stop_event import stop_event

INTERVAL_S = 1.0
Curves = Mapping[str, Sequence[float | None]]

SHOWN_CURVES = tuple(figure.name for figure in TILES if figure.chart)
"""Curves that stand beside the tiles of these figures."""
_STYLES = {"ok": "bold green", "warning": "bold yellow", "error": "bold red", "ended": "bold", "unknown": "bold"}
_BLOCKS = "▁▂▃▄▅▆▇█"
_MOST_FINDINGS = 3
_SPARK = 14
_LABEL = 17
_WIDTHS = {"slot": 7, "status": 15, "host": 20}
"""Widths of columns with text, and of the first. The others have room for their headings and a short number."""
_OF_TASK = {"return_mean": "return", "len_mean": "length", "episodes": "episodes", "env_failures": "env failures"}
_TROUBLE = "yellow"
_LONGEST = 400


class StateSource:
    """Reads state and curves. One thread at a time."""

    def __init__(self, reader: FactsReader) -> None:
        self._reader = reader
        self._state = StateReader(reader)
        self._series = CurvesReader([RINGS[0][1]])
        self.curves: Curves = {}

    def read(self) -> Document:
        """Return the state as of now. Waits some seconds at most. Raises what `FactsReader.read` raises."""
        document = self._state.read()
        self._series.read(self._reader.view)
        for ring in self._series.readers.values():
            self.curves = ring.series(names=SHOWN_CURVES).curves
        return document


def top(reader: FactsReader, *, once: bool, as_json: bool) -> None:
    """Show the fleet until Ctrl-C. Show it once if `once` is set, or if stdout is no terminal.

    Raises `RedisContractError`, and `RunDirError` once the run directory was removed.
    """
    source = StateSource(reader)
    if as_json:
        say(orjson.dumps(source.read()).decode())
    elif once or not _is_interactive():
        console = PrintableConsole()
        with ignore_closed_reader(sys.stdout):
            for line in plain(source.read(), source.curves, console.width):
                console.print(line, no_wrap=True, overflow="ellipsis", crop=True, highlight=False)
    else:
        _show(source)


def _is_interactive() -> bool:
    is_dumb = os.environ.get("TERM", "dumb") in ("", "dumb", "unknown")
    return sys.stdout.isatty() and not is_dumb


def _show(source: StateSource) -> None:
    """Draw the newest state each second, until Ctrl-C or SIGTERM."""
    with (
        stop_event() as stopping,
        Live(Text("reading the fleet"), console=PrintableConsole(), screen=True, auto_refresh=False) as live,
    ):
        while not stopping.is_set():
            document = source.read()
            width, height = live.console.size
            live.update(Group(*screen(document, source.curves, width, height)), refresh=True)
            stopping.wait(INTERVAL_S)


def screen(document: Document, curves: Curves, width: int, height: int) -> list[Text]:
    """Return exactly `height` lines, none wider than `width`."""
    foot = Text(" Ctrl-C quits, and the fleet goes on   headrace dashboard sorts and filters", style="reverse")
    body = height - 1
    lines = head(document, curves, width)[: max(1, body - 3)]
    lines += _table(document, width, max(0, body - len(lines)))
    lines = lines[:body] + [Text()] * (body - len(lines))
    for line in (*lines, foot):
        line.no_wrap = True
        line.truncate(width, overflow="ellipsis")
    foot.pad_right(max(0, width - foot.cell_len))
    return [*lines, foot][-height:] if height > 0 else []


def plain(document: Document, curves: Curves, width: int) -> list[Text]:
    """Return everything at once, for a pipe or a file."""
    lines = [*head(document, curves, width, most=max(len(document["findings"]), len(document["tasks"]))), Text()]
    return [*lines, *_table(document, width, None)]


def head(document: Document, curves: Curves, width: int, most: int = _MOST_FINDINGS) -> list[Text]:
    """Return verdict, findings, numbers and ledger."""
    fleet = document["fleet"]
    about = " · ".join(said for said in (fleet.get("env"), fleet.get("id"), fleet.get("state")) if said)
    at = time.strftime("%H:%M:%S", time.localtime(document["unix_s"]))
    style = _STYLES.get(document["severity"], "bold")
    lines = [Text(f"headrace top  {_line(about)}  {at}", style="dim")]
    lines += [Text(part, style=style) for part in wrap(_line(document["verdict"]), max(1, width))]
    lines += [Text(_line(document["bottleneck"]))] if document["bottleneck"] else []
    lines += _findings(document, most)
    if document["redis"]["is_old"] and document["severity"] != "ended":
        age = duration(document["redis"]["age_s"])
        lines.append(Text(f"These numbers are {age} old: Redis does not answer.", style="yellow"))
    lines += _ledger(document)
    lines += _numbers(document, curves, width)
    lines += _shares(document)
    lines += _errors(document)
    lines += _tasks(document, most)
    lines += _groups(document)
    return lines


def _findings(document: Document, most: int) -> Iterator[Text]:
    findings = document["findings"]
    for one in findings[:most]:
        yield _finding(one)
        if helps := one["command"] or one["remedy"]:
            yield Text(f"    {_line(helps)}", style="cyan")
    if len(findings) > most:
        yield Text(f"  and {len(findings) - most} more: headrace why", style="dim")


def _finding(one: Document) -> Text:
    since = f" (for {duration(one['for_s'])})" if one["for_s"] is not None else ""
    limit = f" [{one['limit']}]" if one["limit"] else ""
    style = "red" if one["severity"] == "error" else "yellow"
    return Text(_line(f"! {one['sentence']}{since}{limit}"), style=style)


def _numbers(document: Document, curves: Curves, width: int) -> Iterator[Text]:
    """Yield the tiles, two in a line where both have room there."""
    half = max(38, width // 2)
    line = Text()
    for tile in document["tiles"]:
        cell = Text(f"{tile['title']:<{_LABEL}}", style="dim").append(tile["text"], style="bold")
        cell.append(f", {tile['note']}" if tile["note"] else "")
        spark = sparkline(curves.get(tile["key"], ()), min(_SPARK, max(0, half - cell.cell_len - 3)))
        cell.append(f" {spark}" if spark else "", style="cyan")
        if line and (line.cell_len >= half or half + cell.cell_len > width):
            yield line
            line = Text()
        if line:
            line.pad_right(half - line.cell_len)
        line.append_text(cell)
    yield line


def _ledger(document: Document) -> Iterator[Text]:
    books = document["ledger"]
    if not document["fleet"]["id"]:
        yield Text("ledger       not known: nothing was read from Redis", style="dim")
        return
    stepped = books["stepped"]
    share = f" ({100 * books['committed'] / stepped:.1f} %)" if stepped else ""
    line = Text("ledger       ", style="dim")
    kept = books["undelivered"] - books["lost"]
    line.append(
        f"{stepped:,} = committed {books['committed']:,}{share} + queued {books['queued']:,} + lost {books['lost']:,}"
        + (f" + not for the learner {kept:,}" if kept else ""),
        style="default",
    )
    if books["balance"]:
        line.append(f"; does not add up by {books['balance']:+,}", style="bold red")
    yield line
    if books["losses"]:
        losses = ", ".join(f"{one['reason']} {one['agent_steps']:,}" for one in books["losses"])
        yield Text(_line(f"{'undelivered' if kept else 'lost':<13}{losses}"), style="yellow")


def _shares(document: Document) -> Iterator[Text]:
    for name, label in (("worker_time_share", "workers"), ("learner_time_share", "learner")):
        shares = document["labelled"].get(name, {})
        parts = [f"{part} {100 * share:.0f} %" for part, share in shares.items() if share >= 0.005]
        if parts:
            yield Text(f"{label + ' time':<13}", style="dim").append(_line(", ".join(parts)), style="default")


def _tasks(document: Document, most: int) -> Iterator[Text]:
    tasks = sorted(document["tasks"], key=lambda one: one["last_age_s"])[: max(most, _MOST_FINDINGS)]
    for one in tasks:
        said = [f"{title} {short_number(one[name])}" for name, title in _OF_TASK.items() if name in one]
        yield Text("task         ", style="dim").append(_line(f"{one['task']}: {', '.join(said)}"), style="default")
    if len(document["tasks"]) > len(tasks):
        yield Text(f"  and {len(document['tasks']) - len(tasks)} tasks more: headrace dashboard", style="dim")


def _groups(document: Document) -> Iterator[Text]:
    for one in document["groups"]:
        gone = ", not connected" if one["reader"] and not one["connected"] else ""
        said = f"{one['group']} ({one['on_slow']}): {one['reader'] or 'no reader'}{gone}"
        said += f"; lag {one['lag_steps']:,} steps, committed {one['committed'][0]:,}, lost {one['lost']:,}"
        yield Text("group        ", style="dim").append(_line(said), style="" if one["connected"] else "yellow")


def _errors(document: Document) -> Iterator[Text]:
    for one in sorted(document["errors"], key=lambda one: one["kind"] == INFO_LEFT_OUT)[:1]:
        said = (
            f"{one.get('count', 1):,} x {one.get('exception', '')}: {one.get('message', '')} ({one.get('where', '')})"
        )
        said += f", task {one['tasks'][-1]}" if one.get("tasks") else ""
        yield Text(_line(f"env errors   {said}"), style="yellow")


def _table(document: Document, width: int, height: int | None) -> list[Text]:
    """Return the table of workers, those first that do not run. `height` is None for all of them."""
    workers = sorted(document["workers"], key=lambda worker: (_style(worker) != _TROUBLE, worker["slot"]))
    columns = list(_fitting(document["columns"], width))
    lines = [Text("".join(_cell(column["title"], column) for column in columns), style="bold")]
    shown = workers if height is None or len(workers) < height else workers[: max(0, height - 2)]
    for worker in shown:
        texts = (_cell(as_text(worker.get(one["key"]), one["unit"], short_number), one) for one in columns)
        lines.append(Text("".join(texts), style=_style(worker)))
    if len(workers) > len(shown):
        lines.append(Text(f"and {len(workers) - len(shown):,} workers more", style="dim"))
    if not workers:
        lines.append(Text("no worker yet", style="dim"))
    return lines


def _width(column: Document) -> int:
    return _WIDTHS.get(column["key"], max(11 if column["unit"] == "bytes" else 6, len(column["title"]) + 1))


def _fitting(columns: Sequence[Document], width: int) -> Iterator[Document]:
    taken = 0
    for column in columns:
        taken += _width(column)
        if taken > width and column is not columns[0]:
            return
        yield column


def _cell(value: str, column: Document) -> str:
    text, room = Text(value), _width(column) - 1
    text.truncate(room, overflow="ellipsis")
    space = " " * (room - text.cell_len)
    return f"{space}{text.plain} " if column["unit"] or column["key"] == "slot" else f"{text.plain}{space} "


def _style(worker: Document) -> str:
    if not worker.get("is_connected") or worker.get("state") != "running":
        return _TROUBLE if worker.get("state") != "connected" else ""
    return "dim" if worker.get("blocked") else ""


def sparkline(values: Sequence[float | None], width: int) -> str:
    """Return the newest values as a small chart of one line, from the smallest to the largest of them."""
    newest = list(values)[-width:] if width > 0 else []
    known = [value for value in newest if value is not None]
    if not known:
        return ""
    low, high = min(known), max(known)
    span = high - low or 1.0
    top = len(_BLOCKS) - 1
    return "".join(" " if value is None else _BLOCKS[round((value - low) / span * top)] for value in newest)


def _line(value: object) -> str:
    """Return any value as one line of bounded length without control characters."""
    return one_line(str(value)[:_LONGEST])
