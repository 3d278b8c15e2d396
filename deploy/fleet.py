"""A whole fleet on this machine: Redis, broker, workers and learner, from the first start to the last drain."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import orjson

from headrace.broker.limits import BrokerState
from headrace.broker.state_file import Endpoints, read_broker_file, write_broker_file
from headrace.deploy import child_commands
from headrace.deploy.broker_ports import first_endpoints
from headrace.deploy.child import Child
from headrace.deploy.client_ports import client_endpoints, with_client_ports
from headrace.deploy.env_ports import env_endpoints, own_env_hosts, with_env_ports
from headrace.deploy.evaluation_log import EvaluationLog
from headrace.deploy.event_loop import EventLoop
from headrace.deploy.fleet_errors import DrainCutShortError, OwnRedisError
from headrace.deploy.fleet_record import FleetRecord
from headrace.deploy.goal import RunNumbers, steps_at_start
from headrace.deploy.obituary_sender import ObituarySender, reason_of, write_obituary
from headrace.deploy.recorders import recorder_path
from headrace.deploy.redis_server import check_url, prepare_redis, wait_ready
from headrace.deploy.redis_view import LearnerRowView, Snapshot
from headrace.deploy.resume import write_settings
from headrace.deploy.run_dir import RunDir, write_private
from headrace.deploy.snapshot_poller import INTERVAL_S, SnapshotPoller
from headrace.deploy.stop_signals import StopSignals
from headrace.deploy.supervisor import ProcessSpec, Role, Service, ServiceState, Supervisor
from headrace.deploy.watchdog import FleetWatchdog
from headrace.schemas.config import FleetConfig, is_loopback
from headrace.schemas.errors import RedisUnavailableError, UnreachableError
from headrace.schemas.keys import client_keys
from headrace.schemas.messages import Obituary
from headrace.schemas.recorder import read_recorder

log = logging.getLogger("headrace.supervisor")

REDIS_DEADLINE_S = 15.0
REDIS_ATTEMPTS = 2
"""Number of restarts without an answer after which the fleet gives up its own server: its files are the likely cause.
"""
BROKER_DEADLINE_S = 30.0
OBITUARY_DEADLINE_S = 5.0
SAY_WAITING_S = 5.0
"""Interval of the log lines that say what the fleet waits for."""
_TELLING = "the broker to acknowledge the ends of workers"
HELD_STILL_S = 2.0
"""Seconds without a commit after which the drain stops waiting for the learner."""


class Fleet:
    """Starts, keeps and drains the processes. Use it from the main thread, within `with`.

    On leaving the block every process still alive is killed.
    """

    def __init__(self, config: FleetConfig, run_dir: RunDir, signals: StopSignals, config_origin: str | None) -> None:
        self._keys = client_keys(config.keys.dir, "supervisor")
        self.config = config
        self.run_dir = run_dir
        self.loop = EventLoop()
        self.record = FleetRecord(run_dir, config.fleet.fleet_id, config_origin)
        self.supervisor = Supervisor(self.loop, config.supervisor, run_dir.logs, self)
        self.numbers_before = RunNumbers()
        """The numbers in Redis before this run's broker began."""
        self._poller: SnapshotPoller | None = None
        self._signals = signals
        self._obituary_sender: ObituarySender | None = None
        self._watchdog: FleetWatchdog | None = None
        self._evaluations = EvaluationLog(run_dir.path)
        self._evaluations.take_new()  # those of earlier runs in the directory
        self.loop.watch(signals.fd, signals.clear)

    def __enter__(self) -> Fleet:
        return self

    def __exit__(self, *_: object) -> None:
        self.supervisor.kill()
        self.loop.turn_until(self.supervisor.gone, 5.0)
        if self._obituary_sender is not None:
            self._obituary_sender.close()
        if self._poller is not None:
            self._poller.close()
        self.record.note(state="stopped")

    @property
    def fleet_id(self) -> str:
        """Return the fleet's name."""
        return self.record.content.fleet_id

    @property
    def endpoints(self) -> dict[str, str]:
        """Return the broker's addresses (worker, learner, weights), and each worker's for env hosts and clients."""
        return self.record.content.endpoints

    @property
    def snapshot(self) -> Snapshot | None:
        """Return the newest numbers from Redis; None when none were ever read."""
        return self._poller.snapshot if self._poller else None

    @property
    def newest_evaluation(self) -> dict[str, Any] | None:
        """Return the newest evaluation of a checkpoint that was taken; None before the first."""
        return self._evaluations.newest

    def take_evaluations(self) -> list[dict[str, Any]]:
        """Return the evaluations of checkpoints since the last call, as they stand in evaluations.jsonl."""
        return self._evaluations.take_new()

    @property
    def redis_age_s(self) -> float:
        """Return the seconds since Redis last answered."""
        return self._poller.age_s if self._poller else 0.0

    def take_learner_rows(self) -> list[LearnerRowView]:
        """Return the rows that learners have logged since the last call."""
        return self._poller.take_learner_rows() if self._poller else []

    def numbers(self) -> RunNumbers:
        """Return the newest numbers by which goals are judged."""
        seen = self.snapshot
        return RunNumbers.of(seen.gauges, seen.totals, seen.policies) if seen else RunNumbers()

    def note_numbers(self, now: RunNumbers) -> None:
        """Note in fleet.json how far the run has come."""
        self.record.note_numbers(now.steps, now.best_return)

    @property
    def stop_asked(self) -> bool:
        """Return whether a stop signal came."""
        return self._signals.count > 0

    def start(self) -> None:
        """Start Redis, then all others. Returns once the broker serves, or a signal came.

        Workers and the learner take longer to start than the broker, so they do not wait for it, where its ports are
        known before. Raises `RedisUnavailableError`, `UnreachableError` or the error that ended one of the processes.
        """
        last = [self._start_others, self._await_broker]
        if not is_loopback(self.config.broker.host):
            last.reverse()
        for phase in (self._start_redis, self._start_broker, *last):
            if self.stop_asked:
                return
            phase()
            if self.supervisor.failure is not None:
                raise self.supervisor.failure

    def _start_others(self) -> None:
        at, recorders = self.endpoints["worker"], self.run_dir.recorders
        self._obituary_sender = ObituarySender(self.loop, at, self.fleet_id, recorders, self._keys)
        self._obituary_sender.send_left_over()
        config, path, where = self.config, self.run_dir.config_json, self.run_dir.path
        if config.learner.enabled:
            self.supervisor.start(child_commands.learner(config, path, where, self.endpoints["learner"], self.fleet_id))
        if config.learner.evaluate_every_steps:
            self.supervisor.start(child_commands.evaluator(config, path, where))
        for slot in range(config.fleet.workers):
            spec = child_commands.worker(config, path, where, self.endpoints["worker"], self.fleet_id, slot)
            self.supervisor.start(spec)
        for number, (address, num_envs) in enumerate(own_env_hosts(config)):
            self.supervisor.start(child_commands.env_host(path, address, num_envs, self.fleet_id, number))
        self._watchdog = FleetWatchdog(
            self.loop,
            self.supervisor,
            self.run_dir.recorders,
            config.broker.lease_s,
            config.worker.connect_timeout_s,
            # While a host closes its envs it is silent; its worker may count it as lost before.
            config.sampling.env_hosts_lease_s + config.sampling.env_close_timeout_s,
        )
        self.record.note(state="running")

    def _start_redis(self) -> None:
        url = self.config.redis.url
        if url:
            check_url(url)
        else:
            launch = prepare_redis(self.run_dir.path)
            url = launch.url
            redis = self.supervisor.start(ProcessSpec("redis", Role.REDIS, lambda _: list(launch.argv)))
            self.wait(
                lambda: _answers(url) or redis.restarts >= REDIS_ATTEMPTS, REDIS_DEADLINE_S, "its own Redis to answer"
            )
            if redis.restarts >= REDIS_ATTEMPTS and not _answers(url):
                raise OwnRedisError(self.run_dir.path / "redis", redis.last_words, self.run_dir.logs / "redis.log")
            if self.supervisor.failure is not None or self.stop_asked:
                return
            wait_ready(url, 0.0)
        write_private(self.run_dir.settings_json, write_settings(self.config))
        section = self.config.redis.model_copy(update={"url": url})
        self.config = with_client_ports(with_env_ports(self.config.model_copy(update={"redis": section})))
        write_private(self.run_dir.config_json, orjson.dumps(self.config.model_dump(mode="json")))
        self.record.note(redis_url=url)
        self._poller = SnapshotPoller(url, self.fleet_id)
        steps = steps_at_start(self.snapshot, self.run_dir.recorders)
        self.numbers_before = replace(self.numbers(), steps=steps)

    def _max_env_steps(self) -> int | None:
        """Return the env steps of the fleet's whole life at which workers pause; None without such a goal."""
        until = self.config.fleet.until_steps
        return None if until is None else self.numbers_before.steps + until

    def _start_broker(self) -> None:
        endpoints = first_endpoints(self.config.broker)
        _write_endpoints(self.run_dir.path, self.fleet_id, endpoints)
        if is_loopback(self.config.broker.host):
            self._note_endpoints(endpoints.model_dump())
        self.supervisor.start(
            child_commands.broker(self.run_dir.config_json, self.run_dir.path, self.fleet_id, self._max_env_steps())
        )

    def _await_broker(self) -> None:
        service, broker_json = self.supervisor.services["broker"], self.run_dir.broker_json
        self.wait(lambda: _endpoints_of(broker_json, service) is not None, BROKER_DEADLINE_S, "the broker to serve")
        endpoints = _endpoints_of(self.run_dir.broker_json, service)
        if endpoints is not None:
            self._note_endpoints(endpoints)
            return
        self.supervisor.kill()  # no worker could take a step, so there is nothing to drain
        if self.supervisor.failure is None and not self.stop_asked:
            raise UnreachableError("broker", f"any endpoint named in {self.run_dir.broker_json}", BROKER_DEADLINE_S)

    def _note_endpoints(self, broker: dict[str, str]) -> None:
        self.record.note(endpoints=broker | env_endpoints(self.config) | client_endpoints(self.config))

    def wait(self, done: Callable[[], bool], deadline_s: float, what: str) -> bool:
        """Turn the loop until `done()`, a failure, the first signal or the deadline. Return False for the deadline."""
        return self._turn(lambda: done() or self.supervisor.failure is not None or self.stop_asked, deadline_s, what)

    def _turn(self, done: Callable[[], bool], deadline_s: float, what: str) -> bool:
        """Turn the loop until `done()` or the deadline, and say now and then what it waits for."""
        began, waited_s = time.monotonic(), 0.0
        while waited_s < deadline_s:
            if self.loop.turn_until(done, min(deadline_s - waited_s, SAY_WAITING_S)):
                return True
            waited_s = time.monotonic() - began
            if waited_s < deadline_s:
                log.info("waiting for %s (%.0f s of at most %.0f s)", what, waited_s, deadline_s)
        return done()

    def drain(self) -> None:
        """Stop everything in the order in which nothing is lost.

        Workers ship what they have, the learner commits what the broker holds, the broker reports to Redis, Redis
        saves. Each wait has its deadline; what is left after it is queued in the ledger. Raises `DrainCutShortError` at
        the second signal.
        """
        self.record.note(state="draining")
        if self._watchdog is not None:
            self._watchdog.stop()
        self.supervisor.stop(Role.EVALUATOR)  # no wait: its episodes are not counted
        self._stop(Role.WORKER)
        self._stop(Role.ENV_HOST)
        if self._obituary_sender is not None:
            self._turn_until(self._obituary_sender.all_acknowledged, OBITUARY_DEADLINE_S, _TELLING)
        if not self.config.learner.enabled:
            self._await_commits()
        self._stop(Role.LEARNER)
        if self._obituary_sender is not None and self._obituary_sender.all_acknowledged():
            self._obituary_sender.resend(unsettled_only=True)
            self._turn_until(self._obituary_sender.all_acknowledged, OBITUARY_DEADLINE_S, _TELLING)
        self._stop(Role.BROKER)
        self._stop(Role.EVALUATOR)
        if self._poller is not None:
            self._poller.close()
            self._poller.read()
        self._stop(Role.REDIS)

    def _await_commits(self) -> None:
        """Wait while a learner that this fleet did not start still settles the broker's batches."""
        news_s = 2 * (
            self.config.broker.report_interval_s + INTERVAL_S
        )  # until then the gauge may be of before the drain
        began = changed = time.monotonic()
        last = self._held_batches()

        def done() -> bool:
            nonlocal last, changed
            held, now = self._held_batches(), time.monotonic()
            if held != last:
                last, changed = held, now
            return held is None or (now - began > news_s and (held == 0 or now - changed > HELD_STILL_S))

        self._turn_until(done, self.config.supervisor.stop_timeout_s, "the learner to commit what the broker holds")

    def _held_batches(self) -> float | None:
        """Return the batches accepted and not settled, as the broker last reported; None when it never did."""
        return self.snapshot.gauges.get("held_batches") if self.snapshot else None

    def _stop(self, role: Role) -> None:
        self.supervisor.stop(role)
        limit_s = self.config.supervisor.stop_timeout_s + 5.0
        self._turn_until(lambda: self.supervisor.gone(role), limit_s, f"each {role.value} to stop")

    def _turn_until(self, done: Callable[[], bool], deadline_s: float, what: str) -> None:
        self._turn(lambda: done() or self._signals.count > 1, deadline_s, what)
        if self._signals.count > 1:
            raise DrainCutShortError

    # Methods of `Observer`, which the supervisor calls.

    def next_incarnation(self, name: str) -> int:
        """Return a number that no earlier life of `name` had."""
        return self.record.next_incarnation(name)

    def changed(self) -> None:
        """Update fleet.json."""
        self.record.note_processes(self.supervisor.services.values())

    def ended(self, service: Service, child: Child, returncode: int) -> None:
        """Read a dead worker's recorder and tell the broker. Tell a new broker of all that died before it."""
        if self._obituary_sender is None:
            return
        if service.spec.role is Role.BROKER and service.state is ServiceState.RUNNING:
            self._obituary_sender.resend()
        if service.spec.slot is None:
            return
        reason = reason_of(child.exit_record)
        obituary = write_obituary(self.run_dir.recorders, service.spec.slot, child.incarnation, reason)
        reading = read_recorder(recorder_path(self.run_dir.recorders, obituary.slot, obituary.incarnation))
        log.info("%s", _last_words(obituary, reading.accepted if reading is not None else 0))
        self._obituary_sender.send(obituary)


def _last_words(obituary: Obituary, accepted: int) -> str:
    """Return a sentence on what a worker left behind. The broker has accepted its first `accepted` batches."""
    who, totals = f"worker {obituary.slot} incarnation {obituary.incarnation}", obituary.totals
    if accepted >= totals.seq and not totals.open:
        return f"{who} took {totals.stepped:,} steps, and the broker has them all"
    lost = [batch for batch in obituary.window if batch.seq > accepted]
    return (
        f"{who} took {totals.stepped:,} steps; {totals.open:,} were in no batch yet, and {len(lost)} batches had not "
        "reached the broker"
    )


def _write_endpoints(run_dir: Path, fleet_id: str, endpoints: Endpoints) -> None:
    """Write the endpoints for the first broker of a new fleet: an earlier broker's ports may be taken by now.

    The rest of the broker's state stays.
    """
    before = read_broker_file(run_dir)
    state = before.state() if before is not None else BrokerState()
    write_broker_file(run_dir, before.fleet_id if before is not None else fleet_id, endpoints, state)


def _answers(url: str) -> bool:
    try:
        wait_ready(url, 0.0)
    except RedisUnavailableError:
        return False
    return True


def _endpoints_of(broker_json: Path, service: Service) -> dict[str, str] | None:
    """Return the endpoints that the running broker has written; None before it has."""
    try:
        found: Any = orjson.loads(broker_json.read_bytes())
    except (OSError, orjson.JSONDecodeError):
        return None
    if service.child is None or found.get("pid") != service.child.pid:
        return None
    return {str(name): str(endpoint) for name, endpoint in found["endpoints"].items()}
