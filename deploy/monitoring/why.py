"""`headrace why`: says what is wrong with a fleet, what limits it, and what helps."""

from __future__ import annotations

import sys
import time
from dataclasses import asdict
from typing import TextIO

import orjson

from headrace.deploy.monitoring.bottleneck import Bottleneck, find_bottleneck
from headrace.deploy.monitoring.facts import Facts, FactsReader
from headrace.deploy.monitoring.findings import Finding, find, notes, verdict
from headrace.deploy.terminal.std_streams import say


def why(reader: FactsReader, *, as_json: bool, stream: TextIO = sys.stdout) -> list[Finding]:
    """Print the verdict, what limits the fleet, each finding, and what else is worth knowing. Return the findings."""
    facts = reader.read()
    findings = find(facts)
    line, limit = verdict(facts, findings), find_bottleneck(facts, findings)
    say((_as_json if as_json else _as_text)(facts, line, findings, limit), stream)
    return findings


def _as_text(facts: Facts, line: str, findings: list[Finding], limit: Bottleneck | None) -> str:
    lines = [line] if limit is None else [line, limit.in_words()]
    for one in [*findings, *notes(facts, findings)]:
        at = one.since_unix_s
        day = "%Y-%m-%d " if at is not None and facts.unix_s - at > 86_400 else ""
        since = "" if at is None else time.strftime(f" [since {day}%H:%M:%S]", time.localtime(at))
        lines += ["", f"{one.severity}: {one.sentence}{since}"]
        lines += [f"  limit: {one.limit}"] if one.limit else []
        lines += [f"  try:   {one.command or one.remedy}"] if one.command or one.remedy else []
        lines += [f"  kind:  {one.kind}"]
    return "\n".join(lines)


def _as_json(facts: Facts, line: str, findings: list[Finding], limit: Bottleneck | None) -> str:
    told = {"fleet_id": facts.snapshot.fleet_id, "unix_s": round(facts.unix_s, 3), "verdict": line}
    told["bottleneck"] = limit.in_words() if limit is not None else ""
    for name, rows in (("findings", findings), ("info", notes(facts, findings))):
        told[name] = [asdict(one) for one in rows]
    return orjson.dumps(told).decode()
