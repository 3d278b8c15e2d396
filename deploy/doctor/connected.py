"""The check of the versions of a running fleet's connected peers, as reported in Redis."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from headrace.deploy.doctor.check import Check, Verdict
from headrace.deploy.run.redis_view import FleetView, Snapshot, told_versions
from headrace.schemas.basics.headrace_version import headrace_version
from headrace.schemas.basics.printable import one_line
from headrace.schemas.errors import RedisUnavailableError

_MOST_NAMED = 5
_UNTOLD = "no version told"


def connected_check(url: str, fleet_id: str) -> Check:
    """Compare the versions of the broker, the learner and the workers with one another and with ours."""
    try:
        with FleetView(url, fleet_id) as view:
            seen = view.read()
    except RedisUnavailableError as error:
        return Check("connected", Verdict.WARN, str(error))
    return judge_versions(seen, headrace_version())


def judge_versions(seen: Snapshot, own: str) -> Check:
    """Judge the versions in a fleet's state. Peers of several versions work together during an upgrade."""
    told = told_versions(seen)
    if "broker" not in told:
        return Check("connected", Verdict.OK, "no broker has reported yet")
    said = f"{_by_version({**told, 'this machine': own})}{_hosts(seen.workers)}"
    others = [name for name, version in told.items() if version != told["broker"]]
    advice = []
    if own != told["broker"]:
        advice.append(f"install headrace {told['broker']} here, or upgrade the broker")
    if others:
        advice.append(f"install headrace {told['broker']} for {_some(others)}, and start them again")
    return Check("connected", Verdict.WARN if advice else Verdict.OK, said, "; ".join(advice))


def _by_version(told: Mapping[str, str]) -> str:
    names: dict[str, list[str]] = {}
    for name, version in told.items():
        names.setdefault(version or _UNTOLD, []).append(name)
    return "; ".join(f"{version}: {_some(who)}" for version, who in names.items())


def _hosts(workers: Mapping[int, Mapping[str, Any]]) -> str:
    hosts = sorted({one_line(str(row.get("host", ""))) for row in workers.values()} - {""})
    return f"; workers on {_some(hosts)}" if hosts else ""


def _some(names: Collection[str]) -> str:
    shown = list(names)[:_MOST_NAMED]
    more = len(names) - len(shown)
    return ", ".join(shown) + (f" and {more} more" if more else "")
