"""The env host: it lends its envs to a worker until it is stopped, or refused for good."""

from __future__ import annotations

import logging
import os
import platform
import secrets
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from headrace.schemas.basics.headrace_version import headrace_version
from headrace.schemas.basics.printable import one_line
from headrace.schemas.basics.process_usage import usage_with_children
from headrace.schemas.basics.stop_event import stop_event
from headrace.schemas.chunks.spaces import Spaces
from headrace.schemas.credentials.keys import ClientKeys
from headrace.schemas.errors import DecodeError, refusal
from headrace.schemas.frames.wire import Buffer, MessageKind, WireMessage, decode
from headrace.schemas.messages import Fenced, Reject, read
from headrace.schemas.peers.fleet_place import FleetPlace
from headrace.workers.config import EnvRunnerConfig
from headrace.workers.envs.process.pool import EnvProcessPool
from headrace.workers.envs.remote.env_messages import EnvHeartbeat, EnvHostBye, EnvHostHello, EnvHostWelcome, EnvOrders
from headrace.workers.envs.remote.host.hosted import HostedEnvs
from headrace.workers.envs.remote.host.link import WorkerLink

log = logging.getLogger(__name__)

_HELLO_EVERY_S = 1.0
_LONGEST_WAIT_S = 0.1
"""The longest sleep: deadlines of envs and SIGTERM are checked this often, in seconds."""
_SAY_WAITING_S = 10.0
_SPARE_S = 5.0
"""Seconds that a host waits for its worker's first order, before it looks for another worker."""


def run_env_host(
    config: EnvRunnerConfig,
    endpoint: str,
    keys: ClientKeys | None,
    on_turn: Callable[[], None] = lambda: None,
    place: FleetPlace | None = None,
    on_answer: Callable[[], None] = lambda: None,
    elsewhere: Callable[[], str] = str,
) -> None:
    """Serve `config.num_envs` envs to the worker at `endpoint` until SIGTERM.

    `on_turn` is called at least ten times a second once the envs are available, but not while the host closes the envs
    of a life. `on_answer` is called when envs have answered.

    `place` says how the host finds a worker that has moved, and how long it waits for its first answer and for one that
    is gone. Without it the host waits for ever at `endpoint`. `elsewhere` returns the address of another worker that
    waits for hosts, or "". A host whose envs are not used goes there.

    Raises `EnvError` for an env that cannot be built here, `RefusedError` when the worker refuses the host, and the
    error of `place` for a worker that is missing for too long.
    """
    with stop_event() as stopping:
        place = place or FleetPlace(endpoint, server="worker")
        host = EnvHost(config, place, keys, learn_spaces(config), on_answer, elsewhere)
        try:
            host.serve(stopping, on_turn)
        finally:
            host.close()


def learn_spaces(config: EnvRunnerConfig) -> Spaces:
    """Return the spaces of the envs. Builds and closes one env. Raises as `EnvProcessPool` does."""
    with EnvProcessPool(config.model_copy(update={"num_envs": 1}), several_agents=None) as pool:
        return pool.spaces


@dataclass(eq=False, repr=False)
class EnvHost:
    """One process that lives one life after another, each with new envs in processes of their own."""

    _config: EnvRunnerConfig
    _place: FleetPlace
    _keys: ClientKeys | None
    _spaces: Spaces
    _on_answer: Callable[[], None] = lambda: None
    _elsewhere: Callable[[], str] = str

    def __post_init__(self) -> None:
        self._look_elsewhere_at = 0.0
        self._link = WorkerLink(self._place.endpoint, self._keys)
        self._envs: HostedEnvs | None = None
        """None until the worker has welcomed this life."""
        self._welcome: EnvHostWelcome | None = None
        self._begin_life()

    def _begin_life(self) -> None:
        self._life = secrets.token_hex(8)
        self._speak_at = self._heard_at = time.monotonic()
        self._say_waiting_at = self._heard_at + _SAY_WAITING_S

    def serve(self, stopping: threading.Event, on_turn: Callable[[], None]) -> None:
        """Execute the worker's orders until `stopping` is set."""
        while not stopping.is_set():
            on_turn()
            self._speak(time.monotonic())
            if self._link.wait(min(max(self._speak_at - time.monotonic(), 0.0), _LONGEST_WAIT_S)):
                self._speak_at = 0.0  # so that the worker repeats orders lost with the old connection
            if self._envs is not None:
                self._answer(self._envs.poll())
            for frames in self._link.receive():
                self._hear(frames)
            self._follow_worker()

    def _follow_worker(self) -> None:
        """Connect to the worker's new address if it has one. Raises the error of a worker that is missing too long."""
        now = time.monotonic()
        if self._place.observe(self._link.is_connected, now) is not None or self._leaves(now):
            self._end_life()
            self._link.close()
            self._link = WorkerLink(self._place.endpoint, self._keys)
        if self._place.ended is not None:
            raise self._link.refusal() or self._place.ended

    def _leaves(self, now: float) -> bool:
        """Return whether this host goes to another worker, because this one has not used its envs for a while."""
        if self._envs is None or not self._envs.is_spare:
            self._look_elsewhere_at = now + _SPARE_S
        if now < self._look_elsewhere_at:
            return False
        self._look_elsewhere_at = now + _SPARE_S
        if endpoint := self._elsewhere():
            self._place.move_to(endpoint, now)
        return bool(endpoint)

    def _speak(self, now: float) -> None:
        if now < self._speak_at:
            return
        if self._envs is None or self._welcome is None:
            self._speak_at = now + _HELLO_EVERY_S
            self._link.say(
                EnvHostHello(
                    life=self._life,
                    num_envs=self._config.num_envs,
                    spaces=self._spaces.model_dump(mode="json"),
                    env=str(self._config.env),
                    host=platform.node(),
                    pid=os.getpid(),
                    headrace_version=headrace_version(),
                )
            )
        else:
            self._speak_at = now + self._welcome.heartbeat_interval_s
            self._link.say(EnvHeartbeat(life=self._life, under_way=self._envs.under_way(), usage=usage_with_children()))
        if now >= self._say_waiting_at and not self._place.is_lost:
            self._say_waiting_at = now + _SAY_WAITING_S
            log.warning("%s; trying on", self._link.why_silent(round(now - self._heard_at)))

    def _hear(self, frames: list[bytes]) -> None:
        try:
            self._take(decode(frames))
        except DecodeError as error:
            if error.reason == "version_mismatch":
                raise refusal(error.reason, f"worker at {self._place.endpoint}: {error.detail}") from error
            log.warning(
                "a message from the worker at %s cannot be used (%s); restarting the envs", self._place.endpoint, error
            )
            self._end_life()

    def _take(self, message: WireMessage) -> None:
        self._heard_at = time.monotonic()
        self._say_waiting_at = self._heard_at + _SAY_WAITING_S
        match message.kind:
            case MessageKind.WELCOME if self._envs is None:
                self._welcome = read(EnvHostWelcome, message.header)
                self._envs = HostedEnvs(self._config, self._life, self._welcome, self._spaces)
                self._link.watch(self._envs)
                log.info(
                    "lending %d envs to worker %d at %s",
                    self._config.num_envs,
                    self._welcome.worker_index,
                    self._place.endpoint,
                )
            case MessageKind.ENV_ORDERS if self._envs is not None:
                orders = read(EnvOrders, message.header)
                if orders.life == self._life:
                    self._answer(self._envs.obey(orders, message.arrays))
            case MessageKind.FENCED if self._envs is not None:
                why = one_line(read(Fenced, message.header).detail)
                log.warning(
                    "the worker at %s has ended this life of the envs (%s); restarting them", self._place.endpoint, why
                )
                self._end_life()
            case MessageKind.REJECT:
                reject = read(Reject, message.header)
                log.warning("refused by the worker at %s: %s", self._place.endpoint, reject.detail)
                if reject.fatal:
                    raise refusal(
                        reject.code, f"the worker at {self._place.endpoint} refuses this env host: {reject.detail}"
                    )

    def _answer(self, messages: list[list[Buffer]]) -> None:
        for frames in messages:
            self._on_answer()
            self._link.send(frames)

    def _end_life(self) -> None:
        envs, self._envs, self._welcome = self._envs, None, None
        if envs is not None:
            self._link.forget(envs)
            envs.stop()
        self._begin_life()

    def close(self) -> None:
        """Tell the worker that the host leaves, and close all envs."""
        if self._envs is not None:
            self._link.say(EnvHostBye(life=self._life))
        self._end_life()
        self._link.close()
