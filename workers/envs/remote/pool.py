"""Envs on other hosts. Their driver never waits for one particular host."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any

from numpy.typing import NDArray

from headrace.schemas.accounts.user_calls import CallInProgress, UserCall
from headrace.schemas.basics.bounds import HIGHEST_PORT
from headrace.schemas.basics.counted_warnings import CountedWarnings
from headrace.schemas.basics.headrace_version import headrace_version
from headrace.schemas.basics.printable import one_line
from headrace.schemas.chunks.spaces import Spaces, spaces_from_json
from headrace.schemas.credentials.keys import ENV_HOST, port_keys
from headrace.schemas.errors import ConfigError, DecodeError, EnvError, EnvHostLostError
from headrace.schemas.frames.wire import MessageKind, WireMessage, decode
from headrace.schemas.messages import Fenced, Message, Reject, read
from headrace.schemas.peers.socket_folder import SocketPlace
from headrace.workers.config import EnvRunnerConfig
from headrace.workers.envs.actions import action_root, write_actions
from headrace.workers.envs.backend import EnvHostsHere, NextSeeds, PoolBackend, Replies
from headrace.workers.envs.lane_table import LaneTable
from headrace.workers.envs.process.control import Command, order_seed
from headrace.workers.envs.process.job_settings import answer_limits
from headrace.workers.envs.process.lane_homes import SeedFor
from headrace.workers.envs.remote.env_messages import (
    NO_SEED,
    EnvAnswers,
    EnvHeartbeat,
    EnvHostBye,
    EnvHostHello,
    EnvHostWelcome,
)
from headrace.workers.envs.remote.host_places import HostPlaces, HostWait
from headrace.workers.envs.remote.order_frames import RemoteColumns, encode_orders, take_replies
from headrace.workers.envs.remote.peer import EnvHostPeer
from headrace.workers.envs.remote.router_port import RouterPort

log = logging.getLogger(__name__)

_SLICE_S = 0.02
_CALLS = {Command.STEP: UserCall.STEP, Command.RESET: UserCall.RESET}
"""The call of an env that each order asks for. All others build one."""

KindProblem = Callable[[Spaces], str]
"""Returns in words why envs with these spaces are of the wrong kind for the worker; empty if they fit.

Raises `DecodeError` for spaces that no env can have.
"""


class RemotePool(PoolBackend):
    """A `PoolBackend` of `config.num_envs` lanes on the hosts that come to `router_port`, for one thread.

    A lane without a host is built as soon as a host with a free place comes. Hosts without lanes are spare. If a host
    is lost, its lanes fail with `EnvHostLostError`, once for each life of the host.
    """

    renders = False  # pictures do not travel between hosts

    def __init__(
        self,
        config: EnvRunnerConfig,
        worker_index: int,
        seed_for: SeedFor,
        router_port: RouterPort,
        kind_problem: KindProblem,
        on_wait: Callable[[str], None] | None = None,
    ) -> None:
        """Wait until a first host has come and built envs in its places.

        `kind_problem` says which envs are of the wrong kind. `on_wait` gets the port's address now and then meanwhile.
        Raises `EnvError` for an env that cannot be built there. The pool owns the router_port.
        """
        self.width = config.num_envs
        self.tasks = {}
        self._config = config
        self._worker_index = worker_index
        self._router_port = router_port
        self._warnings = CountedWarnings(log)
        self._kind_problem = kind_problem
        self._places = HostPlaces(self.width, seed_for)
        self._interval_s = min(config.env_hosts_lease_s / 10, 1.0)
        self._polled_at = self._judge_at = time.monotonic()
        self._columns: RemoteColumns | None = None
        self._answer_limits = answer_limits(config)
        self._host_wait = HostWait(config, router_port.endpoint)
        try:
            self._await_first(on_wait)
        except BaseException:
            self.close()
            raise

    def _await_first(self, on_wait: Callable[[str], None] | None) -> None:
        while self._columns is None or self._places.is_vacant or self._places.has_orders:
            for failure in self.step_wait(_SLICE_S).failures:
                if not isinstance(failure.error, EnvHostLostError):
                    message = f"env {failure.lane} could not be built on its host: {failure.error}"
                    raise EnvError(f"{message}; check env and env_config there") from failure.error
                self.rebuild(failure.lane)
            if on_wait is not None:
                on_wait(self._router_port.endpoint)

    # -- what lanes see and do ----------------------------------------------------------------------------------------

    @property
    def _arrays(self) -> RemoteColumns:
        assert self._columns is not None, "the first host has told its spaces"
        return self._columns

    @property
    def env_hosts(self) -> EnvHostsHere:
        """Return the env hosts that are connected, spare ones too."""
        hosts = self._places.hosts.values()
        versions = sorted({host.headrace_version for host in hosts})
        return EnvHostsHere(len(hosts), self._places.hosts_wanted, versions, self._places.usage)

    def longest_call(self) -> str:
        """Say which order to an env has been without an answer longest; "" while none is."""
        orders = [
            (order.since, lane, order.command, host.name)
            for host in self._places.hosts.values()
            for place, order in host.under_way.items()
            if (lane := host.lanes[place]) is not None
        ]
        if not orders:
            return ""
        since, lane, command, name = min(orders)
        kind = _CALLS.get(command, UserCall.CONSTRUCTION)
        call = CallInProgress(kind, lane, self._config.call_limits()[kind])
        return f"{call.in_words(time.monotonic() - since)} on {name}"

    def env_at(self, lane: int) -> Any:
        """Return a placeholder for the lane's env; None before a host has built it, which `built` reports."""
        return super().env_at(lane) if self._places.has_home(lane) else None

    def step_async(
        self,
        lanes: Sequence[int] | None,
        columns: Mapping[str, NDArray[Any]],
        next_seeds: NextSeeds | None = None,
    ) -> None:
        """Have `lanes` (None: all) step, as `EnvBackend` says.

        The rows of the actions stay until the lanes have replied, because they may have to be sent again.
        """
        write_actions(self.actions, lanes, columns, action_root(columns))
        for lane in range(self.width) if lanes is None else lanes:
            seed = next_seeds.get(lane, NO_SEED) if next_seeds else NO_SEED
            self._places.ask(lane, Command.STEP, order_seed(seed))
        self._flush()

    def reset(self, lane: int, seed: int | None) -> None:
        """Reset the lane's env, without a seed if that is None. The reply is in `began`, or a failure.

        A host that replaces its processes may build a new env for the reset. Then that env begins without a seed too.
        """
        self._places.ask(lane, Command.RESET, order_seed(seed))

    def rebuild(self, lane: int) -> None:
        """Rebuild the lane's env, on a host with a free place. The reply is in `built`, or a failure."""
        self._places.restart(lane)

    def leave_host(self, lane: int, failing: Set[int], why: str) -> bool:
        """Give the lane up for another host, as `EnvBackend` says. The host begins again, and rests."""
        host = self._places.host_of(lane)
        if not self._places.refuse(lane, failing, why, time.monotonic()):
            return False
        if host is not None:
            self._say(host.route, Fenced(detail=f"envs of this env host only fail, and those of others work: {why}"))
        return True

    # -- replies ------------------------------------------------------------------------------------------------------

    def step_wait(self, timeout_s: float = math.inf, batch_wait_s: float = 0.0) -> Replies:
        """Return all replies, as `EnvBackend` says. A lane that waits for a host counts as awaited."""
        replies, now = Replies(), time.monotonic()
        until = now + timeout_s
        if now - self._polled_at > self._interval_s:  # no call has listened; read waiting messages before judging
            self._judge_at = now + self._interval_s
        while True:
            self._places.settle_in(now)
            self._flush()
            busy = self._places.is_busy
            self._listen(replies, min(until, now + self._interval_s) - now if busy else 0.0)
            self._polled_at = now = time.monotonic()
            if replies:
                until = min(until, now + batch_wait_s)
                busy = self._places.is_awaited
            elif not self._places.has_losses:
                self._host_wait.look(bool(self._places.hosts), now)
            if not busy or now >= until:
                self._places.settle_in(now)
                self._flush()
                return replies

    def _listen(self, replies: Replies, timeout_s: float) -> None:
        if not replies and self._places.has_losses:  # else report them next round: no lane replies and is lost in one
            replies.failures += self._places.bury()
            return
        has_messages = self._router_port.wait(timeout_s)
        for route, frames in self._router_port.receive(has_news=lambda: bool(replies)) if has_messages else ():
            try:
                self._take(route, decode(frames), replies)
            except DecodeError as error:
                self._warnings.warn(route, error.reason, f"a message at the port for env hosts is refused: {error}")
                fatal = error.reason in ("version_mismatch", "bad_message", "bad_space")
                self._say(route, Reject(code=error.reason, detail=str(error), fatal=fatal))
            except Exception as error:  # noqa: BLE001  one host's message must not end the worker
                self._warnings.failed("a message at the port for env hosts was dropped: the worker failed on it", error)
        now = time.monotonic()
        if now >= self._judge_at:
            for host in list(self._places.hosts.values()):
                if now - host.heard_at > self._config.env_hosts_lease_s:
                    self._places.part(host, f"has been silent for {now - host.heard_at:.1f} s")
                elif (late := host.overdue(self._answer_limits, now)) is not None:
                    waited = f"has not answered a {late.command.name.lower()} for {now - late.since:.1f} s"
                    self._places.part(host, f"lives, but {waited}")
                    self._say(host.route, Fenced(detail=f"this env host {waited}, so its envs have other places now"))

    def _take(self, route: bytes, message: WireMessage, replies: Replies) -> None:
        """Handle a message."""
        if message.kind is MessageKind.HELLO:
            self._greet(route, read(EnvHostHello, message.header))
            return
        host = self._places.hosts.get(str(message.header.get("life")))
        if host is None:
            if message.kind is not MessageKind.BYE:
                self._say(route, Fenced(detail="this life of the env host is over, or was begun with another worker"))
            return
        now = time.monotonic()
        host.hear(route, now)
        match message.kind:
            case MessageKind.HEARTBEAT:
                beat = read(EnvHeartbeat, message.header)
                host.note_usage(beat.usage)
                again = host.to_repeat(beat.under_way, now, 2 * self._interval_s)
                self._send_orders(host, again)
                self._say(route, EnvHeartbeat(life=host.life))
            case MessageKind.ENV_ANSWERS:
                try:
                    told = read(EnvAnswers, message.header)
                    take_replies(host, told, message.arrays, self._arrays, replies)
                except DecodeError as error:
                    self._places.part(host, f"was refused: {error}")
                    raise
                if (note := self.note_outside) is not None:
                    for observations, farthest in told.outside:
                        note(observations, farthest)
            case MessageKind.BYE:
                self._places.part(host, f"has left ({read(EnvHostBye, message.header).reason})")

    def _greet(self, route: bytes, hello: EnvHostHello) -> None:
        """Welcome a host that begins a life, or whose welcome was lost. Refuse a host whose spaces differ."""
        host = self._places.hosts.get(hello.life)
        if host is not None:
            host.hear(route, time.monotonic())
        else:
            spaces = spaces_from_json(hello.spaces)
            detail = self._kind_problem(spaces)
            if not detail and self._columns is not None and spaces != self.spaces:
                detail = f"its envs have {spaces!r:.400}, and those of the first env host {self.spaces!r:.400}"
            if detail:
                text = f"env host {one_line(hello.host)}/{hello.pid} is refused: {one_line(detail)}"
                self._warnings.warn(route, "other_spaces", text)
                self._say(route, Reject(code="other_spaces", detail=detail))
                return
            for other in [other for other in self._places.hosts.values() if other.route == route]:
                self._places.part(other, "has begun another life")
            if self._columns is None:
                self.take_spaces(spaces)
                self._columns = columns = RemoteColumns(spaces, self.width)
                self.observations, self.first = columns.observations, columns.first
                self.actions, self.rewards = columns.actions, columns.rewards
            host = self._places.hosts[hello.life] = EnvHostPeer(hello, route, time.monotonic())
            log.info("env host %s has connected", host.name)
            if (theirs := hello.headrace_version) != (own := headrace_version()):
                text = f"env host {host.name} runs headrace {theirs or 'of no told version'}, this worker {own}"
                self._warnings.warn(b"", "version", text)
        config = self._config
        self._say(
            route,
            EnvHostWelcome(
                worker_index=self._worker_index,
                num_workers=config.num_workers,
                num_envs=self.width,
                lease_s=config.env_hosts_lease_s,
                heartbeat_interval_s=self._interval_s,
                without_infos=config.infos == "none",
            ),
        )

    # -- orders -------------------------------------------------------------------------------------------------------

    def _flush(self) -> None:
        now = time.monotonic()
        for host in list(self._places.hosts.values()):
            self._send_orders(host, host.take_due(now))

    def _send_orders(self, host: EnvHostPeer, places: Sequence[int]) -> None:
        """Send or repeat the orders under way at `places`. An order not sent is repeated after a heartbeat."""
        if places:
            self._router_port.send(host.route, encode_orders(host, places, self._arrays, self.tasks))

    def _say(self, route: bytes, message: Message) -> None:
        self._router_port.send(route, message.frames())

    def close(self) -> None:
        """Release all hosts. They close their envs themselves. May be called twice."""
        for host in self._places.hosts.values():
            self._say(host.route, Fenced(detail="the worker has stopped, or builds its envs again"))
        self._places.hosts.clear()
        self._router_port.close()


@dataclass(eq=False, repr=False)
class RemotePlacement:
    """Envs on the hosts that connect to the worker's port.

    The worker in slot n listens on the Unix socket envs-n, or by TCP on `env_hosts_port` + n. If that setting is 0, it
    listens on one free port for its whole life. `kind_problem` says which envs are of the wrong kind. While the worker
    waits for its first host, `on_wait` is called from time to time with the address of the port.
    """

    _kind_problem: KindProblem
    _on_wait: Callable[[str], None] | None = None
    _at: tuple[str, int] | SocketPlace | None = None

    def open(self, table: LaneTable) -> RemotePool:
        """Listen, and wait for the first host. Raises `ConfigError` for a port that is too high."""
        config = table.config
        if self._at is None:
            self._at = _place_of(config, table.worker_index)
        keys = port_keys(config.env_hosts_keys, ENV_HOST, config.env_hosts_keys_group)
        router_port = RouterPort(self._at, keys, allow_insecure=config.env_hosts_allow_insecure)
        self._at = router_port.at
        on_wait, kind_problem = self._on_wait, self._kind_problem
        pool = RemotePool(config, table.worker_index, table.making_seed, router_port, kind_problem, on_wait)
        table.totals.calls.elsewhere = pool.longest_call
        pool.note_outside = table.note_outside
        return pool


def _place_of(config: EnvRunnerConfig, slot: int) -> tuple[str, int] | SocketPlace:
    """Return where the worker in `slot` listens for env hosts. Raises `ConfigError` for a port that is too high."""
    if not config.env_hosts_host:
        return SocketPlace(config.socket_dir, f"envs-{slot}")
    port = config.env_hosts_port and config.env_hosts_port + slot
    if port > HIGHEST_PORT:
        message = f"{config.env_hosts_port} plus slot {slot} is above {HIGHEST_PORT}; lower it"
        raise ConfigError(message, key="env_hosts_port")
    return config.env_hosts_host, port
