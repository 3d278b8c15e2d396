"""The worker process: it joins the fleet, samples with the newest weights, delivers, and leaves."""

from __future__ import annotations

import logging
import math
import re
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any, Literal

from headrace.schemas.accounts.ledger import Discard, Drop
from headrace.schemas.accounts.logged_metrics import MOST_METRICS, LoggedMetric, fitting_metrics
from headrace.schemas.accounts.worker_figures import MOST_VERSIONS, PORT_PATTERN, BlockedBy, Ports
from headrace.schemas.basics.process_usage import own_usage, usage_of_children
from headrace.schemas.basics.stop_event import StoppedError, end_copy, own_process, stop_event
from headrace.schemas.chunks.chunk import EpisodeChunk
from headrace.schemas.errors import (
    CallbackError,
    ConfigError,
    ConnectorError,
    EnvError,
    FencedError,
    ModuleError,
    StateError,
)
from headrace.schemas.messages import tellable_weights
from headrace.schemas.messages.message_base import MOST_SHORT_DETAIL
from headrace.schemas.peers.advertised import advertised, host_to_advertise
from headrace.schemas.peers.fleet_place import FleetPlace
from headrace.schemas.settings.config import DRAIN_TIMEOUT_S, FleetConfig
from headrace.workers.annex_parts import part
from headrace.workers.config import runner_config
from headrace.workers.fleet.membership import Membership
from headrace.workers.fleet.session import SessionState
from headrace.workers.fleet.shipping import Shipper
from headrace.workers.fleet.user_side import UserSide, envs_apart
from headrace.workers.metrics.call_mark import CallMark
from headrace.workers.metrics.timers import OTHER, SERIALISE, WAIT
from headrace.workers.policy.policies import PolicyMappingError
from headrace.workers.runner.env_runner import EnvRunner
from headrace.workers.runner.single_agent_env_runner import open_runner
from headrace.workers.sampling.module_batches import Cut

log = logging.getLogger(__name__)

_SAY_CALL_AFTER_S = 3.0
"""Seconds without an answer of any env after which heartbeats name the call."""
PUMP_INTERVAL_S = 0.02
"""Seconds between two pumps of the sockets while a fragment is being sampled."""

_SAY_WAITING_S = 10.0
_FLEET_ENDED = "the fleet has reached its goal or is being stopped, and takes no more steps"
_LAST_FRAGMENT_S = 1.0
"""Seconds for which a worker that is told to stop continues its fragment, or waits for envs."""


def run_worker(
    config: FleetConfig,
    *,
    endpoint: str,
    fleet_id: str,
    slot: int | None,
    incarnation: int,
    recorder_dir: Path,
    place: FleetPlace | None = None,
) -> None:
    """Sample until SIGTERM, then drain. Raises the typed error of any other end.

    The recorder is recorder_dir/worker-{slot}-{incarnation}.rec, once the broker has assigned both. `place` says how
    the worker finds a broker that has moved, and how long it waits for one; without it, for ever at `endpoint`.
    """
    host = host_of_ports(config)
    with stop_event() as stopping:
        try:
            membership = Membership(config, endpoint, fleet_id, slot, incarnation, recorder_dir, stopping, place)
        except StoppedError as stopped:
            log.info("%s", stopped)
            return
        own_process()
        with closing(membership), envs_apart(membership.recorder.call) as calls:
            try:
                runner = build_runner(config, membership, stopping, host, calls)
            except StoppedError:
                membership.leave()
                return
            life = recorder_dir.parent, membership.slot, membership.incarnation
            runner.totals.kept = part("KeptFailures")(*life)
            with runner:
                _work(Worker(config, membership, runner), stopping)
            if stopping.is_set():
                # A supervisor that has not asked for it quotes this line. An env may send such a signal itself.
                log.info("stopped by %s", stopping.came)


def _work(worker: Worker, stopping: threading.Event) -> None:
    try:
        worker.introduce()
        worker.wait_for_weights(stopping)
        while not stopping.is_set():
            if worker.wait_for_room(stopping):
                worker.ship(worker.sample(stopping))
        worker.drain()
    except StoppedError:
        worker.drain()
    except FencedError:
        worker.give_up(Discard.FENCED)
        raise
    except (EnvError, CallbackError, PolicyMappingError):
        worker.drain()
        raise


def build_runner(
    config: FleetConfig,
    membership: Membership,
    stopping: threading.Event,
    host: str = "",
    calls: CallMark | None = None,
) -> EnvRunner[Any]:
    """Return the runner that `config` asks for. `host` is that of `host_of_ports`.

    Raises `StoppedError` when the worker is stopped while it waits for a first env host.
    """

    def between_looks_for_hosts(endpoint: str) -> None:
        """Show the broker and the recorder's readers that this worker lives, and its address. Raises `StoppedError`."""
        membership.expect_silence()
        with membership.lock:
            membership.session.ports = Ports(**advertised({"envs": endpoint}, host))
            membership.pump()
        if stopping.is_set():
            raise StoppedError("stopped while waiting for a first env host")

    if config.sampling.env_placement == "remote":
        membership.session.read_figures = lambda: {"env_hosts": (0, 1)}  # until the runner reports its own figures
    with membership.lent():
        runner: EnvRunner[Any] = open_runner(
            part("served_config")(config, host) if config.serving.enabled else runner_config(config),
            membership.slot,
            incarnation=membership.incarnation,
            run_uid=membership.fleet_id,
            on_wait=between_looks_for_hosts,
            calls=calls or CallMark(membership.recorder.call),
        )
    runner.call_before_rebuilds(membership.expect_silence)
    if config.serving.enabled:
        served: Any = runner.config.env
        membership.session.ports = Ports(**advertised(served.ports(), host))
    return runner


def host_of_ports(config: FleetConfig) -> str:
    """Return the name or address by which env hosts and clients reach this worker; "" if it serves none.

    Raises `ConfigError` for a name that does not resolve, or that no peer can connect to.
    """
    bound = config.serving.http_host if config.serving.enabled else config.env_hosts_host
    if not bound or (not config.serving.enabled and config.sampling.env_placement != "remote"):
        return ""
    host = host_to_advertise(bound, config.worker.advertise, "worker.advertise")
    if re.match(PORT_PATTERN, advertised({"": "tcp://:1"}, host)[""]) is None:
        raise ConfigError(f"peers cannot connect to {host!r}; name this machine here", key="worker.advertise")
    return host


class Worker:
    """A member of the fleet at work: it samples with the newest weights and delivers.

    It does not close its arguments.
    """

    def __init__(self, config: FleetConfig, membership: Membership, runner: EnvRunner[Any]) -> None:
        self.config = config
        self.membership, self.runner = membership, runner
        self.session, self.weights = membership.session, membership.weights
        self._budget = runner.totals.timers.budget
        self._budget.switch(OTHER)
        self._shipper = Shipper(
            membership.fleet_id,
            self.session,
            membership.recorder,
            runner.totals,
            runner.take_finished_episodes,
            membership.compresses,
            config.frozen_modules,
        )
        self._served: Any = runner.config.env if config.serving.enabled else None
        """The `ServedEnvs` of a worker that serves clients. `workers/serving/` is an annex, found by name."""
        self._acting_channel: Any = None
        """Its `ActingChannel` to clients that act by themselves, if they are allowed."""
        self._batches_a_cut = len(runner.module_spaces) - len(config.frozen_modules)
        self._waited_s: dict[str, float] = {}
        """Seconds that this worker waited, by reason, up to the wait that goes on."""
        self._blocked_at = 0.0
        self._left_out = False
        self._next_pump = 0.0
        self._answers = (0, 0, 0)
        """Steps, failures and rebuilds of the envs, as of the last look: each is an answer."""
        self._answered_at = 0.0
        self._leave_at = math.inf
        """Time at which to abandon the fragment after a stop, in monotonic seconds."""

    # -- joining ------------------------------------------------------------------------------------------------------

    def introduce(self) -> None:
        """Send the spaces of chunks to the broker, admit clients that cut chunks too, and restore the counters."""
        runner = self.runner
        if self._served is not None and (acting_channel := self._served.acting_channel) is not None:
            acting_channel.open(runner.module_spaces, runner.config.num_envs, runner.policy_columns())
            self._acting_channel = acting_channel
        num_envs = runner.config.num_envs
        self.membership.introduce(
            runner.module_spaces,
            num_envs=num_envs,
            cut_steps=num_envs * runner.config.rollout_fragment_length,
            **tellable_weights(runner.state_dicts()),
        )
        self._go_on_counting()

    def _go_on_counting(self) -> None:
        """Continue the lifetime counters of the slot's earlier lives, and report them to the broker from now on.

        The counters are those of the second WELCOME: a broker that has just started may have read them from Redis only
        by then. Counters that do not fit are logged and do not stop the worker.
        """
        welcome = self.session.welcome
        try:
            self.runner.set_counters(welcome.counters if welcome is not None else {})
        except StateError as error:
            log.warning("lifetime counters start from 0, because the broker's do not fit this runner: %s", error)
        self.runner.steps_elsewhere = self.session.steps_elsewhere
        self.session.read_counters = self.runner.get_counters
        self.session.read_metrics = self._read_metrics
        self.session.read_figures = self._read_figures
        self.session.read_env_errors = self.runner.totals.failure_groups.all

    def _read_figures(self) -> dict[str, Any]:
        """Return the figures for a heartbeat about this worker's time, envs and clients."""
        runner, serving = self.runner, self._served.figures() if self._served is not None else None
        hosts, placement = runner.env_hosts, self.config.sampling.env_placement
        return {
            "time_s": runner.time_by_part(),
            "envs_lost": runner.envs_lost if serving is None else 0,
            "env_hosts": hosts and (hosts.connected, hosts.wanted),
            "env_host_versions": list(hosts.versions[:MOST_VERSIONS]) if hosts else [],
            "serving": serving,
            "env_error": runner.totals.failure_groups.next(),
            "tasks_refused": runner.tasks_refused[:MOST_SHORT_DETAIL],
            "bytes_shipped": self._shipper.bytes_shipped,
            "waited_s": self._waits_so_far(),
            "usage": own_usage(),
            "envs_usage": usage_of_children() if placement == "process" else hosts and hosts.usage,
        }

    def _read_metrics(self) -> dict[str, LoggedMetric]:
        """Return the metrics that callbacks have logged, without those that a worker may not report. Log that once."""
        logged = self.runner.get_logged_metrics()
        fitting = fitting_metrics(logged)
        if len(fitting) < len(logged) and not self._left_out:
            self._left_out = True
            name = next(name for name in logged if name not in fitting)
            log.warning(
                "%r and others that callbacks log are left out of the fleet's metrics: a worker reports at most %d, "
                "with names of 1 to 100 printable ASCII characters",
                name[:100],
                MOST_METRICS,
            )
        return fitting

    def wait_for_weights(self, stopping: threading.Event) -> None:
        """Wait for the current weights before sampling, unless the config allows random actions at first."""
        if not self.config.worker.random_actions_before_weights:
            self._wait("the first weights", self._apply_weights, stopping, whom="learner")

    # -- sampling -----------------------------------------------------------------------------------------------------

    def wait_for_room(self, stopping: threading.Event) -> bool:
        """Wait while the window is full. Return whether there is room; there may be none when stopping.

        In synchronous sampling wait for the next round too. Wait also while the fleet may take no more steps.
        """
        if self.session.is_synchronous and not self._in_round():
            self._block("round")
            self._wait("the next round of synchronous sampling", self._in_round, stopping)
            self._block("")
            if stopping.is_set():
                return False
        if self._may_begin():
            return True
        if not self._has_room():
            self._wait("room in the window", self._finds_room, stopping, whom="learner")
            self._block("")
        if not self.session.may_step():
            self._wait_for_steps(stopping)
        return self._may_begin()

    def _block(self, reason: BlockedBy | Literal[""]) -> None:
        """Tell the broker what this worker waits for, "" for nothing, and count the time of the wait that ends."""
        self._waited_s = self._waits_so_far()
        self.session.blocked, self._blocked_at = reason, time.monotonic()

    def _waits_so_far(self) -> dict[str, float]:
        reason = self.session.blocked
        if not reason:
            return self._waited_s
        waited_s = self._waited_s.get(reason, 0.0) + time.monotonic() - self._blocked_at
        return {**self._waited_s, reason: waited_s}

    def _wait_for_steps(self, stopping: threading.Event) -> None:
        """Wait until the fleet may take more steps. Log it if the fleet has reached its bound."""
        told = "the broker to count all steps"
        self._wait(told, lambda: self.session.steps_share == 0 or self._may_begin(), stopping)
        if not self._may_begin() and not stopping.is_set():
            if not self._ends_with_fleet():
                log.info("%s; this worker waits, and Ctrl-C or SIGTERM ends it", _FLEET_ENDED)
            self._wait(f"more env steps: {_FLEET_ENDED}", self._may_begin, stopping)

    def _may_begin(self) -> bool:
        return self._has_room() and self.session.may_step()

    def _in_round(self) -> bool:
        self._apply_weights()
        return not self.session.is_synchronous or self.session.round_left() > 0

    def _has_room(self) -> bool:
        return self.session.has_room(self._batches_a_cut)

    def _finds_room(self) -> bool:
        """Return whether there is room. Tell the broker whether the learner or another group keeps the window full."""
        if self._has_room():
            return True
        reason = self._full_by(self._batches_a_cut)
        if reason != self.session.blocked:
            self._block(reason)
        return False

    def _full_by(self, batches: int) -> BlockedBy:
        return "group" if self.session.late_groups(batches) else "window"

    def sample(self, stopping: threading.Event) -> Cut:
        """Return one fragment sampled with the newest weights, or a shorter one when the worker is stopped.

        Ships the samples that a `CallbackError` carries before it raises.
        """
        if not self.session.is_synchronous:
            self._apply_weights()
        try:
            return self._sample(stopping)
        except CallbackError as error:
            if error.samples is not None:
                self._shipper.ship(error.samples)
            raise

    def _sample(self, stopping: threading.Event) -> Cut:
        at_random = self.runner.weights_version == (0, 0)
        cut: Cut
        self._answered_at = time.monotonic()
        try:
            most = self._shipper.steps_for(self.session.round_left()) if self.session.is_synchronous else None
            with self.membership.lent():
                cut = self.runner.sample_fragment(lambda: self._between_polls(stopping), at_random, most_steps=most)
        except StoppedError as stopped:
            log.info("%s; shipping the steps it has, and leaving", stopped)
            cut = self.runner.cut_fragment()
        except (ModuleError, ConnectorError) as error:
            if not (changed := self._look_for_changes()):
                raise
            log.error("%s; an env had set %s, which is put back; going on", error, " and ".join(changed))
            cut = self.runner.cut_fragment()
        self.session.env_silence_s, self.session.env_call = 0.0, ""
        return cut

    def _look_for_changes(self) -> list[str]:
        """Put back what envs have changed in the whole process. Return the names of what is newly changed."""
        sides: UserSide | None = self.runner.totals.calls.sides
        return sides.look() if sides is not None else []

    def ship(self, cut: Cut) -> None:
        """Hand all batches of a cut to the session, and call callbacks for its chunks."""
        with self._budget.spent_on(SERIALISE):
            self._shipper.ship(cut)
            self._pump()
        if self.runner.callbacks.wants("on_chunk_sent"):
            with self.membership.lent():
                for chunk in self._sent(cut):
                    self.runner.callbacks.call("on_chunk_sent", chunk=chunk)

    def _sent(self, cut: Cut) -> Iterator[EpisodeChunk]:
        return (chunk for chunk in cut if chunk.module_id not in self.config.frozen_modules)

    def _between_polls(self, stopping: threading.Event) -> None:
        """Record steps. Every `PUMP_INTERVAL_S`, pump, apply weights and ship the chunks that clients cut.

        The runner calls this after every poll, and while it waits for envs. Raises `StoppedError` if the fragment is
        not full soon after the worker was stopped: waits for envs, and whole episodes, may last for ever.
        """
        end_copy()
        self._shipper.step()
        now = time.monotonic()
        if now >= self._next_pump or self.weights.pulling:
            self._next_pump = now + min(PUMP_INTERVAL_S, self.weights.patience_s)
            with self._budget.spent_on(OTHER), self.membership.lock:
                self._note_answers(now)
                self._pump()
                if not self.session.is_synchronous:
                    self._apply_weights()
                self._ship_of_clients()
            if stopping.is_set():
                self._leave_at = min(self._leave_at, now + _LAST_FRAGMENT_S)
                if now >= self._leave_at:
                    raise StoppedError("stopped before the fragment was full")

    def _note_answers(self, now: float) -> None:
        """Note how long no env has answered. Clients of served envs may be silent for any time."""
        totals = self.runner.totals
        answers = (totals.env_steps, totals.env_failures, totals.env_rebuilds)
        if answers != self._answers:
            self._answers, self._answered_at = answers, now
        session, silence_s = self.session, now - self._answered_at
        session.env_silence_s = silence_s if self._served is None else 0.0
        session.env_call = totals.calls.elsewhere() if session.env_silence_s > _SAY_CALL_AFTER_S else ""

    def _ship_of_clients(self) -> None:
        """Ship the chunks that clients cut, as long as there is also room for the runner's own cut.

        Clients wait for more room.
        """
        if self._acting_channel is None:
            return
        while has_room := self.session.has_room(self._batches_a_cut + 1) and self.session.may_step():
            delivery = self._acting_channel.take()
            if delivery is None:
                break
            self._take_over(delivery)
        # Reports that clients wait; otherwise a learner would wait for more steps than the window ever holds.
        is_free = has_room or not self._acting_channel.has_waiting
        self._block("" if is_free else self._full_by(self._batches_a_cut + 1))

    def _take_over(self, delivery: Any) -> None:
        self.runner.take_over(delivery.taken)
        if delivery.taken.batch is not None:
            with self._budget.spent_on(SERIALISE):
                self._shipper.ship(delivery.taken.batch)
        delivery.done()

    def _apply_weights(self) -> bool:
        """Use the newest collected weights, and the newest tasks. Return whether any weights are in use.

        The worker refuses weights that do not fit, reports that to the learner, and keeps its own.
        """
        self._apply_tasks()
        newer = self.weights.take()
        if newer is not None and newer.version > self.session.weights:
            try:
                self.runner.set_weights(newer.arrays, newer.version[1], newer.version[0], newer.digest)
            except (ModuleError, ConnectorError) as error:
                log.error("weights %s are refused, those in use stay: %s", newer.version, error)
                self.session.refuse_weights(newer.version, str(error))
            else:
                self.session.weights, self.session.refused = newer.version, None
                if self._acting_channel is not None:
                    self._acting_channel.offer(newer.version, newer.arrays, newer.digest)
        return self.session.weights != (0, 0)

    def _apply_tasks(self) -> None:
        tasks, session = self.session.tasks, self.session
        if tasks is not None and tasks.version != session.tasks_in_use:
            session.tasks_in_use = tasks.version
            try:
                self.runner.set_tasks(tasks)
            except ConfigError as error:
                log.error("tasks %s are refused, episodes have none: %s", tasks.version, error)

    def _pump(self, wait_s: float = 0.0) -> None:
        totals = self.runner.totals
        self.session.env_failures = totals.env_failures, totals.newest_env_failure
        self.membership.pump(wait_s)
        self.runner.steps_elsewhere = self.session.steps_elsewhere

    def _wait(
        self, what: str, condition: Callable[[], bool], stopping: threading.Event, *, whom: str = "broker"
    ) -> None:
        """Pump until `condition` holds or the worker is stopped. Log the cause from time to time; tell clients.

        `whom` is the cause if the broker has taken all batches and names no other cause. Raises `StoppedError` if the
        worker ends with its fleet.
        """
        self._look_for_changes()  # the last poll's: a stop signal may come during the wait
        next_word = time.monotonic() + _SAY_WAITING_S
        with self._budget.spent_on(WAIT):
            while not condition() and not stopping.is_set():
                if self._ends_with_fleet():
                    log.info("%s; this worker leaves", _FLEET_ENDED)
                    raise StoppedError(_FLEET_ENDED)
                self._shipper.record()
                self._pump(0.05)
                self._apply_tasks()
                waiting_for = f"{what} (held up by: {self._held_up_by(whom)})"
                if self._served is not None:
                    self._served.waiting_for = waiting_for
                if time.monotonic() > next_word:
                    next_word += _SAY_WAITING_S
                    log.warning("waiting for %s", waiting_for)
        if self._served is not None:
            self._served.waiting_for = ""

    def _ends_with_fleet(self) -> bool:
        """Return whether the fleet takes no more steps, and this worker is to end then."""
        if not self.config.worker.ends_with_fleet:
            return False
        return self.session.steps_share == 0 or self.membership.link.fleet_has_stopped()

    def _held_up_by(self, whom: str) -> str:
        is_with_broker = self.session.state is not SessionState.ACTIVE or self.session.unaccepted() > 0
        if late := self.session.late_groups(self._batches_a_cut):
            whom = f"group {', '.join(late)}"
        return self.session.waiting_for or ("broker" if is_with_broker else whom)

    # -- leaving ------------------------------------------------------------------------------------------------------

    def drain(self) -> None:
        """Ship the markers of unfinished episodes, hand everything over to the broker, and send BYE."""
        self._block("")
        deadline = time.monotonic() + DRAIN_TIMEOUT_S
        for delivery in self._acting_channel.end(Discard.SHUTDOWN) if self._acting_channel is not None else ():
            self._take_over(delivery)
        last = self._discard_open(Discard.SHUTDOWN)
        self._shipper.ship(last)
        for chunk in self._sent(last) if self.runner.callbacks.wants("on_chunk_sent") else ():
            self.runner.callbacks.tell("on_chunk_sent", chunk=chunk)
        link = self.membership.link
        link.wait_until(lambda: not self.session.unaccepted() or link.fleet_has_stopped(), DRAIN_TIMEOUT_S)
        self._shipper.record()
        self.membership.leave(max(1.0, deadline - time.monotonic()))

    def give_up(self, reason: Discard) -> None:
        """Discard the open steps and count them, because another incarnation took this worker's place.

        Batches that were not accepted stay in the recorder.
        """
        self._shipper.drop(self._discard_open(reason), Drop.FENCED)

    def _discard_open(self, reason: Discard) -> Cut:
        """Return the runner's `discard_open`. A callback's error is only logged, since this worker leaves anyway."""
        cut: Cut
        try:
            cut = self.runner.discard_open(reason)
        except CallbackError as error:
            log.error("%s; leaving", error, exc_info=error.__cause__)
            cut = error.samples
        return cut
