"""Checks of the stream of steps: no weights, credit or commits, envs that fail, messages that are refused."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from headrace.deploy.monitoring.connecting import client_addresses, named_learner, start_of_learner, worker_command
from headrace.deploy.monitoring.facts import Facts
from headrace.deploy.monitoring.finding_kinds import Observation, observe
from headrace.deploy.monitoring.process_checks import NUMBER, States, host_command, hosts_of, names_of
from headrace.deploy.report.progress import number
from headrace.deploy.run.annexes import part
from headrace.deploy.run.goal import EPISODES_NEEDED, RunNumbers
from headrace.deploy.run.redis_view import crowded_learner
from headrace.schemas.accounts.consumer_groups import GroupRow
from headrace.schemas.accounts.env_errors import OF_TASK
from headrace.schemas.accounts.ledger import Discard, Drop
from headrace.schemas.accounts.logged_metrics import NOT_FINITE
from headrace.schemas.accounts.redis_keys import labelled
from headrace.schemas.basics.printable import one_line
from headrace.schemas.messages.message_base import MOST_SHORT_DETAIL

_MANY = 3
_LATELY_S = 60.0
_MANY_EPISODES = 20
_LOST_WITH_PEERS = tuple(
    labelled(name, "reason", reason)
    for name, reasons in (
        ("discarded_agent_steps_total", (Discard.CLIENT_LOST, Discard.ENV_HOST_LOST, Discard.WORKER_KILLED)),
        ("dropped_agent_steps_total", (Drop.WORKER_KILLED,)),
    )
    for reason in reasons
)
_FAILED_LATELY_S = 20.0
_ENV_FAILURES = "env_failures_total"
_OUTSIDE = "observations_outside_total"
_MANY_OUTSIDE = 0.01
"""Observations outside their Box for each step, above which they are named."""
_OF_ONE_ENV = re.compile(r" in env # at [^:]*")
"""In what failures of one cause differ besides numbers: the env and the step of the episode."""
_PER_S = 3 / 60.0
"""Failures of a worker's envs per second of its life from which on they count as "again and again"."""
_NO_COMMITS_S = 60.0
_COMMITTED = "committed_unix_s"
"""The moment of the learner's newest commit, or of its connection."""
_OVERSIZE = labelled("dropped_agent_steps_total", "reason", Drop.OVERSIZE)
_TOO_LARGE = "payload_too_large"
"""The reason of `DecodeError` for a message above `broker.max_batch_bytes`."""


def no_worker(facts: Facts) -> Iterator[Observation]:
    """Yield that the fleet has no worker, neither its own nor from elsewhere."""
    if any(state.role == "worker" for state in facts.processes.values()) or facts.snapshot.workers:
        return
    config, run_dir = facts.config, facts.run_dir
    known = config is not None and run_dir is not None
    command = worker_command(config, facts.endpoints, run_dir, facts.snapshot.fleet_id) if known else ""  # type: ignore[arg-type]
    yield observe(facts, "no_worker", "workers", "waiting for a worker", _up_s(facts), command=command)


def waits_of_workers(facts: Facts, states: States) -> Iterator[Observation]:
    """Yield what workers that are ready wait for, by their `states`: weights, commits, credit, a round, or clients."""
    if facts.snapshot.reported_unix_s is None:
        yield observe(facts, "broker_silent", "broker", "waiting for the broker's first report in Redis", _up_s(facts))
        return
    waiting = [state for state in states.values() if state.get("blocked")]
    if _lack_weights(facts, states):
        yield _no_weights(facts)
    elif facts.snapshot.lease.get("connected") == 0:  # no learner is
        yield _no_learner(facts, len(waiting), len(states))
    elif (name := _late_group(facts)) and (held_up := [state for state in waiting if _is_held_up(state)]):
        yield _group_waits(facts, name, held_up, len(states))
    elif waiting and len(waiting) == len(states):
        yield _all_wait(facts, waiting)
    else:
        yield from _some_wait(facts, states)
        if facts.setting("serving.enabled") and not facts.snapshot.gauges.get("env_steps_per_s"):
            yield _no_clients(facts)


def losing_groups(facts: Facts) -> Iterator[Observation]:
    """Yield the consumer groups for which workers do not wait, and which lost batches in the last minute."""
    for name, books in facts.snapshot.groups.items():
        state = books.state
        if risen(facts, labelled("group_lost_agent_steps", "group", name), _LATELY_S) > 0:
            of_all = state.lost_steps / max(1, state.committed[0] + state.lost_steps + state.lag_steps)
            why = "its reader is slower than the workers" if state.connected else "no reader of it is connected"
            sentence = f"consumer group {name} has lost {state.lost_steps:,} agent steps, {100 * of_all:.2g} %: {why}"
            limit = "broker.max_held_batches" if facts.setting("broker.max_held_batches") else ""
            command = _removal(facts, name, state)
            yield observe(facts, "group_loses", f"group {name}", sentence, command=command, limit=limit)


def failing_envs(facts: Facts) -> Iterator[Observation]:
    """Yield the causes for which envs fail again and again, or are down, and the workers that lack env hosts."""
    failing: dict[tuple[str, str], list[int]] = {}
    for slot, state in facts.snapshot.workers.items():
        name, down = f"worker-{slot}", number(state.get("envs_lost"))
        count, age_s = number(state.get("env_failures")), number(state.get("env_failure_age_s"))
        connected, wanted = hosts_of(state)
        words, _, _ = str(state.get("env_failure", "")).partition(OF_TASK)
        cause = _OF_ONE_ENV.sub("", NUMBER.sub("#", words))
        if count >= _MANY and age_s < _FAILED_LATELY_S and _fails_often(facts, state, count):
            failing.setdefault(("envs_failing", cause), []).append(slot)
        elif 0 < connected < wanted and down and number(state.get("env_steps")):
            of_all = f"{down:.0f} of {number(state.get('num_envs')):.0f} envs"
            sentence = f"{name} has {connected:.0f} of {wanted:.0f} env hosts; {of_all} wait for one"
            yield observe(facts, "env_hosts_missing", name, sentence, command=host_command(facts))
        elif count and down:
            failing.setdefault(("envs_down", cause), []).append(slot)
    for (kind, _), slots in failing.items():
        yield _failing(facts, kind, slots)


def _failing(facts: Facts, kind: str, slots: Sequence[int]) -> Observation:
    """Return the observation that envs of these workers fail for one cause."""
    whom, told_of = names_of([f"worker-{slot}" for slot in slots]), facts.snapshot.workers
    slots = sorted(slots, key=lambda slot: number(told_of[slot].get("env_failure_age_s")))  # the newest failure first
    states, names = [told_of[slot] for slot in slots], [f"worker-{slot}" for slot in slots]
    of = names[0] if len(names) == 1 else f"{len(names)} of {len(facts.snapshot.workers)} workers"
    age_s, newest = number(states[0].get("env_failure_age_s")), f" ({names[0]})" if len(names) > 1 else ""
    told = one_line(str(states[0].get("env_failure", ""))[:MOST_SHORT_DETAIL])
    count, down, num_envs = (
        sum(number(state.get(name)) for state in states) for name in ("env_failures", "envs_lost", "num_envs")
    )
    of_all = f"{down:.0f} of {num_envs:.0f} envs"
    rerun = part("rerun_of")(facts.run_dir, slots) if facts.run_dir is not None else ""
    command = rerun or next((log for name in names if (log := _log_of(facts, name))), "")
    if kind == "envs_down":
        sentence = f"{of_all} of {of} are down; the newest failure, {age_s:.0f} s ago{newest}: {told}"
        return observe(facts, kind, whom, sentence, age_s, command=command, slots=tuple(slots))
    now = f"; {of_all} are down" if down else ""
    rate = _failures_per_min(facts, count)
    so_far = f"{count:,.0f} in all, the newest {age_s:.0f} s ago{newest}"
    sentence = f"envs of {of} fail again and again{rate}: {so_far}: {told}{now}"
    firsts = [one.first_unix_s for one in facts.snapshot.failures if not {*slots}.isdisjoint(one.slots)]
    joined = min(number(state.get("joined_unix_s")) for state in states)  # `count` is of these lives
    for_s = max(0.0, facts.unix_s - max(min(firsts), joined)) if firsts else None
    return observe(facts, kind, whom, sentence, for_s, command=command, slots=tuple(slots))


def _failures_per_min(facts: Facts, count: float) -> str:
    """Return the recent rate of `count` failures, in words: their share of those in the history ring."""
    of_all = sum(number(state.get("env_failures")) for state in facts.snapshot.workers.values())
    at, values = facts.recent[0] if facts.recent else (0.0, {})
    span_s, now = (facts.snapshot.reported_unix_s or 0.0) - at, facts.snapshot.totals.get(_ENV_FAILURES, 0)
    rose = now - values.get(_ENV_FAILURES, now)
    return f" at {60 * rose / span_s * count / of_all:,.3g}/min" if rose > 0 and span_s > 0 else ""


def left_bounds(facts: Facts) -> Iterator[Observation]:
    """Yield that many observations have values outside their Box."""
    totals = facts.snapshot.totals
    outside, steps = totals.get(_OUTSIDE, 0), totals.get("agent_steps_total", 0)
    if outside > _MANY_OUTSIDE * steps:
        of_all = f"{outside:,} observations in {steps:,} agent steps"
        sentence = f"{of_all} have values outside their Box; they were delivered as told"
        log = facts.in_run_dir("grep -r 'its Box ends'", "logs")
        yield observe(facts, "bounds_left", "envs", sentence, command=log)


def refused_tasks(facts: Facts) -> Iterator[Observation]:
    """Yield the tasks that envs refuse, and why; workers with the same words together."""
    refusing: dict[str, list[int]] = {}
    for slot, state in facts.snapshot.workers.items():
        if words := one_line(str(state.get("tasks_refused", ""))[:MOST_SHORT_DETAIL]):
            refusing.setdefault(words, []).append(slot)
    for words, slots in refusing.items():
        names = [f"worker-{slot}" for slot in slots]
        log = next((log for name in names if (log := _log_of(facts, name))), "")
        sentence = f"envs of {names_of(names)} refuse tasks: {words}"
        yield observe(facts, "tasks_refused", "envs", sentence, command=log, slots=tuple(slots))


def censored_episodes(facts: Facts) -> Iterator[Observation]:
    """Yield that the newest aborted episodes differ from the newest finished ones, where some were aborted lately.

    Those of workers that leave in order do not count as lately: it happens once, and nobody wonders why.
    An aborted episode is usually shorter than a whole one. So only longer ones count as a difference in length.
    """
    gauges = facts.snapshot.gauges
    aborted, finished = gauges.get("aborted_window", 0.0), gauges.get("episodes_window", 0.0)
    if min(aborted, finished) < _MANY_EPISODES or not _were_lost_lately(facts):
        return
    length, whole = gauges.get("aborted_len_mean", 0.0), gauges.get("episode_len_mean", 0.0)
    a_step = gauges.get("aborted_return_mean", 0.0) / max(length, 1.0)
    usual = gauges.get("episode_return_mean", 0.0) / max(whole, 1.0)
    if length > 1.2 * whole or abs(a_step - usual) > 0.5 * abs(usual):
        sentence = (
            f"the newest {aborted:.0f} aborted episodes took {length:,.0f} steps and earned {a_step:,.3g} a step in "
            f"the mean, the newest {finished:.0f} finished ones {whole:,.0f} and {usual:,.3g}"
        )
        yield observe(facts, "episodes_censored", "episodes", sentence)


def many_aborted(facts: Facts) -> Iterator[Observation]:
    """Yield that so many episodes are aborted that the mean of the others decides nothing."""
    numbers = RunNumbers.of(facts.snapshot.gauges, {})
    if numbers.doubt and numbers.window + numbers.aborted >= EPISODES_NEEDED:
        sentence = f"{numbers.doubt}: fleet.until_return is not reached, and best.checkpoint stays as it is"
        yield observe(facts, "episodes_aborted", "episodes", sentence)


def _were_lost_lately(facts: Facts) -> bool:
    """Return whether an env failed, or steps were lost with a client, an env host or a worker, in the last minute."""
    workers = facts.snapshot.workers.values()
    ages = (number(worker.get("env_failure_age_s")) for worker in workers if number(worker.get("env_failures")))
    return min(ages, default=_LATELY_S) < _LATELY_S or _lost_lately(facts, *_LOST_WITH_PEERS) > 0


def _lost_lately(facts: Facts, *counters: str) -> float:
    """Return by how much these counters have risen in the last minute."""
    now, reported = facts.snapshot.totals, facts.snapshot.reported_unix_s or 0.0
    before = next((values for at, values in facts.recent if at >= reported - _LATELY_S), now)
    return sum(now.get(name, 0) - before.get(name, 0) for name in counters)


def learner_threads(facts: Facts) -> Iterator[Observation]:
    """Yield that the threads of the learner's torch take the cores of workers on its host."""
    if crowded := crowded_learner(facts.snapshot):
        own = "learner" in facts.processes
        limit, command = ("learner.torch_threads", "") if own else ("", "torch.set_num_threads(1)")
        yield observe(facts, "learner_threads", "learner", crowded[0], command=command, limit=limit)


def metrics_not_finite(facts: Facts) -> Iterator[Observation]:
    """Yield that metrics of the learner are NaN or infinite, by its newest row: not by one of an earlier learner."""
    row, epoch = facts.learner_row, number(facts.snapshot.lease.get("epoch"))
    figures = row.values if row is not None and row.epoch >= epoch else ()
    names = [name.removeprefix(NOT_FINITE) for name in figures if name.startswith(NOT_FINITE)]
    if names:
        told = f"{', '.join(map(one_line, names[:_MANY]))}{f' and {len(names) - _MANY} more' if names[_MANY:] else ''}"
        sentence = f"the learner does not learn: its newest {told} is NaN or infinite"
        yield observe(facts, "metric_not_finite", "learner", sentence)


def refusals(facts: Facts) -> Iterator[Observation]:
    """Yield that the broker has refused messages lately."""
    refused = risen(facts, "messages_refused", _LATELY_S)
    if refused >= _MANY:
        most = facts.snapshot.refused
        told = ", ".join(f"{count:,} of {one_line(peer)} ({one_line(kind)})" for peer, kind, count in most)
        so_far = f"; most since its start: {told}" if most else ""
        sentence = f"the broker has refused {refused:,.0f} messages of peers in the last minute{so_far}"
        limit = "broker.max_batch_bytes" if any(kind == _TOO_LARGE for _, kind, _ in most) else ""
        log = facts.in_run_dir("grep refused", "logs/broker.log")
        yield observe(facts, "batches_refused", "broker", sentence, command=log, limit=limit)


def oversize(facts: Facts) -> Iterator[Observation]:
    """Yield that workers dropped steps in the last minute because their batch was too large."""
    if (lost := _lost_lately(facts, _OVERSIZE)) > 0:
        sentence = (
            f"workers have dropped {lost:,.0f} steps as oversize in the last minute: a chunk without its infos is "
            "larger than a message may be"
        )
        log = facts.in_run_dir("grep -r 'steps dropped'", "logs")
        yield observe(facts, "batches_oversize", "workers", sentence, command=log)


def risen(facts: Facts, name: str, within_s: float) -> float:
    """Return by how much a value has risen within some seconds before the newest report.

    If the value fell, a new broker started counting at 0: return its whole count.
    """
    now, reported = facts.snapshot.gauges.get(name, 0.0), facts.snapshot.reported_unix_s or 0.0
    before = [values[name] for at, values in facts.recent if at >= reported - within_s and name in values]
    if not before:
        return 0.0
    return now - before[0] if now >= before[0] else now


# -- weights and commits ----------------------------------------------------------------------------------------------


def _lack_weights(facts: Facts, states: States) -> bool:
    """Return whether a worker has no weights yet.

    With an empty Redis, a broker that has just started knows no weights, although its workers have some.
    """
    random_first = facts.setting("worker.random_actions_before_weights")
    if facts.snapshot.gauges.get("weights_seq") or random_first or not states:
        return False
    return not all(number(state.get("weights_seq")) for state in states.values())


def _no_weights(facts: Facts) -> Observation:
    own = facts.processes.get("learner")
    age_s = facts.unix_s - own.started_unix_s if own is not None and own.started_unix_s else None
    since = f" ({age_s:.0f} s so far)" if age_s is not None else ""
    sentence = f"waiting for first weights from {_whose(facts)}{since}{_holder(facts, 'has sent none')}"
    if facts.snapshot.lease.get("connected"):
        return observe(facts, "no_weights", "learner", sentence, _since(facts, "since_unix_s"))
    if own is not None and own.state != "fenced":
        return observe(facts, "learner_loading", "learner", sentence, age_s)
    return observe(facts, "no_learner", "learner", sentence, _up_s(facts), command=_learner_command(facts))


def _no_learner(facts: Facts, waiting: int, workers: int) -> Observation:
    own = facts.processes.get("learner")
    full = f"; {waiting} of {workers} workers wait with full windows" if waiting else ""
    what = "to come back" if _since(facts, _COMMITTED) is not None and own is None else "to commit what it holds"
    sentence = f"waiting for {_whose(facts)} {what}{_holder(facts, 'has not committed')}{full}"
    if own is not None and own.started_unix_s:
        return observe(facts, "learner_loading", "learner", sentence, facts.unix_s - own.started_unix_s)
    return observe(facts, "no_learner", "learner", sentence, _since(facts, _COMMITTED), command=_learner_command(facts))


def _all_wait(facts: Facts, waiting: Sequence[Mapping[str, Any]]) -> Observation:
    """Return that all workers wait for the learner: for a new one, since it connected."""
    told = _blocked_for(facts, waiting), _since(facts, "since_unix_s")
    for_s, holder = min((s for s in told if s is not None), default=None), _holder(facts, "has not committed")
    if all(state.get("blocked") == "round" for state in waiting):
        what = f"to publish the weights of the next round{holder}"
        return observe(facts, "round_waits", "learner", f"waiting for {_whose(facts)} {what}", for_s)
    sentence = f"waiting for {_whose(facts)} to commit what it holds{holder}"
    if full := _full(facts):
        sentence += f"; the broker holds {full[1]}"
    kind = "no_commits" if for_s is not None and for_s >= _NO_COMMITS_S else "learner_slow"
    return observe(facts, kind, "learner", sentence, for_s, limit=full[0] if full else "")


def _late_group(facts: Facts) -> str:
    """Return the consumer group, of those that workers wait for, that is furthest behind the learner; "" for none."""
    behind = facts.snapshot.gauges.get("held_agent_steps", 0.0)
    holding = [(name, books.state) for name, books in facts.snapshot.groups.items() if books.state.on_slow == "wait"]
    late = {name: state.lag_steps for name, state in holding if state.lag_steps > behind}
    return max(late, key=lambda name: late[name], default="")


def _is_held_up(state: Mapping[str, Any]) -> bool:
    """Return whether a worker waits for a group: it says so, or has no batch that the learner has not committed."""
    blocked = state.get("blocked")
    return blocked == "group" or (blocked == "window" and not number(state.get("held_batches")))


def _group_waits(facts: Facts, name: str, waiting: Sequence[Mapping[str, Any]], workers: int) -> Observation:
    state, for_s = facts.snapshot.groups[name].state, _blocked_for(facts, waiting)
    now, at = facts.snapshot.reported_unix_s or 0.0, state.heard_unix_s
    heard = "none has come yet" if at is None else f"last heard of {now - at:,.0f} s ago"
    who = f" ({one_line(state.program)}, pid {state.pid} on {one_line(state.host)})" if state.pid else ""
    holds = f"{len(waiting)} of {workers} workers wait, since it has not committed {state.lag_steps:,} agent steps"
    else_drop = 'let the group lose batches ("drop" in broker.consumer_groups)'
    if not state.connected:
        sentence = f"waiting for a reader of consumer group {name}; {heard}{who}; {holds}; start it, or {else_drop}"
        command = _removal(facts, name, state)
        return observe(facts, "no_group_reader", f"group {name}", sentence, for_s, command=command)
    age = f", the oldest accepted {state.oldest_s:,.0f} s ago"
    sentence = f"waiting for the reader of consumer group {name}{who} to commit; {holds}{age}; {heard}; or {else_drop}"
    return observe(facts, "group_slow", f"group {name}", sentence, for_s)


def _removal(facts: Facts, name: str, state: GroupRow) -> str:
    """Return the command that removes a group without a reader; "" for one that the config names."""
    is_kept = state.declared or state.connected
    return "" if is_kept else facts.in_run_dir(f"headrace groups remove {name} --run-dir")


def _some_wait(facts: Facts, states: States) -> Iterator[Observation]:
    """Yield the workers that wait while other workers take steps."""
    full = _full(facts)
    for slot, state in states.items():
        if not state.get("blocked") or (for_s := _blocked_for(facts, [state])) is None:
            continue
        name, since = f"worker-{slot}", f"for {for_s:.0f} s while others go on"
        if state.get("blocked") == "round":
            sentence = f"{name} has shipped its share of the round and waits for other workers for {for_s:.0f} s"
            yield observe(facts, "round_waits", name, sentence, for_s)
        elif full:
            sentence = f"waiting for credit for {name}, {since}: the broker holds {full[1]}"
            yield observe(facts, "no_credit", name, sentence, for_s, limit=full[0])
        elif held := number(state.get("held_batches")):  # without any, they were committed after its last heartbeat
            batches = "1 batch of it is" if held == 1 else f"{held:.0f} batches of it are"
            sentence = f"waiting for room in the window of {name}, {since}; {batches} not committed"
            yield observe(facts, "window_full", name, sentence, for_s)


def _no_clients(facts: Facts) -> Observation:
    serving = [state.get("serving") for state in facts.snapshot.workers.values()]
    clients = sum(number(told.get("clients")) for told in serving if isinstance(told, Mapping))
    idle = f"; of {clients:.0f} connected, none takes steps" if clients else ""
    command = client_addresses(facts.endpoints)
    return observe(facts, "no_clients", "clients", f"waiting for clients{idle}", _still_for(facts), command=command)


def _full(facts: Facts) -> tuple[str, str] | None:
    """Return (setting, description of the held batches) if the broker gives a worker no more credit; else None.

    It divides the room that is left by its workers, and each share must hold a batch: see `Acknowledgements.credit`.
    """
    if facts.setting("broker.overflow") == "drop_oldest":
        return None
    gauges, workers = facts.snapshot.gauges, max(1, len(facts.snapshot.workers))
    batches, nbytes = gauges.get("held_batches", 0.0), gauges.get("held_bytes", 0.0)
    most_batches, most_bytes = (number(facts.setting(f"broker.max_held_{unit}")) for unit in ("batches", "bytes"))
    if most_batches and most_batches - batches < workers:
        return "broker.max_held_batches", f"{batches:.0f} of at most {most_batches:.0f} batches"
    if most_bytes and batches and most_bytes - nbytes < workers * nbytes / batches:
        return "broker.max_held_bytes", f"{nbytes / 2**20:,.0f} of at most {most_bytes / 2**20:,.0f} MiB"
    return None


def _whose(facts: Facts) -> str:
    own = facts.processes.get("learner")
    if own is None:
        at = facts.endpoints.get("learner")
        return named_learner(facts.snapshot.lease) or (f"a learner at {at}" if at else "the learner")
    if own.state != "fenced":
        return "the learner"
    left = ""
    limit_s = number(facts.setting("broker.lease_s"))
    if facts.snapshot.lease.get("connected") == 0 and limit_s:
        left = f" and has left; the fleet's own starts again once none came for {limit_s:g} s"
    return f"the learner that took over from the fleet's own{left}"


def _holder(facts: Facts, what: str) -> str:
    """Return, in words, which learner holds the lease and how long it has been idle; "" before an expected one came."""
    lease = facts.snapshot.lease
    for_s = _since(facts, _COMMITTED)
    if for_s is None:
        if lease.get("connected") or "learner" in facts.processes:
            return ""
        return f"; no learner is connected{'' if number(lease.get('epoch')) else ', and none was'}"
    heard = number(lease.get("heard_unix_s"))
    seen = f"; last heard of {(facts.snapshot.reported_unix_s or 0.0) - heard:,.0f} s ago" if heard else ""
    if not lease.get("connected"):
        return f"; it has ended or cannot be reached{seen}"
    return f"; it holds the lease (epoch {number(lease.get('epoch')):.0f}) and {what} for {for_s:.0f} s{seen}"


def _since(facts: Facts, moment: str) -> float | None:
    """Return the seconds since a moment that the lease tells, by the broker's clock; None without a learner."""
    since = number(facts.snapshot.lease.get(moment))
    return max(0.0, (facts.snapshot.reported_unix_s or 0.0) - since) if since else None


def _blocked_for(facts: Facts, states: Sequence[Mapping[str, Any]]) -> float | None:
    """Return for how long, at least, all of these workers have waited. Use the last commit if a start is unknown."""
    reported = facts.snapshot.reported_unix_s or 0.0
    since = [number(state.get("blocked_since_unix_s")) for state in states]
    told = min((reported - at for at in since if at), default=None) if all(since) else None
    return told if told is not None else _since(facts, _COMMITTED)


def _learner_command(facts: Facts) -> str:
    if facts.run_dir is None or "learner" in facts.processes:
        return ""
    return start_of_learner(facts.snapshot.lease, facts.run_dir)


def _log_of(facts: Facts, name: str) -> str:
    """Return the command that shows the log of one of the fleet's own processes; "" for one from elsewhere."""
    return facts.in_run_dir("tail", f"logs/{name}.log") if name in facts.processes else ""


def _fails_often(facts: Facts, state: Mapping[str, Any], count: float) -> bool:
    joined = number(state.get("joined_unix_s"))
    lived_s = (facts.snapshot.reported_unix_s or 0.0) - joined
    return not joined or count >= _PER_S * lived_s


def _still_for(facts: Facts) -> float:
    """Return the seconds since the fleet's last step, at most the two minutes of the history ring."""
    now, reported = facts.snapshot.totals.get("env_steps_total", 0), facts.snapshot.reported_unix_s or 0.0
    moved = [at for at, values in facts.recent if values.get("env_steps_total", 0) < now]
    first = facts.recent[0][0] if facts.recent else reported
    return max(0.0, reported - (moved[-1] if moved else first))


def _up_s(facts: Facts) -> float | None:
    supervisor = facts.processes.get("supervisor")
    return max(0.0, facts.unix_s - supervisor.started_unix_s) if supervisor is not None else None
