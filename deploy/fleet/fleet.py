"""A whole fleet on this machine: Redis, broker, workers and learner, from the first start to the last drain."""

from __future__ import annotations

import logging
import platform
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import orjson

from headrace.broker.batches.limits import RECONCILE_WAIT_S, BrokerState
from headrace.broker.files.books_file import BooksFile, EndedLives
from headrace.broker.files.rendezvous_file import note_stopped
from headrace.broker.files.report_file import file_path as report_file
from headrace.broker.files.state_file import BrokerFile, Endpoints, read_broker_file, write_broker_file
from headrace.deploy.fleet.checkpoint_copy import CheckpointCopier, StartingPoint, choose_checkpoint
from headrace.deploy.fleet.fleet_record import FleetRecord
from headrace.deploy.fleet.obituary_sender import ObituarySender, reason_of
from headrace.deploy.fleet.scale import asked_workers, forget_asked_workers
from headrace.deploy.fleet.snapshot_poller import INTERVAL_S, SnapshotPoller
from headrace.deploy.fleet.watchdog import FleetWatchdog, first_sign_limits, silence_limits
from headrace.deploy.monitoring.connecting import named_learner
from headrace.deploy.monitoring.facts import Facts
from headrace.deploy.monitoring.process_reporter import LIVE_S, FleetLease, ProcessReporter
from headrace.deploy.monitoring.processes import free_bytes, processes_of
from headrace.deploy.process import child_commands
from headrace.deploy.process.child import Child
from headrace.deploy.process.event_loop import EventLoop
from headrace.deploy.process.fleet_errors import FleetError
from headrace.deploy.process.fork_server import ForkServer
from headrace.deploy.process.recorders import has_delivered, recorder_path, recorders_in
from headrace.deploy.process.stop_signals import StopSignals
from headrace.deploy.process.supervisor import ProcessSpec, Role, Service, ServiceState, Supervisor
from headrace.deploy.report.progress import STALE_S
from headrace.deploy.run.annexes import part
from headrace.deploy.run.checkpoint_facts import NEWEST_FILE
from headrace.deploy.run.evaluation_log import EvaluationLog
from headrace.deploy.run.goal import RunNumbers, steps_at_start
from headrace.deploy.run.ports import (
    client_endpoints,
    env_endpoints,
    first_endpoints,
    first_of_free,
    own_env_hosts,
    with_client_ports,
    with_env_ports,
)
from headrace.deploy.run.redis_server import answers, check_url, prepare_redis, told_of_cut, wait_ready
from headrace.deploy.run.redis_view import LearnerRowView, Snapshot
from headrace.deploy.run.resume import write_settings
from headrace.deploy.run.run_dir import RunDir
from headrace.deploy.run.seal import write_sealed
from headrace.schemas.accounts.process_state import ProcessState
from headrace.schemas.basics.bounds import MOST_EPOCH, MOST_LIVES
from headrace.schemas.basics.run_files import rendezvous_path
from headrace.schemas.credentials.keys import client_keys
from headrace.schemas.errors import ExitCode, RedisUnavailableError, RunDirError, UnreachableError
from headrace.schemas.messages.shared_weights import remove_unused_weights
from headrace.schemas.peers.advertised import advertised, host_to_advertise
from headrace.schemas.peers.socket_folder import remake_socket_folder, remove_socket_folder
from headrace.schemas.settings.config import DRAIN_TIMEOUT_S, FleetConfig, is_loopback
from headrace.schemas.settings.redis_url import without_password

log = logging.getLogger("headrace.supervisor")

REDIS_DEADLINE_S = 15.0
REDIS_ATTEMPTS = 2
"""Number of restarts without an answer after which the fleet gives up its own server: its files are the likely cause.
"""
_REDIS_LINES = 100
"""Lines of a server's log from its start until it answers, and more."""
LEASE_DEADLINE_S = LIVE_S + 5.0
"""Seconds until the lease of a killed fleet has ended."""
BOOKS_DEADLINE_S = 60.0
"""Seconds for the first read of the books in Redis, which a fleet needs: no life or learner epoch may begin twice."""
BROKER_DEADLINE_S = 30.0
OBITUARY_DEADLINE_S = 5.0
RECORDERS_INTERVAL_S = 1.0
COPY_DEADLINE_S = 10.0
REPORT_S = 5.0
"""Seconds that the broker, at most, takes to hear of a worker's end and to report it."""
LOOPBACK = "127.0.0.1"
_TELLING = "the broker to acknowledge the ends of workers"
_HEARING = "a learner to say which batches of earlier workers it has; without one their books close all the same"
HELD_STILL_S = 2.0
"""Seconds after which the drain stops waiting for a learner that waits for batches, or is gone, and commits none."""
_GROUPS_STILL_S = 6.0
"""The same where a consumer group holds batches. Its reader hears of the end by a heartbeat, and then writes a file."""


class Fleet:
    """Starts, keeps and drains the processes. Use it from the main thread, within `with`.

    On leaving the block every process still alive is killed.
    """

    def __init__(
        self,
        config: FleetConfig,
        run_dir: RunDir,
        signals: StopSignals,
        config_origin: str | None,
        fork_server: ForkServer | None = None,
        record: Path | None = None,
    ) -> None:
        client_keys(config.keys.dir, "supervisor", config.keys.group)  # raises before anything starts
        self.config = config
        self.run_dir = run_dir
        self._record_to = record
        self.loop = EventLoop()
        self.record = FleetRecord(run_dir, config.fleet.fleet_id, config_origin)
        self.supervisor = Supervisor(
            self.loop, config.supervisor, config.broker.zombie_grace_s, run_dir.logs, self, fork_server=fork_server
        )
        self.numbers_before = RunNumbers()
        """The numbers in Redis before this run's broker began."""
        self._poller: SnapshotPoller | None = None
        self._process_reporter: ProcessReporter | None = None
        self._lease: FleetLease | None = None
        self._signals = signals
        self._obituary_sender: ObituarySender | None = None
        self._watchdog: FleetWatchdog | None = None
        self._starting_point = StartingPoint()
        self._copier: CheckpointCopier | None = None
        self.evaluations = EvaluationLog(run_dir.path)
        self.evaluations.take_new()  # skip the evaluations of earlier runs in the directory
        self.loop.watch(signals.fd, signals.clear)

    def __enter__(self) -> Fleet:
        return self

    def __exit__(self, *_: object) -> None:
        self.supervisor.kill()
        self.loop.turn_until(self.supervisor.gone, 5.0)
        remove_unused_weights()
        if self._obituary_sender is not None:
            self._obituary_sender.close()
        if self._copier is not None:
            self._copier.finish()
        self._close_poller()
        steps = max(self.record.content.env_steps, self.numbers().steps)
        self.record.note(state="stopped", ended=time.time(), env_steps=steps)
        self._close_reporter()
        remove_socket_folder(self.run_dir.path)

    @property
    def fleet_id(self) -> str:
        """Return the fleet's name."""
        return self.record.content.fleet_id

    @property
    def endpoints(self) -> dict[str, str]:
        """Return the broker's addresses (worker, learner, weights), and each worker's for env hosts and clients."""
        return self.record.content.endpoints

    def processes(self) -> dict[str, ProcessState]:
        """Return the state of each process, the supervisor's own included. Any thread may call it."""
        return processes_of(self.record.content, self.run_dir.path)

    def facts(self) -> Facts:
        """Return the present facts about the fleet, for `find` and `awaited`."""
        poller = self._poller
        return Facts(
            unix_s=time.time(),
            snapshot=self.snapshot,
            processes=self.processes(),
            redis_error=poller.error if poller is not None and self.redis_age_s > STALE_S else "",
            redis_age_s=self.redis_age_s,
            config=self.config,
            endpoints=self.endpoints,
            run_dir=self.run_dir.path,
            recent=poller.recent if poller is not None else (),
            disk_free_bytes=free_bytes(self.run_dir.path),
        )

    @property
    def snapshot(self) -> Snapshot:
        """Return the newest numbers, from Redis or the broker. They are empty, and nameless, when none were read."""
        return (self._poller.snapshot if self._poller else None) or Snapshot()

    @property
    def redis_age_s(self) -> float:
        """Return the seconds since Redis last answered, or took what the broker reports."""
        return self._poller.age_s if self._poller else 0.0

    def take_learner_rows(self) -> list[LearnerRowView]:
        """Return the learners' new rows since the last call."""
        return self._poller.take_learner_rows() if self._poller else []

    def learner_has_left(self) -> bool:
        """Return whether the running broker has noted in its file that no learner is connected. Redis is not asked."""
        found = self._file_of_running_broker()
        return found is not None and found.has_learner is False

    def numbers(self) -> RunNumbers:
        """Return the newest numbers by which goals are judged."""
        seen = self.snapshot
        return RunNumbers.of(seen.gauges, seen.totals, seen.policies)

    @property
    def stop_asked(self) -> bool:
        """Return whether a stop signal came."""
        return self._signals.count > 0

    def start(self) -> None:
        """Start Redis, then all others, the dashboard last. Returns once the broker serves, or after a stop signal.

        Workers and the learner take longer to start than the broker. They do not wait for one with Unix sockets, whose
        addresses are known before its start.

        Raises `RedisUnavailableError`, `UnreachableError` or the error that ended one of the processes.
        """
        last = [self._start_others, self._await_broker]
        if self.config.broker.host:
            last.reverse()
        for phase in (self._start_redis, self._start_broker, *last, self._start_dashboard):
            if self.stop_asked:
                return
            phase()
            if self.supervisor.failure is not None:
                raise self.supervisor.failure

    def _start_others(self) -> None:
        at, recorders = self.endpoints["worker"], self.run_dir.recorders
        keys = client_keys(self.config.keys.dir, "supervisor", self.config.keys.group)
        sender = ObituarySender(self.loop, at, self.fleet_id, recorders, keys, books=self.snapshot)
        self._obituary_sender = sender
        sender.send_unrecorded(self._ended_lives(), self._starting_point.settled, range(self.config.fleet.workers))
        sender.send_left_over()
        self._look_at_recorders()
        config, path, where = self.config, self.run_dir.config_json, self.run_dir.path
        if config.learner.enabled:
            self.supervisor.start(child_commands.learner(config, path, where, self.endpoints["learner"], self.fleet_id))
        if config.learner.evaluate_every_steps:
            self.supervisor.start(child_commands.evaluator(config, path, where))
        if self._record_to is not None:
            self.supervisor.start(child_commands.recorder(where, self._record_to))
        forget_asked_workers(where)
        for slot in range(config.fleet.workers):
            self._start_worker(slot)
        if config.ray.workers:
            part("write_wanted")(where, config.ray.workers)
            self.supervisor.start(child_commands.ray_workers(path, where, self.endpoints["worker"], self.fleet_id))
        for number, (address, num_envs) in enumerate(own_env_hosts(config, where)):
            self.supervisor.start(child_commands.env_host(path, address, num_envs, self.fleet_id, number))
        self._watchdog = FleetWatchdog(
            self.loop,
            self.supervisor,
            self._recorder_of,
            config.broker.lease_s,
            first_sign_limits(config),
            silence_limits(config),
            self.learner_has_left,
        )
        self.record.note(state="running")

    def _start_worker(self, slot: int) -> None:
        config, path, where = self.config, self.run_dir.config_json, self.run_dir.path
        spec = child_commands.worker(config, path, where, self.endpoints["worker"], self.fleet_id, slot)
        self.supervisor.start(spec)

    def _follow_scale(self) -> None:
        """Start or drain workers of this machine, as `headrace scale` asks. Drain from the highest slot downwards."""
        asked, workers = asked_workers(self.run_dir.path), self._workers()
        if asked is None or self.record.content.state != "running":
            return
        for slot in range(asked):
            if slot not in workers:
                self._start_worker(slot)
            elif workers[slot].state is ServiceState.STOPPED:
                self.supervisor.start_again(workers[slot])
        for slot, service in workers.items():
            if slot >= asked and service.state in (ServiceState.RUNNING, ServiceState.RESTARTING):
                self.supervisor.stop_one(service)

    def _workers(self) -> dict[int, Service]:
        services = self.supervisor.services.values()
        return {s.spec.slot: s for s in services if s.spec.role is Role.WORKER and s.spec.slot is not None}

    def _start_dashboard(self) -> None:
        section = self.config.dashboard
        if section.enabled:
            port = section.port or first_of_free(LOOPBACK, 1, "the dashboard", "dashboard.port")
            self.supervisor.start(child_commands.dashboard(self.run_dir.path, port))
            self.record.note(endpoints={**self.endpoints, "dashboard": f"http://{LOOPBACK}:{port}/"})

    def _start_redis(self) -> None:
        url = self.config.redis.url
        if url:
            check_url(url, self.fleet_id)
            holder = f"{platform.node()} {self.run_dir.path}"
        else:
            holder = "the fleet that has started this Redis"  # also one whose directory was moved
            launch = prepare_redis(self.run_dir.path)
            url = launch.url
            redis = self.supervisor.start(ProcessSpec("redis", Role.REDIS, lambda _: list(launch.argv)))
            self.wait(
                lambda: answers(url) or redis.restarts >= REDIS_ATTEMPTS, REDIS_DEADLINE_S, "its own Redis to answer"
            )
            if redis.restarts >= REDIS_ATTEMPTS and not answers(url):
                raise self._redis_does_not_start(redis.last_words)
            if self.supervisor.failure is not None or self.stop_asked:
                return
            try:
                wait_ready(url, 0.0)
            except RedisUnavailableError as error:
                raise self._own_redis_is_silent(error) from error
            if redis.child is not None and (told := told_of_cut(redis.child.log_lines(_REDIS_LINES))):
                log.warning("%s", told)
        self._lease = FleetLease(url, self.fleet_id, holder)
        if not self._lease.take():
            log.warning("%s; waiting for the end of its lease, in case it was killed", self._lease.refusal)
            whom = f"another `headrace up` of this fleet to give up its lease in Redis ({LEASE_DEADLINE_S:g} s at most)"
            self.record.note(waits_for=whom)
            self.wait(self._lease.take, LEASE_DEADLINE_S, "the end of the other fleet's lease")
            self.record.note(waits_for="")
            if self.stop_asked or self.supervisor.failure is not None:
                return
            if self._lease.refusal is not None:
                raise self._lease.refusal
        write_sealed(self.run_dir.settings_json, write_settings(self.config))
        section = self.config.redis.model_copy(update={"url": url})
        self.config = with_client_ports(with_env_ports(self.config.model_copy(update={"redis": section})))
        write_sealed(self.run_dir.config_json, orjson.dumps(self.config.model_dump(mode="json")))
        self.record.note(redis_url=url)
        report_file(self.run_dir.path).unlink(missing_ok=True)  # of an earlier run, whose books other files have
        self._poller = SnapshotPoller(url, self.fleet_id, self.run_dir.path)
        self._await_books(self._poller, url)
        if self.stop_asked or self.supervisor.failure is not None:
            return
        self._process_reporter = ProcessReporter(url, self.fleet_id, self.processes, self._lease)
        self._choose_checkpoint(url)
        steps = steps_at_start(self.snapshot, self._ended_lives(), self.run_dir.recorders)
        self.numbers_before = replace(self.numbers(), steps=steps)

    def _await_books(self, poller: SnapshotPoller, url: str) -> None:
        """Wait until Redis has told what it knows of the fleet. Raises `RedisUnavailableError`."""
        where = f"Redis at {without_password(url)} to tell what it knows of the fleet"
        self.wait(lambda: poller.snapshot is not None, BOOKS_DEADLINE_S, where)
        if poller.snapshot is None and not self.stop_asked and self.supervisor.failure is None:
            raise RedisUnavailableError(url, poller.error, BOOKS_DEADLINE_S)

    def _ended_lives(self) -> EndedLives:
        return BooksFile(self.run_dir.path, self.fleet_id).read()

    def _choose_checkpoint(self, url: str) -> None:
        """Choose the newer of the checkpoints here and in Redis for the learner. Then keep a copy in Redis."""
        bytes_per_hour = self.config.redis.bytes_per_hour
        if not bytes_per_hour:
            return
        path = self.run_dir.path / NEWEST_FILE
        self._starting_point = choose_checkpoint(path, url, self.fleet_id, self.snapshot)
        if self._starting_point.sentence:
            log.info("%s", self._starting_point.sentence)
        self._copier = CheckpointCopier(path, url, self.fleet_id, bytes_per_hour // 2, lambda: self.numbers().steps)

    def _known(self) -> BrokerState:
        """Return the highest learner epoch and incarnations that Redis, the checkpoint and the recorders know."""
        snapshot, incarnations = self.snapshot, dict[int, int]()
        recorded = [life for life, _ in recorders_in(self.run_dir.recorders)]
        known = (*snapshot.incarnations.items(), *snapshot.rows, *self._starting_point.settled, *recorded)
        for slot, incarnation in known:
            if incarnation < MOST_LIVES:
                incarnations[slot] = max(incarnations.get(slot, 0), incarnation)
        epoch = max(int(snapshot.lease.get("epoch", 0)), self._starting_point.epoch)
        return BrokerState(epoch=epoch if epoch < MOST_EPOCH else 0, incarnations=incarnations)

    def _start_broker(self) -> None:
        endpoints = first_endpoints(self.config.broker, self.run_dir.path)
        _write_endpoints(self.run_dir.path, self.fleet_id, endpoints, self._known())
        if not self.config.broker.host:
            self._note_endpoints(endpoints.model_dump())
        until = self.config.fleet.until_steps
        pause_at = None if until is None else self.numbers_before.steps + until  # env steps of the fleet's whole life
        path, where = self.run_dir.config_json, self.run_dir.path
        self.supervisor.start(child_commands.broker(path, where, self.fleet_id, pause_at))

    def _await_broker(self) -> None:
        self.wait(lambda: self._file_of_running_broker() is not None, BROKER_DEADLINE_S, "the broker to serve")
        found = self._file_of_running_broker()
        if found is not None:
            self._note_endpoints(found.endpoints.model_dump())
            return
        if self.stop_asked:
            return  # the drain stops all processes: the broker may still start to serve, and take the steps of workers
        self.supervisor.kill()  # no worker could ship a step, so there is nothing to drain
        if self.supervisor.failure is None:
            log_of_broker = f"see {self.run_dir.logs}/broker.log"
            raise UnreachableError("broker", str(self.run_dir.broker_json), BROKER_DEADLINE_S, log_of_broker)

    def _note_endpoints(self, broker: dict[str, str]) -> None:
        config, path = self.config, self.run_dir.path
        hosts = self._as_others_reach(env_endpoints(config, path), config.env_hosts_host)
        clients = self._as_others_reach(client_endpoints(config, path), config.serving.http_host)
        self.record.note(endpoints=broker | hosts | clients)

    def _as_others_reach(self, endpoints: dict[str, str], bound: str) -> dict[str, str]:
        """Return addresses of workers that are bound to `bound`, as other machines reach them."""
        if not endpoints or is_loopback(bound):
            return endpoints
        return advertised(endpoints, host_to_advertise(bound, self.config.worker.advertise, "worker.advertise"))

    def _own_redis_is_silent(self, error: RedisUnavailableError) -> RedisUnavailableError:
        reason = f"the fleet's own server has not answered for {REDIS_DEADLINE_S:g} s: {error.reason}"
        advice = f"see that this machine's loopback device is up (ip link set lo up), and {self.run_dir.logs}/redis.log"
        return RedisUnavailableError(error.endpoint, reason, REDIS_DEADLINE_S, advice)

    def _redis_does_not_start(self, last_words: str) -> FleetError:
        folder, own_log = self.run_dir.path / "redis", self.run_dir.logs / "redis.log"
        return FleetError(
            f"the fleet's own Redis server does not start ({last_words}); its log is {own_log}; repair {folder}, or "
            f"move it away, to {folder}.damaged for example: the next `headrace up` in this run directory then "
            "takes the books from books.json, recorders and checkpoint, and `headrace audit` names what they lack",
            ExitCode.REDIS_UNAVAILABLE,
        )

    def wait(self, done: Callable[[], bool], deadline_s: float, what: str) -> None:
        """Turn the loop until `done()`, a failure, the first signal or the deadline."""

        def over() -> bool:
            return done() or self.supervisor.failure is not None or self.stop_asked

        self.loop.wait(over, deadline_s, lambda: what, logging.WARNING)

    def drain(self, *, at_goal: bool = False) -> None:
        """Stop everything in the order in which nothing is lost. `at_goal`: no start of the fleet is due after it.

        Workers that this fleet did not start pause. The fleet's own workers ship what they have, the learner commits
        what the broker holds, the broker reports to Redis, and Redis saves. Each wait has its deadline. Steps that are
        left after it stay queued in the ledger. Raises `FleetError` at the second signal.
        """
        self.record.note(state="draining", at_goal=at_goal)
        self.supervisor.hurry(Role.REDIS)  # a pause may be longer than the drain, and the books must reach Redis
        if self.supervisor.gone(Role.BROKER):  # it failed for good, so workers need not wait for its acknowledgement
            self._note_stopped()
        if self._watchdog is not None:
            self._watchdog.stop()
        self.supervisor.stop(Role.EVALUATOR)  # no wait: the evaluator's episodes are not counted
        if self._obituary_sender is not None:
            self._obituary_sender.pause_workers()
        self.supervisor.stop(Role.RAY)
        self._stop(Role.WORKER)
        self._stop(Role.RAY)
        self._stop(Role.ENV_HOST)
        if (sender := self._obituary_sender) is not None:
            self._await_ends(sender)
        if self.config.worker.ends_with_fleet:
            limit_s = DRAIN_TIMEOUT_S + REPORT_S
            self._turn_until(self._workers_have_left, limit_s, "workers elsewhere to leave")
        is_elsewhere = self.supervisor.gone(Role.LEARNER)  # a learner from elsewhere has the fleet, if any
        self._stop(Role.LEARNER)
        if is_elsewhere or self._holding_groups():
            self._await_commits()
        self._stop(Role.RECORDER)
        if (copier := self._copier) is not None:
            copier.finish()
        self._stop(Role.BROKER)
        self._note_stopped()
        self._stop(Role.EVALUATOR)
        self.supervisor.stop(Role.DASHBOARD)  # it shows the final books, which the broker has reported
        if copier is not None:
            self._turn_until(lambda: copier.finished, COPY_DEADLINE_S, "Redis to take the copy of the checkpoint")
        self._close_poller()
        if self._poller is not None:
            self._poller.read()
        self._delete_stored_recorders()
        self._close_reporter()
        self.supervisor.end_fork_server()
        self._turn_until(lambda: self.supervisor.gone(Role.DASHBOARD), COPY_DEADLINE_S, "the dashboard to stop")
        self._stop(Role.REDIS)

    def _await_ends(self, sender: ObituarySender) -> None:
        """Wait until the broker has acknowledged the ends of workers.

        A new broker closes no books of earlier lives before it has heard a learner, or has waited for one.
        """

        def told() -> bool:
            return sender.all_acknowledged() or self.supervisor.gone(Role.BROKER)

        self._turn_until(told, OBITUARY_DEADLINE_S, _TELLING)
        if self.learner_has_left():
            self._turn_until(told, RECONCILE_WAIT_S, _HEARING)

    def _close_poller(self) -> None:
        if self._poller is not None:
            self._poller.close()

    def _close_reporter(self) -> None:
        reporter, lease = self._process_reporter, self._lease
        self._process_reporter = self._lease = None
        if reporter is not None:
            reporter.close()
        if lease is not None:
            lease.release()

    def _note_stopped(self) -> None:
        path = rendezvous_path(self.config.fleet.rendezvous, self.run_dir.path)
        note_stopped(path, at_goal=self.record.content.at_goal)

    def _recorder_of(self, service: Service) -> Path | None:
        slot, child = service.spec.slot, service.child
        return None if slot is None or child is None else recorder_path(self.run_dir.recorders, slot, child.incarnation)

    def _look_at_recorders(self) -> None:
        """Send obituaries of ended workers, and delete recorders whose books Redis has. Repeat every second."""
        if self._obituary_sender is not None:
            self.loop.call_later(RECORDERS_INTERVAL_S, self._look_at_recorders)
            services = self.supervisor.services.values()
            children = [(s.spec.slot, child) for s in services for child in (s.child, *s.zombies)]
            own = {(slot, child.incarnation) for slot, child in children if slot is not None and child is not None}
            try:
                self._look_at_sockets()
                self._obituary_sender.send_ended(own)
            except (OSError, RunDirError) as error:  # a drain goes on
                self.supervisor.fail(error)
            if self._lease is not None and self._lease.refusal is not None and self.supervisor.failure is None:
                self.supervisor.fail(self._lease.refusal)
            self._delete_stored_recorders()
            self._follow_scale()

    def _look_at_sockets(self) -> None:
        """Make a removed folder of sockets again, and replace those who served there: new peers find them by paths."""
        folder = remake_socket_folder(self.run_dir.path, self.endpoints["worker"])
        if folder is not None and self.record.content.state == "running":
            serving = self.config.serving.enabled
            for service in (self.supervisor.services["broker"], *self._workers().values()):
                if service.spec.role is Role.BROKER or service.spec.has_port or serving:
                    self.supervisor.replace(service, f"has lost its socket: {folder} was removed")

    def _delete_stored_recorders(self) -> None:
        seen = self.snapshot
        if self._obituary_sender is not None and seen.away is None:  # Redis has these rows
            self._obituary_sender.delete_stored(seen.rows, seen.folded)

    def _workers_have_left(self) -> bool:
        """Return whether all workers' lives are closed in the books, or nobody reports them any more."""
        nobody_tells = self.supervisor.gone(Role.BROKER) or (self.redis_age_s > STALE_S and self.snapshot.away is None)
        return nobody_tells or all(row.closed for row in self.snapshot.rows.values())

    def _await_commits(self) -> None:
        """Wait while a learner that this fleet did not start still settles the broker's batches, or computes on them.

        A learner that waits for more batches gets none, so it never settles those of an update that it cannot fill.
        """
        news_s = 2 * (self.config.broker.report_interval_s + INTERVAL_S)  # the gauge may be older than the drain
        limit_s, lease, holding = self.config.supervisor.stop_timeout_s, self.snapshot.lease, self._holding_groups()
        still_s = _GROUPS_STILL_S if holding else HELD_STILL_S
        named = "".join(f" and group {name}" for name in holding)
        whom = f"{named_learner(lease) or 'the learner'}{named} to commit the batches that the broker holds"
        began = changed = time.monotonic()
        last = self._held_batches()

        def done() -> bool:
            nonlocal last, changed
            held, now = self._held_batches(), time.monotonic()
            if held != last or self._learner_computes():
                last, changed = held, now
            return held is None or (now - began > news_s and (held == 0 or now - changed > still_s))

        self._turn_until(done, limit_s, whom)
        if last and self._learner_computes():
            log.warning(
                "the drain waits no longer for %s: supervisor.stop_timeout_s = %g s are over. The ledger has these "
                "%.0f as queued. If the learner saves a checkpoint with them, `headrace audit` is red until the next "
                "`headrace up` in this run directory, when the learner connects with its position",
                *(whom, limit_s, last),
            )

    def _holding_groups(self) -> list[str]:
        """Return the consumer groups for which workers wait, as the broker last reported."""
        return [name for name, books in self.snapshot.groups.items() if books.state.on_slow == "wait"]

    def _learner_computes(self) -> bool:
        """Return whether, by the broker's last report, a learner is connected and does not wait for batches."""
        lease = self.snapshot.lease
        return bool(lease.get("connected") and not lease.get("waiting")) and not self.supervisor.gone(Role.BROKER)

    def _held_batches(self) -> float | None:
        """Return the batches that the learner, or groups that hold them, have not settled; None if nobody told."""
        held = self.snapshot.gauges.get("held_batches")
        groups = (books.state for books in self.snapshot.groups.values())
        return None if held is None else held + sum(one.held_batches for one in groups if one.on_slow == "wait")

    def _stop(self, role: Role) -> None:
        self.supervisor.stop(role)
        limit_s = self.config.supervisor.stop_timeout_s + 5.0
        self._turn_until(lambda: self.supervisor.gone(role), limit_s, f"each {role.value} to stop")

    def _turn_until(self, done: Callable[[], bool], deadline_s: float, what: str) -> None:
        self.loop.wait(lambda: done() or self._signals.count > 1, deadline_s, lambda: what)
        if self._signals.count > 1:
            raise FleetError(
                "stopped at the second signal; what was still queued is not delivered, and the next `headrace up` in "
                "this run directory counts what is lost of it"
            )

    # Methods of `Observer`, which the supervisor calls.

    def next_incarnation(self, name: str) -> int:
        """Return a number that no earlier life of `name` had, as far as this supervisor and the broker know.

        The broker knows more if fleet.json was lost, or if a worker from elsewhere took the slot.
        """
        slot, known = self.supervisor.services[name].spec.slot, self._broker_file()
        above = known.incarnations.get(slot, 0) if known is not None and slot is not None else 0
        return self.record.next_incarnation(name, above=above)

    def _broker_file(self) -> BrokerFile | None:
        try:
            return read_broker_file(self.run_dir.path)
        except RunDirError:
            return None

    def _file_of_running_broker(self) -> BrokerFile | None:
        """Return the file that the running broker has written; None before it has."""
        found, child = self._broker_file(), self.supervisor.services["broker"].child
        return found if found is not None and child is not None and found.pid == child.pid else None

    def changed(self) -> None:
        """Update fleet.json, and soon the states of processes in Redis."""
        self.record.note_processes(self.supervisor.services.values())
        if self._process_reporter is not None:
            self._process_reporter.changed()

    def has_delivered(self, service: Service, child: Child) -> bool:
        """Return whether the recorder of this life knows of a committed step."""
        return has_delivered(recorder_path(self.run_dir.recorders, service.spec.slot or 0, child.incarnation))

    def ended(self, service: Service, child: Child, returncode: int) -> None:
        """Send the obituary of a dead worker to the broker. Send all obituaries again to a new broker."""
        if self._obituary_sender is None:
            return
        if service.spec.role is Role.BROKER and service.state is ServiceState.RUNNING:
            self._obituary_sender.resend()
        if service.spec.slot is None:
            return
        self._obituary_sender.send_end(service.spec.slot, child.incarnation, reason_of(child.exit_record))


def _write_endpoints(run_dir: Path, fleet_id: str, endpoints: Endpoints, known: BrokerState) -> None:
    """Write the endpoints for the first broker of a new fleet: some of an earlier broker's ports may be taken by now.

    Keep the rest of the broker's state, raised to the numbers in `known`: the file may be new, or an old copy. Else a
    new life could get the incarnation of an earlier one, and would be fenced.
    """
    before = read_broker_file(run_dir)
    state = before.state() if before is not None else BrokerState()
    if known.epoch > state.epoch:
        state.epoch, state.learner_token = known.epoch, ""
    for slot, incarnation in known.incarnations.items():
        state.incarnations[slot] = max(state.incarnations.get(slot, 0), incarnation)
    write_broker_file(run_dir, before.fleet_id if before is not None else fleet_id, endpoints, state)
