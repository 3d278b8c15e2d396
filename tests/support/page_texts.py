"""Derive the texts that the live page should show of a state. None of the page's own code takes part."""

from __future__ import annotations

import time
from collections.abc import Callable
from decimal import ROUND_HALF_UP, Decimal
from typing import Any

Texts = dict[str, dict[str, list[str]]]

READ = """
(() => {
  const texts = (elements) => [...elements].map((one) => one.textContent);
  const pairs = (list) => Object.fromEntries([...document.querySelectorAll(`${list} > div`)]
    .map((one) => [one.dataset.of, texts(one.querySelectorAll('dd'))]));
  const rows = (table) => Object.fromEntries([["", texts(document.querySelectorAll(`${table} thead th`))],
    ...[...document.querySelectorAll(`${table} tbody tr`)].map((row) => [row.cells[0].textContent,
      texts(row.cells).slice(1)])]);
  return { state, texts: { tiles: pairs('#tiles'), learner: pairs('#learner'), redis: pairs('#redis'),
    logged: pairs('#logged'), workers: rows('#workers'), policies: rows('#policies'), peers: rows('#peers'),
    tasks: rows('#tasks'),
    groups: rows('#groups'),
    processes: rows('#processes'),
    ledger: Object.fromEntries([...document.querySelectorAll('#fleet-ledger .flow > div')]
      .map((one) => [one.dataset.of, texts(one.querySelectorAll('strong, li'))])),
    findings: Object.fromEntries([...document.querySelectorAll('#findings > li')]
      .map((one) => [one.dataset.kind, texts(one.querySelectorAll('b, span, .quiet, code'))])),
    errors: Object.fromEntries([...document.querySelectorAll('#errors article')]
      .map((one) => [one.querySelector('strong').textContent, texts(one.querySelectorAll('p, pre'))])) } };
})()
"""
"""An expression that returns the state that the page shows, and the texts by which it does."""


def page_texts(state: dict[str, Any]) -> Texts:
    """Return the texts that the page should have for a state, by section and by name. A table's head has no name."""
    return {
        "tiles": {one["key"]: [one["text"], one["note"]] for one in state["tiles"]},
        "learner": _learner(state["learner"], state["labelled"]),
        "redis": _redis(state["redis"]),
        "logged": {name: [some(value)] for name, value in state["logged"].items()},
        "workers": _workers(state["columns"], state["workers"]),
        "policies": {
            "": ["Policy", "Mean return", "Least", "Most", "Mean length", "Agents"],
            **{
                one["module"]: [
                    *(some(one[f"return_{kind}"]) for kind in ("mean", "min", "max")),
                    some(one.get("len_mean")),
                    whole(one["agents"]),
                ]
                for one in state["policies"]
            },
        },
        "tasks": _tasks(state["tasks"]),
        "groups": _groups(state["groups"]),
        "peers": _peers(state["workers"]),
        "processes": _processes(state["processes"]),
        "ledger": _ledger(state["ledger"]),
        "findings": {one["kind"]: _finding(one) for one in state["findings"]},
        "errors": {f"{one['exception']}, {one['count']} times": _error(one) for one in state["errors"]},
    }


def _learner(learner: dict[str, Any], labelled: dict[str, Any]) -> dict[str, list[str]]:
    return {
        "connected": ["yes" if learner["is_connected"] else "no", ""],
        "epoch": [whole(learner["epoch"]), ""],
        "since": [moment(learner["since_unix_s"]), ""],
        "commit": [f"{span(learner['committed_age_s'])} ago", ""],
        **{f"share/{part}": [percent(value), ""] for part, value in labelled["learner_time_share"].items()},
        **{f"logged/{name}": [some(value), ""] for name, value in learner["logged"].items()},
    }


def _redis(redis: dict[str, Any]) -> dict[str, list[str]]:
    own = redis["server"]
    name, version = own.get("server_name"), own.get("valkey_version") or own["redis_version"]
    memory = f"{size(own['used_memory'])} of {size(own['maxmemory'])}" if own["maxmemory"] else size(own["used_memory"])
    return {
        "Answers": ["yes"],
        "Version": [f"{name}; {version}" if name else version],
        "Memory": [memory],
        "Policy when full": [own["maxmemory_policy"]],
        "Append-only file": [f"on, last write {own['aof_last_write_status']}" if own["aof_enabled"] else "off"],
        "Last snapshot": [own["rdb_last_bgsave_status"]],
        "Evicted keys": [whole(own["evicted_keys"])],
        "Connections": [whole(own["connected_clients"])],
        "Commands/s": [whole(own["instantaneous_ops_per_sec"])],
        "Up for": [span(own["uptime_in_seconds"])],
    }


TEXTS: dict[str, Callable[[Any], str]] = {
    "": lambda value: str(value or "-"),
    "1": lambda value: percent(value),
    "bytes": lambda value: size(value),
    "env steps/s": lambda value: some(value) if value and 0 < value < 1 else whole(value),
    "versions": lambda value: "older epoch" if value < 0 else whole(value),
}
"""Texts of a worker's figures by their unit. All others are plain numbers."""


def _workers(columns: list[dict[str, str]], workers: list[dict[str, Any]]) -> dict[str, list[str]]:
    shown = {one["name"]: [TEXTS.get(c["unit"], some)(one.get(c["key"])) for c in columns[1:]] for one in workers}
    return {"": [column["title"] for column in columns], **shown}


def _groups(groups: list[dict[str, Any]]) -> dict[str, list[str]]:
    rows = {"": ["Group", "Reader", "If slow", "Lag, steps", "Oldest", "Committed", "Lost", "Last commit"]}
    for one in groups:
        reader = joined("connected" if one["connected"] else "none", one["reader"])
        slow, oldest = {"wait": "workers wait", "drop": "loses batches"}[one["on_slow"]], span(one["oldest_s"])
        committed = f"{span(one['committed_age_s'])} ago" if one["committed_age_s"] is not None else "-"
        counts = [whole(one["lag_steps"]), oldest if one["lag_steps"] else "-", whole(one["committed"][0])]
        rows[one["group"]] = [reader, slow, *counts, whole(one["lost"]), committed]
    return rows if groups else {}


def _tasks(tasks: list[dict[str, Any]]) -> dict[str, list[str]]:
    rows = {"": ["Task", "Mean return", "Mean length", "Episodes", "Env failures", "Last"]}
    for one in tasks:
        means = [some(one.get(name)) for name in ("return_mean", "len_mean")]
        counts = [whole(one[name]) for name in ("episodes", "env_failures")]
        rows[one["task"]] = [*means, *counts, f"{span(one['last_age_s'])} ago"]
    return rows


def _peers(workers: list[dict[str, Any]]) -> dict[str, list[str]]:
    rows = {"": ["Worker", "Env hosts", "Clients", "Requests/s", "Median", "95 %"]}
    for one in workers:
        hosts, serving = one.get("env_hosts"), one.get("serving")
        if hosts or serving:
            told = serving or dict[str, float]()
            spans = [span(told.get("latency_p50_s")), span(told.get("latency_p95_s"))]
            found = f"{hosts['connected']} of {hosts['wanted']}" if hosts else "-"
            rows[one["name"]] = [found, whole(told.get("clients")), some(told.get("requests_per_s")), *spans]
    return rows


def _processes(processes: list[dict[str, Any]]) -> dict[str, list[str]]:
    rows = {"": ["Process", "State", "pid", "Age", "Restarts", "CPU", "Memory", "Host", "Last end"]}
    for one in processes:
        state = joined("stopped by a signal" if one["is_stopped"] else one["state"], one["doing"])
        counts = [str(one["pid"] or "-"), span(one["age_s"]), whole(one["restarts"]), percent(one["cpu_share"])]
        rows[one["name"]] = [state, *counts, size(one["rss_bytes"]), one["host"] or "-", one["last_words"] or "-"]
    return rows


def _ledger(books: dict[str, Any]) -> dict[str, list[str]]:
    losses = [
        f"{whole(loss['agent_steps'])} {loss['kind']}: {loss['reason']} ({loss['meaning']})" for loss in books["losses"]
    ]
    ways = [f"{whole(books['with_workers'])} with workers"]
    return {
        "stepped": [whole(books["stepped"])],
        "undelivered": [whole(books["undelivered"]), *losses],
        "queued": [whole(books["queued"]), *ways, f"{whole(books['with_broker_or_learner'])} with broker or learner"],
        "committed": [whole(books["committed"]), f"{percent(books['committed_share'])} of all"],
    }


def _finding(one: dict[str, Any]) -> list[str]:
    since = f"for {span(one['for_s'])}, since {clock(one['since_unix_s'])}" if one["since_unix_s"] else ""
    limit = f"limit: {one['limit']}" if one["limit"] else ""
    helps = "" if one["command"] else f"try: {one['remedy']}"
    return [one["severity"].title(), one["sentence"], joined(since, limit, helps), one["command"]]


def _error(one: dict[str, Any]) -> list[str]:
    times = f"{one['exception']}, {one['count']} times"
    began = f"first {moment(one['first_unix_s'])}"
    ended = f"last {clock(one['last_unix_s'])} ({span(one['last_age_s'])} ago)"
    slots = "workers " + ", ".join(map(str, one["slots"]))
    where = f"{one['kind']} in {one['env']}"
    tasks = f"tasks {', '.join(one['tasks'])}" if "tasks" in one else ""
    times_and_places = joined(where, f"at {one['where']}", began, ended, slots, tasks)
    return [f"{times} {one['message']}", times_and_places, one["traceback"]]


def joined(*parts: str) -> str:
    return "; ".join(part for part in parts if part)


def half_up(value: float, digits: int = 0) -> Decimal:
    """Round as the page does: a half goes up, where Python's `round` and formats take the even neighbour."""
    return Decimal(value).quantize(Decimal(1).scaleb(-digits), ROUND_HALF_UP)


def whole(value: float | None) -> str:
    return "-" if value is None else f"{half_up(value):,}"


def some(value: float | None) -> str:
    if value is None:
        return "-"
    if abs(value) < 100:
        return f"{value:.4g}".replace("e-0", "e-")
    return f"{value:,.1f}".removesuffix(".0")


def percent(share: float | None) -> str:
    return "-" if share is None else f"{half_up(100 * share, 1 if share < 0.1 else 0)} %"


def size(count: float | None) -> str:
    if count is None:
        return "-"
    power = 0
    while count >= 1024 and power < 4:
        count, power = count / 1024, power + 1
    return f"{half_up(count, 1 if power else 0)} {('B', 'KiB', 'MiB', 'GiB', 'TiB')[power]}"


def span(seconds: float | None) -> str:
    if seconds is None:
        return "-"
    if seconds < 60:
        return f"{float(half_up(seconds, 1)):g} s" if seconds < 10 else f"{half_up(seconds)} s"
    days, rest = divmod(int(seconds), 86400)
    hours, minutes, left = rest // 3600, rest % 3600 // 60, rest % 60
    found = [f"{count} {unit}" for count, unit in ((days, "d"), (hours, "h"), (minutes, "min"), (left, "s"))]
    first = next(i for i, text in enumerate(found) if not text.startswith("0 "))
    return " ".join(text for text in found[first : first + 2] if not text.startswith("0 "))


def clock(unix_s: float | None) -> str:
    return "-" if not unix_s else time.strftime("%H:%M:%S", time.localtime(unix_s))


def moment(unix_s: float) -> str:
    at = time.localtime(unix_s)
    return f"{at.tm_mday} {time.strftime('%b %Y, %H:%M:%S', at)}"
