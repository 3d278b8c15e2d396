"""Lines of `headrace top`: the document of `fleet_state.py` as text, for any size of terminal or for a pipe.

Nothing here computes a number of the fleet. Every text of a peer is shown on one line, without control characters.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.text import Text

from headrace.deploy.monitoring.report.line_chart import short_number
from headrace.deploy.report.progress import duration
from headrace.schemas.basics.printable import one_line

Document = Mapping[str, Any]
Curves = Mapping[str, Sequence[float | None]]

SHOWN_CURVES = ("env_steps_per_s", "episode_return_mean", "held_batches", "accepted_agent_steps_per_s")
_STYLES = {"ok": "bold green", "warning": "bold yellow", "error": "bold red", "ended": "bold", "unknown": "bold"}
_BLOCKS, _PLAIN_BLOCKS = "▁▂▃▄▅▆▇█", ".:-=+*#@"
_MOST_FINDINGS = 3
_SPARK = 14
_LONGEST = 400
_LAST_MOMENT = 1e11
_FIRST_FIELDS = (
    *("host", "pid", "incarnation", "restarts", "last_words", "weights_epoch", "weights_seq", "weights_behind"),
    *("env_steps_per_s", "env_steps_all", "episodes_all", "held_batches", "env_failures_all", "env_failure"),
)
"""Members of a worker that are shown first."""
_OF_SERVER = (
    *("redis_version", "valkey_version", "used_memory", "maxmemory", "maxmemory_policy", "evicted_keys"),
    *("aof_enabled", "aof_last_write_status", "rdb_last_bgsave_status", "connected_clients"),
    *("instantaneous_ops_per_sec", "uptime_in_seconds"),
)
"""Fields of INFO that are shown."""

HELP = (
    ("↑ ↓ PgUp PgDn Home End", "choose a worker"),
    ("Enter", "look into the chosen worker; Esc goes back"),
    ("s", "sort by the next column; S by the one before"),
    ("r", "reverse the order"),
    ("/", "show only workers with this text in name, state, host or failure; Enter ends it, Esc clears it"),
    ("f", "all findings, with the commands that help"),
    ("m", "more: processes, Redis, the learner's figures, policies, env hosts and clients, errors of envs"),
    ("?", "this help"),
    ("q", "quit; the fleet goes on"),
)


@dataclass(frozen=True, slots=True)
class WorkerColumn:
    """A column of the table of workers: its header, width, and what it shows and sorts by."""

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


@dataclass(slots=True)
class TopState:
    """The choices that the user has made by keys."""

    view: str = "fleet"
    """fleet, worker, findings, more or help."""
    sort: int = 0
    is_reversed: bool = False
    text: str = ""
    """Only workers with this text are shown."""
    is_typing: bool = False
    slot: int | None = None
    """The chosen worker; None for the first."""
    scroll: int = 0
    page: int = 10
    """Lines of the table that were shown last."""

    def chosen(self, workers: Sequence[Document]) -> int:
        """Return the index of the chosen worker among those shown; 0 if it is not shown any more."""
        return next((place for place, worker in enumerate(workers) if worker["slot"] == self.slot), 0)


def press(state: TopState, key: str, document: Document) -> bool:
    """Take a key. Return whether to quit."""
    if state.is_typing:
        _type(state, key)
        return False
    if key == "q":
        return True
    if state.view != "fleet":
        _press_elsewhere(state, key)
        return False
    workers = shown_workers(document, state)
    moves = {"up": -1, "down": 1, "page up": -state.page, "page down": state.page, "home": -(10**9), "end": 10**9}
    if key in moves and workers:
        place = min(max(state.chosen(workers) + moves[key], 0), len(workers) - 1)
        state.slot = workers[place]["slot"]
    elif key in ("s", "S"):
        state.sort = (state.sort + (1 if key == "s" else -1)) % len(COLUMNS)
        state.is_reversed = state.sort > 0 and not COLUMNS[state.sort].is_text
        state.slot = None  # choose the first row of the new order
    elif key == "r":
        state.is_reversed, state.slot = not state.is_reversed, None
    elif key == "/":
        state.is_typing, state.text = True, ""
    elif key == "escape":
        state.text = ""
    elif key == "enter" and workers:
        state.slot, state.view, state.scroll = workers[state.chosen(workers)]["slot"], "worker", 0
    elif key in ("?", "h"):
        state.view, state.scroll = "help", 0
    elif key in ("f", "m"):
        state.view, state.scroll = "findings" if key == "f" else "more", 0
    return False


def _type(state: TopState, key: str) -> None:
    if key in ("enter", "escape"):
        state.is_typing = False
        state.text = state.text if key == "enter" else ""
    elif key == "backspace":
        state.text = state.text[:-1]
    elif len(key) == 1 and len(state.text) < 60:
        state.text += key


def _press_elsewhere(state: TopState, key: str) -> None:
    if key in ("escape", "backspace", "left", "enter", "?", "f", "m"):
        state.view = "fleet"
    elif key in ("up", "page up", "home"):
        state.scroll = 0 if key == "home" else max(0, state.scroll - (1 if key == "up" else state.page))
    elif key in ("down", "page down"):
        state.scroll += 1 if key == "down" else state.page


def shown_workers(document: Document, state: TopState) -> list[Document]:
    """Return the workers that have the text, sorted."""
    wanted = state.text.casefold()
    workers = [worker for worker in document["workers"] if not wanted or wanted in _searched(worker)]
    column = COLUMNS[state.sort]

    def order(worker: Document) -> tuple[bool, Any]:
        value = column.value(worker)
        if column.is_text:
            return False, str(value).casefold()
        return not _is_number(value), (-value if state.is_reversed else value) if _is_number(value) else 0

    ordered = sorted(workers, key=order)
    return ordered[::-1] if column.is_text and state.is_reversed else ordered


def _searched(worker: Document) -> str:
    return " ".join(str(worker.get(name, "")) for name in ("name", "host", "env_failure")).casefold() + (
        f" {_state(worker).casefold()}"
    )


def screen(document: Document, curves: Curves, state: TopState, width: int, height: int, blocks: str) -> list[Text]:
    """Return exactly `height` lines, none wider than `width`."""
    foot = Text(_foot(state), style="reverse")
    body = height - 1
    if state.view == "fleet":
        lines = head(document, curves, width, blocks)[: max(1, body - 3)]
        lines += _table(document, state, width, max(0, body - len(lines)))
    else:
        lines = _scrolled(list(_detail(document, state, width)), state, body)
    lines = lines[:body] + [Text()] * (body - len(lines))
    for line in (*lines, foot):
        line.no_wrap = True
        line.truncate(width, overflow="ellipsis")
    foot.pad_right(max(0, width - foot.cell_len))
    return [*lines, foot][-height:] if height > 0 else []


def plain(document: Document, curves: Curves, width: int, blocks: str) -> list[Text]:
    """Return everything at once, for a pipe or a file."""
    lines = [*head(document, curves, width, blocks, most=len(document["findings"])), Text()]
    return [*lines, *_table(document, TopState(), width, None)]


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
        yield Text(f"  and {len(findings) - most} more: press f", style="dim")


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


def _table(document: Document, state: TopState, width: int, height: int | None) -> list[Text]:
    workers = shown_workers(document, state)
    columns = _fitting(width)
    header = Text()
    for number, column in enumerate(columns):
        arrow = ("v" if state.is_reversed else "^") if number == state.sort else ""
        header.append(_cell(arrow + column.name, column), style="bold underline" if arrow else "bold")
    chosen, first, room = state.chosen(workers), 0, len(workers)
    if height is not None:
        room = max(0, height - 1)
        state.page = max(1, room - 1)
        first = min(max(0, chosen - room + 1), max(0, len(workers) - room)) if chosen >= room else 0
    lines = [header]
    for place, worker in enumerate(workers[first : first + room], first):
        line = Text("".join(_cell(_line(c.show(c.value(worker))), c) for c in columns))
        line.stylize("reverse" if height is not None and place == chosen else _style(worker))
        lines.append(line)
    if not workers:
        what = f"no worker has {one_line(state.text)!r}" if state.text else "no worker yet"
        lines.append(Text(what, style="dim"))
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
        return "yellow" if worker.get("state") != "connected" else ""
    return "dim" if worker.get("blocked") else ""


def _detail(document: Document, state: TopState, width: int) -> Iterator[Text]:
    if state.view == "help":
        yield Text("headrace top", style="bold")
        for key, what in HELP:
            yield Text(f"  {key:<24}", style="bold").append(what, style="default")
        return
    if state.view == "findings":
        yield Text(_line(document["verdict"]), style=_STYLES.get(document["severity"], "bold"))
        for one in document["findings"]:
            yield _finding(one)
            yield from [Text(f"    {_line(one['command'])}", style="cyan")] if one["command"] else []
        if not document["findings"]:
            yield Text("nothing is wrong", style="dim")
        return
    if state.view == "more":
        yield from _more(document)
        return
    worker = next((worker for worker in document["workers"] if worker["slot"] == state.slot), None)
    if worker is None:
        yield Text(f"worker {state.slot} is gone", style="yellow")
        return
    yield Text(_line(f"{worker['name']}: {_state(worker)}"), style="bold")
    first = {name: worker[name] for name in _FIRST_FIELDS if name in worker}
    yield from _fields(first | {name: value for name, value in worker.items() if name not in first})


def _more(document: Document) -> Iterator[Text]:
    """Yield what the page shows beside the numbers and the workers, each part with a title."""
    server, logged, peers = document["redis"]["server"], document["learner"]["logged"], list(_peers(document))
    parts: tuple[tuple[str, Sequence[Text]], ...] = (
        ("processes          state               pid   CPU    MiB  restarts", [*map(_process, document["processes"])]),
        ("Redis", [*_fields({name: server[name] for name in _OF_SERVER if name in server})]),
        ("figures that the learner logged", [*_fields(logged)]),
        ("policies           return (least to most)           length", [*map(_policy, document["policies"])]),
        ("env hosts and clients", peers),
        ("errors of envs, the newest first", [line for one in document["errors"] for line in _error(one)]),
    )
    for title, lines in parts:
        yield Text(title, style="bold")
        yield from lines or [Text("  none", style="dim")]


def _process(one: Document) -> Text:
    state = "stopped by a signal" if one.get("is_stopped") else one.get("state", "")
    style = "" if state == "running" else "yellow"
    numbers = f"{one.get('pid') or '-':>7} {_share(one.get('cpu_share')):>5} {_megabytes(one.get('rss_bytes')):>6}"
    return Text(
        _line(f"  {_padded(one['name'], 16)} {_padded(state, 15)} {numbers} {one.get('restarts', 0):>9}"), style
    )


def _policy(one: Document) -> Text:
    spread = f"{_count(one.get('return_mean'))} ({_count(one.get('return_min'))} to {_count(one.get('return_max'))})"
    return Text(_line(f"  {_padded(one['module'], 16)} {spread:<30} {_count(one.get('len_mean'))}"))


def _peers(document: Document) -> Iterator[Text]:
    for worker in document["workers"]:
        hosts, serving, said = worker.get("env_hosts"), worker.get("serving"), []
        if isinstance(hosts, Mapping):
            said.append(f"{_whole(hosts.get('connected'))} of {_whole(hosts.get('wanted'))} env hosts")
        if isinstance(serving, Mapping):
            said.append(f"{_whole(serving.get('clients'))} clients, {_count(serving.get('requests_per_s'))} requests/s")
            said.append(f"95 % within {_milliseconds(serving.get('latency_p95_s'))}")
        if said:
            yield Text(_line(f"  {_padded(worker['name'], 16)} {', '.join(said)}"))


def _error(one: Document) -> Iterator[Text]:
    yield Text(
        _line(f"  {one['count']:,} x {one['kind']} in {one['env']}, {duration(one['last_age_s'])} ago"), "yellow"
    )
    yield Text(_line(f"    {one['exception']}: {one['message']}"))
    yield Text(_line(f"    at {one['where']}, workers {', '.join(map(str, one['slots']))}"), "dim")


def _fields(facts: Document, indent: str = "  ") -> Iterator[Text]:
    for name, value in facts.items():
        if name == "time_share" and isinstance(value, Mapping):
            said = ", ".join(f"{part} {_share(share)}" for part, share in value.items())
            yield Text(f"{indent}{name:<24}", style="dim").append(_line(said), style="default")
        elif isinstance(value, Mapping):
            yield Text(f"{indent}{_line(name)}", style="dim")
            yield from _fields(value, indent + "  ")
        elif isinstance(value, list):
            for one in value:
                yield Text(f"{indent}{_line(name)}", style="dim")
                yield from _fields(one, indent + "  ") if isinstance(one, Mapping) else [Text(_line(one))]
        else:
            yield Text(f"{indent}{_line(name):<24}", style="dim").append(_line(_plain(name, value)), style="default")


def _plain(name: str, value: Any) -> str:
    """Return a worker's value as text. The end of its name decides the format."""
    if not _is_number(value) or name == "pid":
        return "-" if value is None else str(value)
    if name.endswith("unix_s"):
        return time.strftime("%H:%M:%S", time.localtime(value)) if 0 < value < _LAST_MOMENT else "-"
    if name.endswith("_bytes"):
        return f"{value / (1 << 20):,.0f} MiB"
    return f"{value:,}" if isinstance(value, int) else short_number(value)


def _scrolled(lines: list[Text], state: TopState, height: int) -> list[Text]:
    state.page = max(1, height - 1)
    state.scroll = min(state.scroll, max(0, len(lines) - height))
    return lines[state.scroll : state.scroll + height]


def _foot(state: TopState) -> str:
    if state.is_typing:
        return f" /{one_line(state.text)}_   Enter: keep   Esc: clear"
    if state.view != "fleet":
        return " Esc back   arrows scroll   q quit"
    only = f" only {one_line(state.text)!r}, Esc: all  " if state.text else ""
    return f"{only} q quit   s sort   / filter   Enter look into   f findings   m more   ? help"


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


def _milliseconds(value: Any) -> str:
    return f"{1000 * value:.1f} ms" if _is_number(value) else "-"


def _padded(value: Any, width: int) -> str:
    """Return a text of exactly so many cells, shortened if need be."""
    text = Text(one_line(str(value)[:_LONGEST]))
    text.truncate(width, overflow="ellipsis", pad=True)
    return text.plain


def _line(value: object) -> str:
    """Return any value as one line of bounded length without control characters."""
    return one_line(str(value)[:_LONGEST])
