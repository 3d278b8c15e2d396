"""The HTML of a run's report, from the facts and curves that `run_report.py` gathered."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

import orjson

from headrace.deploy.annexes.watch.report.html_page import folded, page, paragraph, table, text, tiles
from headrace.deploy.annexes.watch.report.run_series import RunSeries
from headrace.deploy.annexes.watch.state.shown_figures import REPORT_CHARTS, Chart, tiles_of
from headrace.deploy.monitoring.losses import loss_of
from headrace.deploy.report.progress import duration, short_number
from headrace.schemas.basics.printable import one_line, printable

Line = Mapping[str, Any]
"""A curve: `name` of the column, `label`, and `dots` where its values belong to single moments."""

MOST_CURVES = 8
"""Curves of a chart."""
MOST_CHARTS = 24
"""Charts of learner's figures, and of what callbacks logged."""
MOST_ROWS = 200
_LONGEST = 300
_FIRST_FIGURES = ("loss", "policy_loss", "value_loss", "entropy", "kl", "explained_variance", "learning_rate")
_NO_FIGURES = ("update", "steps", "episodes", "epochs")
_EVALUATED = "evaluation/return_mean"
_ASSETS = files("headrace.deploy.annexes.watch.page") / "assets"
_SCRIPTS = (
    *(_ASSETS / name for name in ("uPlot.iife.min.js", "elements.js", "charts.js")),
    files("headrace.deploy.annexes.watch.report") / "report.js",
)
_STYLE = """
:root { --quiet: var(--dim); --grid: var(--line); --error: var(--bad) } [hidden] { display: none !important }
.charts { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(100%, 22rem), 1fr)); gap: 1rem }
figure { margin: 0; background: var(--card); border-radius: 6px; padding: .7rem .8rem; min-width: 0;
break-inside: avoid } figcaption { font-size: .85rem; display: flex; flex-wrap: wrap; gap: 0 .8rem; min-height: 1.5em;
overflow-wrap: anywhere; font-variant-numeric: tabular-nums } figcaption span { min-width: 0 }
.swatch { display: inline-block; width: .7em; height: .7em; border-radius: 2px; margin-right: .3em }
button { font: inherit; color: inherit; background: var(--card); border: 1px solid var(--line); border-radius: 6px;
padding: .1rem .6rem; margin-right: .4rem; cursor: pointer } button:focus-visible { outline: 2px solid var(--c0);
outline-offset: 2px } button[aria-pressed="true"] { background: var(--ink); color: var(--paper) }
@media print { figure { border: 1px solid var(--line) } .buttons { display: none } }
"""
_AXES = """<p class="buttons" role="group" aria-label="Horizontal axis">
<button type="button" data-axis="time" aria-pressed="true">Time</button>
<button type="button" data-axis="steps" aria-pressed="false">Env steps</button></p>"""


def report_html(facts: Mapping[str, Any], series: RunSeries) -> str:
    """Return the whole page."""
    name = Path(facts["run_dir"]).name
    is_bad = facts["error"] or facts["state"] == "killed" or facts["audit"]["balanced"] is False
    charts = [chart for chart in _charts(series) if chart["lines"]]
    books = facts["ledger"]
    is_whole = books is not None and not books["dropped"] and not books["discarded"] and not facts["findings"]
    kind = "bad" if is_bad else "good" if is_whole else "warn"
    return page(
        f"{name}: headrace report",
        (
            f"<h1>{text(name)}</h1>",
            paragraph(_bounded(facts["verdict"]), f"verdict {kind}"),
            paragraph(_bounded(facts["bottleneck"])) if facts["bottleneck"] else "",
            paragraph(_when(facts), "dim"),
            *_findings(facts["findings"]),
            tiles(_key_numbers(facts)),
            "<h2>Curves</h2>",
            *_curves(charts, series),
            "<h2>Ledger</h2>",
            *_ledger(facts),
            *_tasks(facts["tasks"]),
            *_groups(facts["groups"]),
            "<h2>Failures of envs</h2>",
            *_errors(facts["errors"]),
            "<h2>Evaluations</h2>",
            _evaluations(facts["evaluations"]),
            "<h2>Restarts</h2>",
            *_restarts(facts),
            "<h2>What ran</h2>",
            *_what_ran(facts),
        ),
        _STYLE + (_ASSETS / "uPlot.min.css").read_text(),
        [file.read_text() for file in _SCRIPTS] if charts else [],
    )


def _when(facts: Mapping[str, Any]) -> str:
    again, started = facts["starts"] - 1, f"started {_moment(facts['started_unix_s'])}"
    parts = [f"{facts['env']}, fleet {facts['fleet_id']}", f"last {started}" if again else started]
    if facts["ended_unix_s"]:
        parts.append(f"ended {_moment(facts['ended_unix_s'])}")
    if again:
        parts.append(f"the run went on {'once' if again == 1 else f'{again} times'} in its folder")
        parts.append("Time is of all starts, Env steps/s and Restarts of the last one")
    return "; ".join([*parts, f"this report is of {_moment(facts['written_unix_s'])}"]) + "."


def _findings(findings: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    for one in findings[:MOST_ROWS]:
        since = f" since {_moment(one['since_unix_s'])}" if one["since_unix_s"] else ""
        limit = f" ({one['limit']})" if one["limit"] else ""
        yield paragraph(_bounded(f"{one['sentence']}{since}{limit}"), "bad" if one["severity"] == "error" else "warn")
        if one["command"]:
            yield f"<p><code>{text(_bounded(one['command']))}</code></p>"


def _key_numbers(facts: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    books, restarts = facts["ledger"], facts["restarts"]
    numbers = {**facts["numbers"], "restarts": sum(restarts.values()), "restarts_by_role": restarts}
    if books is not None:
        kinds = ("dropped", "discarded")
        numbers["lost"] = sum(n for kind in kinds for reason, n in books[kind].items() if loss_of(kind, reason).by)
    yield "Time", duration(facts["seconds"])
    yield from ((tile["title"], tile["text"]) for tile in tiles_of(numbers) if tile["text"] != "-")


def _curves(charts: Sequence[Chart], series: RunSeries) -> Iterator[str]:
    if not charts:
        yield paragraph("There are no rows yet: the fleet has not taken a step, or its rows were removed.", "dim")
        return
    marks = " Dashed lines mark the changes that are listed below." if series.marks else ""
    yield paragraph(f"The time is that for which the fleet ran. Point at a curve for its values.{marks}", "dim")
    yield _AXES
    yield '<p id="no-history" hidden>No curve has a value.</p><div id="charts" class="charts"></div>'
    yield "<noscript><p>The curves need JavaScript. headrace report --csv writes their values.</p></noscript>"
    if series.marks:
        rows = [(duration(at), what) for at, what in series.marks]
        yield folded("changes", table("changes", ("time", "what"), rows, 2))
    yield f'<script type="application/json" id="rows">{_rows(charts, series)}</script>'


def _rows(charts: Sequence[Chart], series: RunSeries) -> str:
    """Return the charts and their curves as JSON that cannot end the script element around it."""
    names = {line["name"] for chart in charts for line in chart["lines"]}
    names |= {name for chart in charts for band in chart["bands"] for name in band[:2]}
    times, curves = series.drawn((names | {"env_steps"}) & series.columns.keys())
    if "env_steps" in curves:
        curves["env_steps_total"] = curves.pop("env_steps")
    marks = [{"unix_s": at, "kind": "again", "sentence": what} for at, what in series.marks]
    document = {"isElapsed": True, "charts": charts, "unix_s": times, "curves": curves, "marks": marks}
    return orjson.dumps(document).decode().replace("<", "\\u003c")


def _charts(series: RunSeries) -> Iterator[Chart]:
    def chart(title: str, lines: Iterable[Line]) -> Chart:
        return {"title": title, "unit": "", "scale": 1, "lines": list(lines)[:MOST_CURVES], "bands": []}

    by_policy = [name for name in series.names("policies/") if name.endswith("/return_mean")]
    yield chart("Mean return by policy", (_line(name, _bounded(name.split("/")[1])) for name in by_policy))
    for known in REPORT_CHARTS:
        lines = [line for line in known["lines"] if line["name"] in series.columns][:MOST_CURVES]
        bands = [band for band in known["bands"] if {*band[:2]} <= series.columns.keys()]
        if known["title"] == "Return of episodes" and _EVALUATED in series.columns:
            lines.append({**_line(_EVALUATED, "evaluation"), "dots": True})
        yield {**known, "lines": lines, "bands": bands}
    for column in [*_figures(series), *series.names("callbacks/")[:MOST_CHARTS]]:
        yield chart(_bounded(column.replace("/", ": ", 1)), [_line(column, "logged")])


def _line(column: str, label: str) -> Line:
    return {"name": column, "label": label}


def _figures(series: RunSeries) -> list[str]:
    """Return the columns of the learner's figures, the usual ones first."""
    columns = [name for name in series.names("learner/") if name.rpartition("/")[2] not in _NO_FIGURES]
    rank = {name: number for number, name in enumerate(_FIRST_FIGURES)}
    return sorted(columns, key=lambda name: rank.get(name.rpartition("/")[2], len(rank)))[:MOST_CHARTS]


def _ledger(facts: Mapping[str, Any]) -> Iterator[str]:
    books, audit = facts["ledger"], facts["audit"]
    if books is None:
        yield paragraph("The books are not known: Redis does not answer, and the run left none in its folder.", "warn")
    else:
        stepped = books["stepped"] or 0
        rows = [("committed", books["committed"], "trained on")]
        rows.append(("queued", books["queued"], "with a worker, the broker or the learner"))
        for kind, chunks in (("dropped", "became chunks"), ("discarded", "never became a chunk")):
            for reason, steps in books[kind].items():
                rows.append((f"{kind}: {reason}", steps, loss_of(kind, reason).meaning or chunks))
        yield table(
            f"what became of {_count(stepped)} agent steps, as in {books['source']}",
            ("", "", "agent steps", "share"),
            [(name, what, _count(steps), _share(steps, stepped)) for name, steps, what in rows],
            2,
        )
    if audit["balanced"]:
        yield paragraph(f"The books balance ({audit['note']}).", "good")
    elif audit["balanced"] is None:
        yield paragraph(f"Audit {_bounded(audit['note'])}", "dim")
    else:
        yield paragraph(f"The books do not balance ({audit['note']}):", "bad")
    yield "".join(paragraph(_bounded(problem), "bad") for problem in audit["problems"][:MOST_ROWS])
    yield "".join(paragraph(_bounded(warning), "warn") for warning in audit["warnings"][:MOST_ROWS])


def _tasks(tasks: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    if not tasks:
        return
    yield "<h2>Tasks</h2>"
    rows = [
        (
            _bounded(one["task"]),
            *(_value(one.get(name)) for name in ("return_mean", "len_mean")),
            *(_count(one.get(name)) for name in ("episodes", "env_failures")),
            _moment(one.get("last_unix_s")),
        )
        for one in tasks[:MOST_ROWS]
    ]
    columns = ("task", "mean return", "mean length", "episodes", "failures of envs", "last")
    yield table("means are over the newest 100 episodes of a task", columns, rows)


def _groups(groups: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    if not groups:
        return
    yield "<h2>Consumer groups</h2>"
    rows = [
        (
            _bounded(one["group"]),
            _bounded(one["reader"] or "none"),
            one["on_slow"],
            *(_count(steps) for steps in (one["committed"][0], one["lag_steps"], one["lost"])),
            _moment(one["committed_unix_s"]),
        )
        for one in groups
    ]
    columns = ("group", "reader", "if it is slow", "committed", "lag", "lost", "last commit")
    yield table("in agent steps, besides the learner's", columns, rows)


def _errors(errors: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    if not errors:
        yield paragraph("None is known.", "dim")
        return
    rows = [
        (
            _bounded(one["kind"]),
            _bounded(f"{one['exception']}: {one['message']}" if one["exception"] else one["message"])
            + _bounded("".join(f"; task {task}" for task in one.get("tasks", ())[-1:])),
            _bounded(one["where"]),
            ", ".join(map(str, one["slots"])),
            _moment(one["first_unix_s"]),
            _moment(one["last_unix_s"]),
            _count(one["count"]),
        )
        for one in errors[:MOST_ROWS]
    ]
    columns = ("kind", "what", "where", "workers", "first", "last", "times")
    yield table("failures of envs with the same cause, the newest first", columns, rows, 6)
    for one in errors[:MOST_ROWS]:
        if one["traceback"]:
            name = _bounded(f"{one['exception'] or one['kind']} at {one['where']}")
            yield folded(f"traceback: {name}", f"<pre>{text(printable(one['traceback']))}</pre>")


def _evaluations(told: Sequence[Mapping[str, Any]]) -> str:
    if not told:
        return paragraph("None. learner.evaluate_every_steps asks for them during training.", "dim")
    rows = [
        (
            _moment(one["unix_s"]),
            _count(one["steps"]),
            _count(one["episodes"]),
            f"{_value(one['return']['mean'])} ± {_value(one['return']['std'])}",
            f"{_value(one['return']['min'])} to {_value(one['return']['max'])}",
            _value(one["length"]["mean"]),
            "best so far" if one.get("best") else "",
        )
        for one in told[-MOST_ROWS:]
    ]
    columns = ("time", "steps trained on", "episodes", "mean return", "returns", "mean length", "")
    return table(f"the newest {len(rows)} of {len(told)}", columns, rows)


def _restarts(facts: Mapping[str, Any]) -> Iterator[str]:
    by_role = facts["restarts"]
    since = " since the newest start of the fleet" if facts["starts"] > 1 else ""
    if not by_role:
        yield paragraph(f"None{since}.", "dim")
    else:
        said = ", ".join(f"{count} ({role})" for role, count in by_role.items())
        yield paragraph(f"{said}{since}.")
    rows = [
        (*(_bounded(one.get(key) or "") for key in ("name", "state", "last_words")), _count(one.get("restarts")))
        for one in facts["processes"][:MOST_ROWS]
    ]
    if rows:
        yield folded(
            f"{len(rows)} processes",
            table("processes", ("name", "state", "how its last life ended", "restarts"), rows, 3),
        )


def _what_ran(facts: Mapping[str, Any]) -> Iterator[str]:
    machine, versions = facts["machine"], facts["versions"]
    rows = [("folder", facts["run_dir"]), ("env", facts["env"]), ("fleet", facts["fleet_id"])]
    rows += [(name, str(number)) for name, number in versions.items()]
    if machine:
        nbytes = machine.get("memory_bytes")
        memory = f", {nbytes / (1 << 30):.0f} GiB of memory" if nbytes else ""
        rows.append(("machine", f"{machine.get('host')}: {machine.get('system')}, {machine.get('cpus')} CPUs{memory}"))
    yield table("the run and its machine", ("", ""), [(name, _bounded(value)) for name, value in rows], 2)
    settings = [(one["key"], _json(one["value"]), _json(one["default"])) for one in facts["settings"]]
    if settings:
        yield table("settings that differ from their defaults", ("setting", "value", "default"), settings, 3)
    else:
        yield paragraph("All settings have their defaults.", "dim")


def _moment(unix_s: Any) -> str:
    if not isinstance(unix_s, int | float) or not 0 < unix_s < 1e11:
        return "at an unknown time"
    return time.strftime("%Y-%m-%d %H:%M:%S %Z", time.localtime(unix_s))


def _count(value: Any) -> str:
    return f"{value:,.0f}" if isinstance(value, int | float) else "-"


def _value(value: Any) -> str:
    return short_number(value) if isinstance(value, int | float) else "-"


def _share(part: Any, whole: Any) -> str:
    return f"{100 * part / whole:.2f} %" if whole else "-"


def _json(value: Any) -> str:
    return "not set" if value is None else _bounded(orjson.dumps(value).decode())


def _bounded(value: object) -> str:
    """Return text of others on one line, of bounded length."""
    said = one_line(str(value))
    return said if len(said) <= _LONGEST else f"{said[:_LONGEST]}..."
