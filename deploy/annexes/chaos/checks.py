"""The judgement of a trial: the promises that must hold after any faults, each checked from independent sources."""

from __future__ import annotations

import io
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from headrace.deploy.annexes.chaos.deep_audit import audit_deeply
from headrace.deploy.annexes.chaos.history import History, Line, read_record
from headrace.deploy.annexes.chaos.recorder import RECORD
from headrace.deploy.annexes.chaos.schedule import SLOT_TARGETS
from headrace.deploy.annexes.chaos.trial import Injected, TrialResult
from headrace.deploy.annexes.chaos.truth import steps_by_life
from headrace.deploy.process.recorders import Life
from headrace.deploy.report.audit import read_and_audit
from headrace.deploy.run.redis_view import Snapshot
from headrace.schemas.accounts.ledger import LedgerRow
from headrace.schemas.errors import HeadraceError

_BEFORE_S, _AFTER_S = 2.0, 6.0


class Ledger:
    """The rows of the ledger by life. Lives that are folded stand together as incarnation 0 of their slot."""

    def __init__(self, seen: Snapshot) -> None:
        self.seen = seen
        self.rows: Mapping[Life, LedgerRow] = {
            **seen.rows,
            **{(slot, 0): lives.row for slot, lives in seen.folded.items()},
        }

    def key_of(self, life: Life) -> Life:
        """Return the ledger's key for a life: incarnation 0 of its slot if the life is folded."""
        return (life[0], 0) if self.seen.is_folded(life) else life

    def name_of(self, key: Life) -> str:
        """Return a name for people."""
        if key[0] in self.seen.folded and not key[1]:
            return f"slot {key[0]}, its {self.seen.folded[key[0]].lives} folded lives"
        return f"slot {key[0]} incarnation {key[1]}"


@dataclass
class Promise:
    """One promise, the evidence seen, and a sentence for each violation."""

    promise: str
    seen: str = ""
    problems: list[str] = field(default_factory=list)


@dataclass
class Judgement:
    """All checks of a trial, and its figures for the report."""

    checks: list[Promise]
    steps: dict[str, Any]
    episodes: dict[str, int]
    recovery: dict[str, dict[str, float | None]]
    """By kind of event: how many, how many of them skipped, median and longest recovery in s."""

    @property
    def problems(self) -> list[str]:
        """Return all sentences."""
        return [f"{check.promise}: {problem}" for check in self.checks for problem in check.problems]


class LastSeen:
    """The time at which each life was last seen at the learner, to name the events beside a finding."""

    def __init__(self, outcome: TrialResult) -> None:
        self._outcome = outcome
        self._last: dict[Life, float] = {}

    def note(self, line: Line) -> None:
        """Note a batch."""
        self._last[line.life] = line.seconds

    def around(self, life: Life) -> str:
        """Return in words the events around the last batch of a life."""
        if life not in self._last:
            return "the learner never had a batch of it"
        last = self._last[life]
        near = [one for one in self._outcome.injected if -_BEFORE_S <= one.at - last <= _AFTER_S and not one.skipped]
        events = ", ".join(f"{one.event.name} at {one.event.at_s:g} s" for one in near) or "none"
        return f"its last batch came at {last - self._outcome.began:.1f} s; events then: {events}"


def judge(outcome: TrialResult) -> Judgement:
    """Judge a trial by its files and by Redis, which is started for the call. Set the recovery of each event."""
    ledger, audits = _audits(outcome.folders.fleet)
    record = outcome.folders.record / RECORD
    history, moments = History(), LastSeen(outcome)
    for line in read_record(record) if record.exists() else ():
        history.read((line,))
        moments.note(line)
        _note_recovery(outcome.injected, line)
    steps = steps_by_life(outcome.folders.truth)
    truth, unfinished = _check_truth(steps, ledger, outcome, moments)
    checks = [
        _check_end(outcome),
        *audits,
        truth,
        _check_history(history, moments),
        _check_settled(history, ledger, moments),
    ]
    checks.append(_check_recovery(outcome))
    return Judgement(
        checks,
        {
            "true": steps.total(),
            "ledger": sum(row.totals.steps_of_envs for row in ledger.rows.values()),
            "unfinished_poll": unfinished,  # steps of killed lives that no book has: each env's step under way
            "recorded": history.steps.total(),
            "dropped": {reason: count for reason, (count, _) in sorted(ledger.seen.fleet.dropped.items())},
            "discarded": dict(sorted(ledger.seen.fleet.discarded.items())),
        },
        {"ended": history.episodes, "aborted": history.aborted},
        _recovery_by_kind(outcome.injected),
    )


def _check_end(outcome: TrialResult) -> Promise:
    check = Promise("the fleet goes on until it is stopped, and drains", f"exit code {outcome.up_returncode}")
    check.problems += outcome.ended_early
    if outcome.up_returncode != 0:
        failure = outcome.summary.get("failure") or outcome.summary.get("error") or "see logs/up.log"
        check.problems.append(f"the drain ended with exit code {outcome.up_returncode} ({failure})")
    queued = outcome.summary.get("ledger", {}).get("queued", 0)
    if queued:
        check.problems.append(f"{queued} steps were queued after the drain, which nobody will settle")
    return check


def _audits(run_dir: Path) -> tuple[Ledger, list[Promise]]:
    """Return the ledger, and the checks by `audit --strict` and `audit --deep`."""
    strict, deep = Promise("the books balance (audit --strict)"), Promise("all sources agree (audit --deep)")
    ledger = Ledger(Snapshot())
    try:
        seen, strict.problems = read_and_audit(run_dir)
        ledger = Ledger(seen)
        strict.seen = f"{len(seen.rows) + sum(lives.lives for lives in seen.folded.values())} lives"
    except HeadraceError as error:
        strict.problems.append(str(error))
    try:
        audit_deeply(run_dir, as_json=True, stream=io.StringIO())
    except HeadraceError as error:
        deep.problems.append(str(error))
    return ledger, [strict, deep]


def _check_truth(steps: Counter[Life], ledger: Ledger, outcome: TrialResult, moments: LastSeen) -> tuple[Promise, int]:
    """Compare the bytes that the envs wrote with the ledger: equal up to the step under way of each killed life."""
    check = Promise("each step that an env took is in the books, and no other")
    unfinished, rows = 0, ledger.rows
    if any(incarnation == 0 for _, incarnation in steps):
        lives, booked_by_slot = Counter[int](), Counter[int]()
        for (slot, incarnation), row in rows.items():
            lives[slot] += 1 if incarnation else ledger.seen.folded[slot].lives
            booked_by_slot[slot] += row.totals.steps_of_envs
        pairs = [
            (f"slot {slot}", steps[slot, 0], booked_by_slot[slot], lives[slot] * outcome.num_envs, "")
            for slot in sorted({slot for slot, _ in steps})
        ]
    else:
        taken, most_open = Counter[Life](), Counter[Life]()
        for life in {*steps, *(key for key in rows if key[1])}:
            taken[ledger.key_of(life)] += steps[life]
            most_open[ledger.key_of(life)] += 0 if life in outcome.living else outcome.num_envs
        pairs = [
            (
                ledger.name_of(key),
                taken[key],
                rows[key].totals.steps_of_envs if key in rows else 0,
                most_open[key],
                moments.around(key) if key[1] else "",
            )
            for key in sorted({*taken, *rows})
        ]
    for name, true, booked, most, where in pairs:
        unfinished += max(0, true - booked)
        if not 0 <= true - booked <= most:
            check.problems.append(
                f"{name}: its envs took {true:,} steps, and the ledger has {booked:,}; "
                f"at most {most} may be unfinished; {where}"
            )
    check.seen = f"{steps.total():,} steps; {unfinished} of them unfinished polls of killed workers"
    if not steps.total():
        check.problems.append("no env took a step")
    return check, unfinished


def _check_history(history: History, moments: LastSeen) -> Promise:
    check = Promise("a learner gets each step once, in order, and each episode's end", problems=list(history.problems))
    check.problems += [
        f"{count} episodes of slot {life[0]} incarnation {life[1]} have no end; {moments.around(life)}"
        for life, count in sorted(history.without_end().items())
    ]
    check.seen = f"{history.steps.total():,} steps in {history.batches:,} batches, {history.episodes:,} episodes"
    if history.broken > len(history.problems):
        check.problems.append(f"and {history.broken - len(history.problems)} more of these")
    if not history.batches:
        check.problems.append("the learner recorded nothing")
    return check


def _check_settled(history: History, ledger: Ledger, moments: LastSeen) -> Promise:
    """Compare the steps in the learner's record with the committed steps in the ledger, life by life."""
    check = Promise("what the learner got is what the ledger has as committed")
    recorded = Counter[Life]()
    for life, steps in history.steps.items():
        recorded[ledger.key_of(life)] += steps
    for key in sorted({*recorded, *ledger.rows}):
        committed = ledger.rows[key].settled.committed[0] if key in ledger.rows else 0
        if recorded[key] != committed:
            where = f"; {moments.around(key)}" if key[1] else ""
            check.problems.append(
                f"{ledger.name_of(key)}: the learner recorded {recorded[key]:,} steps, "
                f"and the ledger has {committed:,} as committed{where}"
            )
    check.seen = f"{history.steps.total():,} steps"
    return check


def _check_recovery(outcome: TrialResult) -> Promise:
    check = Promise("after each event new steps reach the learner")
    done = [injected for injected in outcome.injected if not injected.skipped]
    check.seen = f"{len(done)} events, {len(outcome.injected) - len(done)} skipped"
    check.problems += [
        f"no new step reached the learner after {injected.event.in_words().strip()}"
        for injected in done
        if injected.recovery_s is None
    ]
    return check


# -- recovery ---------------------------------------------------------------------------------------------------------


def _note_recovery(injected: Iterable[Injected], line: Line) -> None:
    """Note this batch as the recovery of each event that still waits for a step taken after it."""
    for one in injected:
        waits = not one.skipped and one.recovery_s is None and line.seq and line.seconds >= one.over
        if not waits or line.seq <= one.cut.get(line.life, 0):
            continue
        if one.awaited and line.slot not in one.awaited:
            continue
        one.awaited.discard(line.slot)
        if not one.awaited:
            one.recovery_s = line.seconds - one.over


def _recovery_by_kind(injected: list[Injected]) -> dict[str, dict[str, float | None]]:
    by_kind: dict[str, list[Injected]] = {}
    for one in injected:
        by_kind.setdefault(_group_of(one), []).append(one)
    found = {}
    for name, ones in sorted(by_kind.items()):
        times = [one.recovery_s for one in ones if one.recovery_s is not None]
        found[name] = {
            "events": len(ones),
            "skipped": sum(bool(one.skipped) for one in ones),
            "median_s": median(times) if times else None,
            "max_s": max(times, default=None),
        }
    return found


def _group_of(injected: Injected) -> str:
    """Return the event's name, with every slot of the fleet as "worker"."""
    event = injected.event
    targets = sorted("worker" if target[len(SLOT_TARGETS) :].isdecimal() else target for target in event.targets)
    return " ".join(filter(None, (event.kind.value, " + ".join(targets), event.detail)))


def lines_of(judgement: Judgement) -> Iterator[str]:
    """Yield a line for each check."""
    for check in judgement.checks:
        mark = "✗" if check.problems else "✓"
        yield f"{mark} {check.promise}" + (f" ({check.seen})" if check.seen else "")
        yield from (f"    {problem}" for problem in check.problems)
