"""All facts about a run, during or after it: from its folder, and from Redis if that answers.

Facts come from the first source that has them: the books in Redis (a stopped fleet's own server is started for a
moment), then `summary.json`, which `up` wrote at its end, then the last row of `metrics.jsonl`.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import orjson
from pydantic import TypeAdapter

from headrace.broker.redis.parser import HashParser
from headrace.deploy.annexes.watch.report.run_series import RunSeries
from headrace.deploy.annexes.watch.state.fleet_state import groups_of, tasks_of
from headrace.deploy.loggers import Row
from headrace.deploy.loggers.row_files import JsonlFile
from headrace.deploy.monitoring.bottleneck import find_bottleneck
from headrace.deploy.monitoring.facts import FactsReader
from headrace.deploy.monitoring.findings import find, verdict
from headrace.deploy.report.audit import read_and_audit, warnings
from headrace.deploy.report.progress import duration
from headrace.deploy.report.summary import plain_errors, queued_in_words, read_run_facts
from headrace.deploy.run.evaluation_log import EvaluationLog
from headrace.deploy.run.fleet_file import FleetFile, read_fleet_file
from headrace.deploy.run.redis_view import Snapshot
from headrace.deploy.run.run_dir import is_locked
from headrace.schemas.accounts.consumer_groups import GroupRow
from headrace.schemas.accounts.env_errors import EnvErrorRow
from headrace.schemas.accounts.figures import GAUGE_TABLE
from headrace.schemas.accounts.ledger import FleetLedger
from headrace.schemas.accounts.lifetime_counters import COUNTER_TABLE
from headrace.schemas.basics.run_files import read_object
from headrace.schemas.errors import HeadraceError
from headrace.schemas.settings.config_loading import known_keys
from headrace.schemas.settings.redis_url import without_password

_PLACES = ("fleet.run_dir", "redis.url")
"""Settings that say where a run was, and not what it was."""
_ERRORS = TypeAdapter(list[EnvErrorRow])


def read_run(run_dir: Path) -> tuple[dict[str, Any], RunSeries]:
    """Return the facts about the run in a folder, which are plain values for JSON, and its curves.

    Raises `RunDirError` where no fleet was started in the folder.
    """
    page, told = read_fleet_file(run_dir / "fleet.json"), read_run_facts(run_dir)
    config = _config(run_dir)
    snapshot, audit = _books(run_dir, told)
    series = RunSeries(rows_of(run_dir))
    state = _state(run_dir, page, told)
    facts: dict[str, Any] = {
        "run_dir": str(run_dir),
        "fleet_id": page.fleet_id,
        "env": str(config.get("sampling.env", "")),
        "state": state,
        "started_unix_s": page.started or told.get("started_unix_s"),
        "ended_unix_s": told.get("ended_unix_s") if state == "ended" else None,
        "written_unix_s": round(time.time(), 3),
        "seconds": round(series.end_s, 3),
        "starts": len(series.starts),
        "versions": told.get("versions", {}),
        "machine": told.get("machine", {}),
        "numbers": _numbers(snapshot, told if state == "ended" else {}, series),
        "ledger": _ledger(snapshot, told if state == "ended" else {}, series),
        "audit": audit,
        "goal_reached": told.get("goal_reached"),
        "error": told.get("error"),
        "restarts": _restarts(told, series),
        "processes": _processes(page, told, state),
        "tasks": tasks_of(_tasks(snapshot, told if state == "ended" else {}), time.time()),
        "groups": groups_of(_groups(snapshot, told if state == "ended" else {}), time.time()),
        "errors": _errors(snapshot, told if state == "ended" else {}),
        "evaluations": EvaluationLog(run_dir).take_new(),
        "marks": [{"elapsed_s": round(at, 1), "what": what} for at, what in series.marks],
        "settings": _changed(config),
    }
    facts["findings"], line, facts["bottleneck"] = [], "", str(told.get("bottleneck", "")) if state == "ended" else ""
    if state == "running":
        facts["findings"], line, facts["bottleneck"] = _seen_now(run_dir)
    facts["verdict"] = f"{_verdict(facts)} {line}".strip()
    return facts, series


def series_of(series: RunSeries) -> dict[str, Any]:
    """Return the curves as plain values for JSON: column -> elapsed_s, env_steps and value, equally long lists."""
    return {
        name: {"elapsed_s": list(column.elapsed_s), "env_steps": list(column.env_steps), "value": list(column.values)}
        for name, column in series.columns.items()
    }


def _state(run_dir: Path, page: FleetFile, told: Mapping[str, Any]) -> str:
    """Return "running", "ended", or "killed" for a run whose supervisor ended without draining it."""
    if is_locked(run_dir):
        return "running"
    return "ended" if told.get("state") == "ended" or page.state == "stopped" else "killed"


def _seen_now(run_dir: Path) -> tuple[list[dict[str, Any]], str, str]:
    """Return the findings of a running fleet, the worst first, and the verdict and bottleneck that the page shows."""
    try:
        with FactsReader(run_dir) as reader:
            seen = reader.read()
    except HeadraceError:
        return [], "", ""
    findings = find(seen)
    limit = find_bottleneck(seen, findings)
    line = verdict(seen, findings)
    return [asdict(finding) for finding in findings], line, limit.in_words() if limit is not None else ""


def _errors(snapshot: Snapshot | None, told: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the groups of failures of envs, from Redis, else as they were at the end of the run."""
    if snapshot is not None:
        return plain_errors(snapshot.errors.values())
    return plain_errors(_ERRORS.validate_python(told.get("errors", [])))


def _tasks(snapshot: Snapshot | None, told: Mapping[str, Any]) -> Mapping[str, Mapping[str, float]]:
    """Return the figures of tasks, from Redis, else as they were at the end of the run."""
    if snapshot is not None:
        return snapshot.task_figures
    found = {task.encode(): orjson.dumps(own) for task, own in told.get("tasks", {}).items()}
    return HashParser().task_figures(found)


def _groups(snapshot: Snapshot | None, told: Mapping[str, Any]) -> Mapping[str, GroupRow]:
    """Return the state of consumer groups, from Redis, else as it was at the end of the run."""
    if snapshot is not None:
        return {name: books.state for name, books in snapshot.groups.items()}
    found = {name.encode(): orjson.dumps(state) for name, state in told.get("groups", {}).items()}
    return {name: books.state for name, books in HashParser().groups(found, {}, {}).items()}


def _books(run_dir: Path, told: Mapping[str, Any]) -> tuple[Snapshot | None, dict[str, Any]]:
    """Return the books in Redis, if they can be read, and what the audit says of them or said at the run's end."""
    try:
        snapshot, problems = read_and_audit(run_dir)
    except HeadraceError as error:
        if told.get("state") != "ended" or told.get("ledger") is None:
            return None, {"balanced": None, "problems": [], "warnings": [], "note": f"not checked: {error}"}
        note = "as checked at the end of the run; its Redis does not answer any more"
        found = {"balanced": told.get("balanced"), "problems": told.get("problems", []), "warnings": [], "note": note}
        return None, found
    note = "checked now, against Redis and the recorders of the workers"
    return snapshot, {"balanced": not problems, "problems": problems, "warnings": warnings(snapshot), "note": note}


def rows_of(run_dir: Path) -> Iterator[Row]:
    """Yield the rows that `up` logged."""
    return JsonlFile(run_dir / "metrics.jsonl").rows()


def _config(run_dir: Path) -> dict[str, Any]:
    """Return the settings of the run as they were asked for, by dotted key."""
    sections = read_object(run_dir / "settings.json") or read_object(run_dir / "config.json")
    return {f"{section}.{key}": value for section, values in sections.items() for key, value in values.items()}


def _changed(config: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the settings that differ from their defaults."""
    changed = []
    for dotted, default in known_keys().items():
        plain = orjson.loads(orjson.dumps(default))
        value = config.get(dotted, plain)
        if value != plain and dotted not in _PLACES:
            changed.append({"key": dotted, "value": value, "default": plain})
    if config.get("redis.url"):
        changed.append({"key": "redis.url", "value": without_password(str(config["redis.url"])), "default": ""})
    return changed


def _numbers(snapshot: Snapshot | None, told: Mapping[str, Any], series: RunSeries) -> dict[str, Any]:
    """Return figures by name: as told at the run's end, else of the same moment as the books, else of the last row."""
    unlabelled = (metric for metric in (*GAUGE_TABLE, *COUNTER_TABLE) if not metric.label)
    numbers: dict[str, Any] = {metric.name: series.last.get(metric.column_for()) for metric in unlabelled}
    numbers["weights_lag"] = series.last.get("weights_lag")
    if snapshot is not None:
        numbers |= {**snapshot.totals, **snapshot.gauges}
    ended = {"env_steps_total": "env_steps", "episodes_total": "episodes", "episode_return_mean": "mean_return"}
    ended |= {name: name for name in ("episodes_window", "episodes_window_aborted")}
    at_end = {name: told.get(key) for name, key in ended.items()} | told.get("rates", {})
    return numbers | {name: value for name, value in at_end.items() if value is not None}


def _ledger(snapshot: Snapshot | None, told: Mapping[str, Any], series: RunSeries) -> dict[str, Any] | None:
    """Return the books of the fleet in agent steps, with the name of their source."""
    if snapshot is not None and snapshot.reported_unix_s is not None:
        return {**_plain_ledger(snapshot.fleet), "source": "Redis"}
    if told.get("ledger") is not None:
        return {**_plain_ledger(FleetLedger.model_validate(told["ledger"])), "source": "summary.json"}
    last = series.last
    if "committed_steps" not in last:
        return None
    parts = {
        kind: {name.partition("/")[2]: count for name, count in last.items() if name.startswith(f"{kind}_steps/")}
        for kind in ("dropped", "discarded")
    }
    books = {"stepped": last.get("agent_steps"), "committed": last["committed_steps"], "queued": last["queued_steps"]}
    return {**books, **parts, "source": "the last row of metrics.jsonl"}


def _plain_ledger(ledger: FleetLedger) -> dict[str, Any]:
    return {
        "stepped": ledger.stepped,
        "committed": ledger.committed[0],
        "queued": ledger.queued,
        "dropped": {reason: count[0] for reason, count in sorted(ledger.dropped.items())},
        "discarded": dict(sorted(ledger.discarded.items())),
    }


def _restarts(told: Mapping[str, Any], series: RunSeries) -> dict[str, int]:
    """Return restarts by role, of the newest `up` in the folder."""
    if told.get("state") == "ended":
        return {role: count for role, count in told.get("restarts", {}).items() if count}
    of_roles = {name.partition("/")[2]: count for name, count in series.last.items() if name.startswith("restarts/")}
    return {role: count for role, count in of_roles.items() if isinstance(count, int) and count}


def _processes(page: FleetFile, told: Mapping[str, Any], state: str) -> list[dict[str, Any]]:
    if state == "ended" and "processes" in told:
        found: list[dict[str, Any]] = told["processes"]
        return found
    members = {"name", "role", "restarts", "state"}
    return [entry.model_dump(include=members) for entry in (*page.processes, *page.waiting)]


def _verdict(facts: Mapping[str, Any]) -> str:
    """Return in a line how long the run took and how it ended, what was lost, and whether the books add up."""
    lasted = duration(facts["seconds"])
    if facts["state"] == "running":
        return f"Running for {lasted}."
    if facts["state"] == "killed":
        said = f"Its supervisor was killed after about {lasted}, or could not note its end; a drain is not known."
    elif facts["error"]:
        said = f"Ended after {lasted} with an error: {facts['error']}"
        said += "" if said.endswith((".", "!", "?")) else "."
    else:
        said = f"Ended after {lasted}: " + ("the goal was reached." if facts["goal_reached"] else "it was stopped.")
    books = facts["ledger"]
    if books is None:
        return f"{said} The books are not known."
    lost = sum(books["dropped"].values()) + sum(books["discarded"].values())
    if lost:
        share = f" ({100 * lost / books['stepped']:.2g} %)" if books["stepped"] else ""
        said += f" {lost:,} of {books['stepped']:,} agent steps{share} did not reach the learner, each with its reason."
    left = queued_in_words(books["queued"], in_order=facts["state"] == "ended" and not facts["error"])
    if left or not lost:
        said += f" {left or 'Nothing lost.'}"
    if facts["audit"]["balanced"] is False:
        said += " The books do NOT add up."
    return said
