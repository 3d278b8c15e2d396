"""Finds what is wrong with a fleet by its facts: who waits for whom, since when, by which limit, and what helps.

    Facts ──▶ observations (process_checks.py, stream_checks.py) ──▶ findings: those that last too long
                                                                └──▶ what a fleet that stands still waits for

Each sentence has one place. `headrace up`, `why`, `top` and the page show the same.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from headrace.deploy.monitoring import process_checks, stream_checks
from headrace.deploy.monitoring.facts import Facts
from headrace.deploy.monitoring.finding_kinds import KINDS, Observation, observe
from headrace.deploy.monitoring.finding_kinds import Finding as Finding
from headrace.deploy.monitoring.losses import losses_in_words
from headrace.deploy.monitoring.processes import GONE, LEAST_ROOM, STOPPED, SUPERVISOR
from headrace.deploy.report.summary import queued_in_words
from headrace.deploy.run.annexes import part
from headrace.schemas.accounts.env_errors import INFO_LEFT_OUT
from headrace.schemas.basics.printable import one_line
from headrace.schemas.settings.redis_url import without_password

_WAITING = "waiting for "
_WORKER = "worker-"
_OF_ENVS = ("envs_failing", "envs_down", "env_hosts_missing")
_NO_LEARNER = ("no_learner", "learner_loading")
_ENV = re.compile(r" in (env \d+) at ")
_MOST_OF_A_KIND = 4
_REDIS_STARTS_S = 15.0

_PLACE = {kind.name: place for place, kind in enumerate(KINDS)}
"""The table has causes before what comes of them."""


def find(facts: Facts) -> list[Finding]:
    """Return the findings, the worst first; none for a fleet that starts, runs, drains or ended in order."""
    wrong = [one.finding for one in _observations(facts) if one.is_wrong]
    return sorted(_few_of_a_kind(wrong), key=lambda one: (one.severity != "error", _PLACE[one.kind]))


def notes(facts: Facts, findings: Sequence[Finding]) -> list[Finding]:
    """Return what is worth knowing beside the findings: restarts, infos that are left out, a failure to repeat."""
    told = list(process_checks.restarted(facts))
    for row in facts.snapshot.errors.values():
        if row.kind == INFO_LEFT_OUT:
            sentence = f"{one_line(row.message)}, {row.count:,} so far"
            told.append(Finding("info_left_out", "info", one_line(row.where), sentence))
    rerun = part("rerun_of")(facts.run_dir) if facts.run_dir is not None else ""
    if rerun and all(one.command != rerun for one in findings):
        sentence = "the newest failure of an env can be repeated"
        told.append(Finding("failure_kept", "info", "env", sentence, command=rerun))
    return told


def awaited(facts: Facts) -> str:
    """Return what a fleet that takes no step waits for, with the command that helps; "" if steps are only slow."""
    found = sorted(_few_of_a_kind(one.finding for one in _observations(facts)), key=lambda one: _PLACE[one.kind])
    waits = [one for one in found if one.sentence.startswith(_WAITING)]
    parts = [f"{one.sentence} ({one.command})" if one.command else one.sentence for one in waits or found]
    return "; ".join(part.removeprefix(_WAITING) for part in parts)


def verdict(facts: Facts, findings: list[Finding]) -> str:
    """Return one line on the whole fleet."""
    state = _state(facts)
    if state == STOPPED:
        how = f" with an error: {one_line(facts.failure).rstrip('.')}" if facts.failure else ""
        return f"Ended{how}. {_books(facts)}"
    if state == "draining":
        return f"Draining. {losses_in_words(facts.snapshot.fleet)}"
    seen = list(_observations(facts))
    lost = _left_and_lost(facts) if state == GONE else losses_in_words(facts.snapshot.fleet)
    if state == GONE or not _moves(facts):
        if findings:
            waits = [one for one in (*findings, *(one.finding for one in seen)) if one.sentence.startswith(_WAITING)]
            return f"{_sentence((waits if findings[0].severity == 'warning' and waits else findings)[0])} {lost}"
        if facts.snapshot.totals.get("env_steps_total") and (facts.snapshot.gauges.get("weights_seq") or _told(facts)):
            return f"{_sentence(seen[0].finding) if seen else 'No steps at the moment.'} {lost}"
        return f"Starting: {'; '.join(one.finding.sentence for one in seen) or 'processes start'}."
    away = [_sentence(one.finding) for one in seen if one.finding.kind in _NO_LEARNER]
    learns = not away and all(one.kind != "metric_not_finite" for one in findings)
    told = [] if any(one.whom == "learner" for one in findings) else away
    return " ".join(["Learning." if learns else "Sampling.", *_late(facts, seen), *told, *_others(findings), lost])


def _books(facts: Facts) -> str:
    if facts.snapshot.reported_unix_s is None:
        return "Its books are not known, since Redis has none: `headrace report` shows what the run left."
    return f"{facts.snapshot.totals.get('env_steps_total', 0):,} env steps. {_left_and_lost(facts)}"


def _left_and_lost(facts: Facts) -> str:
    """Return what the books of a fleet that has ended still have as queued, and what is lost."""
    books = facts.snapshot.fleet
    left = queued_in_words(books.queued, in_order=facts.snapshot.ended_unix_s is not None)
    return f"{left} {losses_in_words(books, '')}".strip() if left else losses_in_words(books)


def _observations(facts: Facts) -> Iterator[Observation]:
    """Yield all observations, causes before their effects; of a fleet that has ended, that its disk is full."""
    state = _state(facts)
    if state == STOPPED:
        yield from _of_disk(facts)
        return
    yield from process_checks.supervisor_check(facts)
    if state == GONE:
        return  # all other processes died with the supervisor
    yield from _of_disk(facts)
    is_known = not facts.is_old and facts.snapshot.reported_unix_s is not None
    states = facts.snapshot.workers if is_known else {}
    stuck = process_checks.stuck(facts, states)
    if state == "draining":
        yield from (one for one in stuck.values() if one.finding.kind == "process_stopped")
        return
    yield from process_checks.between_lives(facts)
    if facts.waits_for:
        lease = observe(facts, "redis_away", "Redis", f"{_WAITING}{facts.waits_for}")
        yield Observation(lease.finding, is_wrong=False)  # the start ends by itself
    elif facts.redis_error and "redis" not in stuck:
        yield _redis_away(facts)
    elif facts.redis_refusal:
        yield from _redis_refuses(facts)
        if not facts.snapshot.gauges:
            return  # they have expired, and tell nothing of the fleet
    yield from stuck.values()
    if state == "starting":
        return
    own = [process for process in facts.processes.values() if process.role == "worker"]
    if {"broker", "learner"} & stuck.keys() or (own and all(worker.name in stuck for worker in own)):
        return  # this causes the other waits, and the last reports may be old
    if not facts.is_old:
        yield from process_checks.joins_blocked(facts)
    yield from process_checks.not_ready(facts, states)
    if facts.is_old:
        return
    if facts.processes or is_known:  # before that, nothing is known of the fleet
        yield from stream_checks.no_worker(facts)
    if is_known and not facts.snapshot.gauges:
        yield _no_reports(facts)
    elif facts.processes or is_known:
        ready = {slot: told for slot, told in states.items() if f"worker-{slot}" not in stuck}
        if ready or not own:
            yield from stream_checks.waits_of_workers(facts, ready)
    yield from stream_checks.failing_envs(facts)
    yield from stream_checks.left_bounds(facts)
    yield from stream_checks.refused_tasks(facts)
    yield from stream_checks.many_aborted(facts)
    yield from stream_checks.censored_episodes(facts)
    yield from stream_checks.losing_groups(facts)
    yield from stream_checks.learner_threads(facts)
    yield from stream_checks.metrics_not_finite(facts)
    yield from stream_checks.refusals(facts)
    yield from stream_checks.oversize(facts)
    yield from process_checks.lost_elsewhere(facts)
    if facts.snapshot.garbage:
        many = len(facts.snapshot.garbage)
        values = "1 value" if many == 1 else f"{many:,} values"
        sentence = f"Redis has {values} that cannot be read; the first: {facts.snapshot.garbage[0]}"
        yield observe(facts, "redis_garbage", "Redis", sentence)


def _state(facts: Facts) -> str:
    """Return starting, running, draining, stopped or gone, as the supervisor reports; "" without a supervisor.

    Without a supervisor, or while it drains, the fleet counts as stopped once its broker has reported its end.
    """
    supervisor = facts.processes.get(SUPERVISOR)
    state = supervisor.state if supervisor is not None else ""
    return STOPPED if state in ("", "draining") and facts.snapshot.ended_unix_s is not None else state


def _told(facts: Facts) -> bool:
    """Return whether a broker has reported since this supervisor started, and its reports have expired since."""
    supervisor = facts.processes.get(SUPERVISOR)
    since = math.inf if supervisor is None else supervisor.started_unix_s
    return not facts.snapshot.gauges and (facts.snapshot.reported_unix_s or 0.0) > since


def _moves(facts: Facts) -> bool:
    return not facts.is_old and facts.snapshot.gauges.get("env_steps_per_s", 0.0) > 0


def _redis_away(facts: Facts) -> Observation:
    where = "" if facts.config is None else f" at {without_password(facts.config.redis.url)}"
    if facts.snapshot.away is not None:
        sentence = f"Redis{where} takes no reports ({facts.redis_error}); the fleet goes on, and reports later"
        return observe(facts, "redis_away", "Redis", sentence, facts.redis_age_s)
    if facts.snapshot.reported_unix_s is not None:
        sentence = f"waiting for Redis{where}, silent for {facts.redis_age_s:.0f} s ({facts.redis_error})"
        return observe(facts, "redis_away", "Redis", sentence, facts.redis_age_s)
    supervisor = facts.processes.get(SUPERVISOR)
    sentence = f"waiting for Redis{where} to answer ({facts.redis_error})"
    for_s = None if facts.redis_away_unix_s is None else max(0.0, facts.unix_s - facts.redis_away_unix_s)
    seen = observe(facts, "redis_away", "Redis", sentence, for_s)
    starts = supervisor is not None and facts.unix_s - supervisor.started_unix_s < _REDIS_STARTS_S
    return Observation(seen.finding, is_wrong=not starts)


def _redis_refuses(facts: Facts) -> Iterator[Observation]:
    """Yield that Redis takes no writes, unless it is a replica that gets the broker's reports from elsewhere."""
    reported = facts.snapshot.reported_unix_s
    for_s = None if reported is None else max(0.0, facts.unix_s - reported)
    age = "none of the broker's reports" if for_s is None else f"no report of the last {for_s:.0f} s"
    sentence = f"Redis takes no writes ({facts.redis_refusal}) and has {age}; the broker may be well: its log knows"
    if for_s is None or for_s > 3 * facts.snapshot.report_interval_s:
        yield observe(facts, "redis_away", "Redis", sentence, for_s)


def _no_reports(facts: Facts) -> Observation:
    """Return the observation that no broker reports: its last report has expired in Redis."""
    for_s = max(0.0, facts.unix_s - (facts.snapshot.reported_unix_s or 0.0))
    sentence = f"waiting for the broker, which has reported nothing to Redis for {for_s:.0f} s"
    sentence += "" if facts.run_dir is not None else ", unless Redis refuses its reports"
    # A broker reports a moment after a Redis that was away answers again.
    return observe(facts, "broker_silent", "broker", sentence, min(for_s, facts.redis_back_s))


def _of_disk(facts: Facts) -> Iterator[Observation]:
    if facts.disk_free_bytes is None or facts.disk_free_bytes >= LEAST_ROOM:
        return
    where, command = str(facts.run_dir), facts.in_run_dir("df -h")
    supervisor = facts.processes.get(SUPERVISOR)
    if facts.run_dir is None and supervisor is not None:
        where, command = f"the run directory on {one_line(supervisor.host)}", ""
    left = f"{facts.disk_free_bytes / 2**20:.1f} MiB are left"
    sentence = f"waiting for room on the disk of {where}, which is full: {left}"
    yield observe(facts, "disk_full", "disk", sentence, command=command)


def _late(facts: Facts, seen: Iterable[Observation]) -> list[str]:
    """Return how many workers are late, with the first one, and an env that fails, as sentences."""
    wrong = [one.finding for one in seen if one.is_wrong and one.finding.whom.startswith(_WORKER)]
    late = {name for one in wrong if one.kind not in _OF_ENVS for name in _names(one)}
    own = {process.name for process in facts.processes.values() if process.role == "worker"}
    workers = len(own | {f"{_WORKER}{slot}" for slot in facts.snapshot.workers} | late)
    first = min(late, key=lambda name: (len(name), name), default="")
    said = [f"{len(late)} of {workers} workers late ({first})."] if late else []
    return said + [_sentence(one) for one in wrong if one.kind in _OF_ENVS][:1]


def _names(finding: Finding) -> list[str]:
    return [f"{_WORKER}{slot}" for slot in finding.slots] or [finding.whom]


def _others(findings: list[Finding]) -> list[str]:
    others = [one for one in findings if not one.whom.startswith(_WORKER)]
    return [_sentence(replace(one, sentence=one.sentence.partition("; ")[0])) for one in others[:2]]


def _sentence(finding: Finding) -> str:
    """Return a finding for the verdict. The finding itself has the rest."""
    text = finding.sentence
    if finding.kind in _OF_ENVS:
        env = f"{found[1]} of " if (found := _ENV.search(text)) else ""
        text = f"envs fail ({env}{_names(finding)[0]})"
    return f"{text[:1].upper()}{text[1:]}."


def _few_of_a_kind(findings: Iterable[Finding]) -> list[Finding]:
    """Return the findings, limited per kind. One more finding summarises the rest of its kind."""
    by_kind: dict[str, list[Finding]] = {}
    for one in findings:
        by_kind.setdefault(one.kind, []).append(one)
    return [short for of_kind in by_kind.values() for short in _shortened(of_kind)]


def _shortened(found: list[Finding]) -> list[Finding]:
    shown, rest = found[:_MOST_OF_A_KIND], found[_MOST_OF_A_KIND:]
    if not rest:
        return shown
    one = rest[0]
    whom = f"{one.whom} and {len(rest) - 1} more" if len(rest) > 1 else one.whom
    sentence = f"{whom}: {one.kind.replace('_', ' ')} too"
    return [*shown, Finding(one.kind, one.severity, whom, sentence, one.since_unix_s, one.limit)]
