"""`headrace why`: says what is wrong with a fleet, what limits it, and what helps; once, or at each change."""

from __future__ import annotations

import sys
import time
from dataclasses import asdict
from typing import TextIO

import orjson

from headrace.deploy.monitoring.bottleneck import Bottleneck, find_bottleneck
from headrace.deploy.monitoring.facts import Facts, FactsReader
from headrace.deploy.monitoring.findings import Finding, find, verdict
from headrace.deploy.monitoring.processes import SUPERVISOR
from headrace.deploy.terminal.std_streams import ignore_closed_reader
from headrace.schemas.basics.printable import printable

WATCH_S = 1.0
_LOOKS_FOR_ERROR = 30
"""Looks of a watch for the error of a run that ends. A supervisor that is stopped or out of reach never writes it."""


def why(reader: FactsReader, *, as_json: bool, watch: bool, stream: TextIO = sys.stdout) -> list[Finding]:
    """Print the verdict, what limits the fleet, and each finding.

    With `watch` print them at each change until the fleet has ended. A watch waits half a minute for the error of a run
    that ends. Return the findings that were printed last.
    """
    shown: object = None
    looks_left = _LOOKS_FOR_ERROR if watch else 0
    while True:
        facts = reader.read()
        findings = find(facts)
        line = verdict(facts, findings)
        if looks_left and line.startswith("Ended") and _drains_here(facts):
            looks_left -= 1
            time.sleep(WATCH_S)
            continue
        limit = find_bottleneck(facts, findings)
        now = ([(one.kind, one.whom) for one in findings], line.partition(" ")[0], limit and limit.who)
        if now != shown:
            shown = now
            with ignore_closed_reader(stream):
                told = _as_json if as_json else _as_text
                print(told(facts, line, findings, limit), file=stream)
                stream.flush()
        if not watch or line.startswith("Ended"):
            return findings
        time.sleep(WATCH_S)


def _drains_here(facts: Facts) -> bool:
    """Return whether the supervisor may still write to the run directory why the run ends."""
    supervisor = facts.processes.get(SUPERVISOR)
    return facts.run_dir is not None and supervisor is not None and supervisor.state == "draining"


def _as_text(facts: Facts, line: str, findings: list[Finding], limit: Bottleneck | None) -> str:
    lines = [line] if limit is None else [line, limit.in_words()]
    for one in findings:
        since = "" if one.since_unix_s is None else time.strftime(" [since %H:%M:%S]", time.localtime(one.since_unix_s))
        lines += ["", f"{one.severity}: {one.sentence}{since}"]
        lines += [f"  limit: {one.limit}"] if one.limit else []
        lines += [f"  try:   {one.command}"] if one.command else []
        lines += [f"  kind:  {one.kind}"]
    return printable("\n".join(lines))


def _as_json(facts: Facts, line: str, findings: list[Finding], limit: Bottleneck | None) -> str:
    told = {"fleet_id": facts.snapshot.fleet_id, "unix_s": round(facts.unix_s, 3), "verdict": line}
    told["bottleneck"] = limit.in_words() if limit is not None else ""
    return orjson.dumps(told | {"findings": [asdict(one) for one in findings]}).decode()
