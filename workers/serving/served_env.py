"""A policy server as an external env. Its `run()` serves clients, and its episodes are theirs."""

from __future__ import annotations

import errno
import logging
import socket
import threading
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass
from typing import Any

from headrace.schemas.accounts.worker_figures import ServingFigures
from headrace.schemas.basics.bounds import HIGHEST_PORT
from headrace.schemas.credentials.keys import CLIENT, CLIENT_PORT, TOKEN_FILE, keys_folder, port_keys
from headrace.schemas.credentials.tokens import read_token
from headrace.schemas.errors import ConfigError, EnvContractError, PortInUseError
from headrace.schemas.peers.advertised import in_url
from headrace.schemas.peers.socket_folder import SocketPlace
from headrace.schemas.settings.config import FleetConfig, is_loopback
from headrace.schemas.settings.plugins import check_package
from headrace.schemas.settings.serving_settings import ServingSection
from headrace.workers.agents.env import build_multi_agent_env, gym_spaces_of, spaces_by_agent
from headrace.workers.config import EnvRunnerConfig, runner_config, socket_dir
from headrace.workers.envs.context import EnvContext
from headrace.workers.envs.creators import build_env, find_creator
from headrace.workers.envs.remote.router_port import RouterPort
from headrace.workers.external.env import ExternalEnv, ExternalMultiAgentEnv
from headrace.workers.external.self_driven import SelfDrivenEnv
from headrace.workers.serving.acting_channel import ActingChannel
from headrace.workers.serving.dispatcher import Dispatcher, Listener
from headrace.workers.serving.episode_codec import EpisodeCodec
from headrace.workers.serving.session_records import ServingLimits
from headrace.workers.serving.zmq.listener import ZmqListener

log = logging.getLogger(__name__)


def served_config(config: FleetConfig, advertised: str = "") -> EnvRunnerConfig:
    """Return the runner's settings in a fleet's, with a policy server as its env; clients reach it as `advertised`."""
    sampling = config.sampling
    served = ServedEnvs(
        config.serving,
        sampling.env,
        config.keys.dir,
        socket_dir="" if config.serving.host else socket_dir(config),
        keys_group=config.keys.group,
        allow_insecure=config.broker.allow_insecure,
        several_agents=sampling.is_multi_agent,
        advertised=advertised,
    )
    return runner_config(config).model_copy(update={"env": served})


@dataclass(eq=False, repr=False)
class ServedEnvs:
    """Creates the env of one worker, as often as needed. Each env gets the ports of the previous one.

    `like` names an env, or anything else with both spaces that a runner's config may name. It is built only to read its
    spaces. With `several_agents`, it is a multi-agent env, and the clients' episodes have several agents. HTTP clients
    may call it `advertised`, the name by which they reach it, without a token.
    """

    settings: ServingSection
    like: str | Callable[..., Any]
    keys_dir: str | None
    _: KW_ONLY
    socket_dir: str = ""
    keys_group: str | None = None
    allow_insecure: bool = False
    several_agents: bool = False
    advertised: str = ""

    def __post_init__(self) -> None:
        self._at: tuple[str, int] | SocketPlace | None = None
        self._http_port: int | None = None
        most = self.settings.max_message_bytes
        self.acting_channel = ActingChannel(most) if self.settings.client_inference else None
        """The channel to clients that act by themselves, if the config allows them. It outlives each env."""
        self._env: ServedEnv | ServedMultiAgentEnv | None = None
        self.waiting_for = ""
        """The peer or event that the worker waits for while it takes no steps of clients. The worker sets it."""

    def __call__(self, context: EnvContext) -> ServedEnv | ServedMultiAgentEnv:
        """Bind the ports and return the env.

        Raises `ConfigError`, `KeysError`, `PortInUseError`, and what the env's creator raises.
        """
        spaces = self._multi_agent_spaces(context) if self.several_agents else self._spaces(context)
        token = self._token()
        if self.settings.http_port is not None:
            check_package("HTTP", "httptools", "http", key="serving.http_port")
        if self._at is None:
            self._at, self._http_port = self._places_of(context.worker_index)
        router_port = RouterPort(
            self._at,
            port_keys(self.keys_dir, CLIENT, self.keys_group),
            allow_insecure=self.allow_insecure,
            domain=CLIENT_PORT,
            largest_message=self.settings.max_message_bytes,
        )
        try:
            http_socket = self._listen(self._http_port, token) if self._http_port is not None else None
        except BaseException:
            router_port.close()
            raise
        self._env = ServedMultiAgentEnv(*spaces) if self.several_agents else ServedEnv(*spaces)
        self._env.serve_at(router_port, http_socket, token, self)
        self._at = router_port.at
        if http_socket is not None:
            self._http_port = int(http_socket.getsockname()[1])
        return self._env

    def ports(self) -> dict[str, str]:
        """Return the addresses for clients by their kind, as they were bound; none before the first env."""
        env = self._env
        found = {} if env is None else {"clients": env.endpoint, "http": env.url}
        return {kind: address for kind, address in found.items() if address}

    def figures(self) -> ServingFigures:
        """Return what the present server has served so far."""
        dispatcher = self._env.dispatcher if self._env is not None else None
        return ServingFigures() if dispatcher is None else dispatcher.figures()

    def _spaces(self, context: EnvContext) -> tuple[Any, Any]:
        found = find_creator(self.like)(context)
        if hasattr(getattr(found, "unwrapped", found), "possible_agents"):  # gymnasium's wrappers hide it
            seen = f"{type(found).__module__}.{type(found).__qualname__}"
            raise EnvContractError("environment", seen, "one of one agent; for several give sampling.policies")
        env = found if hasattr(found, "action_space") else build_env(lambda _: found, context)  # one of dm_env's
        prefix = "single_" if hasattr(env, "single_action_space") else ""  # a native vector's other spaces are batched
        spaces = getattr(env, f"{prefix}action_space"), getattr(env, f"{prefix}observation_space")
        if hasattr(env, "close"):
            env.close()
        return spaces

    def _multi_agent_spaces(self, context: EnvContext) -> tuple[Any, Any]:
        found = find_creator(self.like)(context)
        env = found if isinstance(found, ExternalMultiAgentEnv) else build_multi_agent_env(lambda _: found, context)
        by_agent = gym_spaces_of(env)
        EpisodeCodec.of(spaces_by_agent(by_agent))  # raises for agents whose arrays have the same name
        if hasattr(env, "close"):
            env.close()
        actions = {agent: action for agent, (_, action) in by_agent.items()}
        return actions, {agent: observation for agent, (observation, _) in by_agent.items()}

    def _places_of(self, slot: int) -> tuple[tuple[str, int] | SocketPlace, int | None]:
        """Return where to serve by ZeroMQ, and the port for HTTP."""
        s = self.settings
        port, http_port = s.port and s.port + slot, s.http_port and s.http_port + slot
        if (highest := max(port, http_port or 0)) > HIGHEST_PORT:
            raise ConfigError(f"port {highest} of slot {slot} is above {HIGHEST_PORT}", key="serving.port")
        return (s.host, port) if s.host else SocketPlace(self.socket_dir, f"clients-{slot}"), http_port

    def _token(self) -> str | None:
        folder = keys_folder(self.keys_dir) if self.settings.http_port is not None else None
        return read_token(folder / TOKEN_FILE) if folder is not None else None

    def _listen(self, port: int, token: str | None) -> socket.socket:
        host = self.settings.http_host
        if token is None and not is_loopback(host):
            if not self.allow_insecure:
                message = (
                    f"{host} is reachable from other machines, and there is no token; name a folder with "
                    "http.token in keys.dir (`headrace keys init` makes one), or listen on loopback"
                )
                raise ConfigError(message, key="serving.host")
            log.warning("serving HTTP clients on %s without a token, as configured", host)
        elif not is_loopback(host):
            log.warning(
                "HTTP on %s is not encrypted: clients send the token in clear; put TLS in front of it, and bind "
                "loopback behind that",
                host,
            )
        try:
            return socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                raise PortInUseError(f"http://{host}:{port}", "serving.http_port") from error
            raise ConfigError(f"{host!r} cannot be bound: {error.strerror}", key="serving.host") from error


class _ServedByPorts(SelfDrivenEnv[Any]):
    """An env whose episodes clients drive, at ports that it owns and closes."""

    def serve_at(
        self, router_port: RouterPort, http_socket: socket.socket | None, token: str | None, creator: ServedEnvs
    ) -> None:
        """Take the ports, before `run`. HTTP clients must show `token`. `creator` has the settings."""
        self._router_port, self._http_socket, self._token, self._creator = router_port, http_socket, token, creator
        self._lock = threading.Lock()
        self.dispatcher: Dispatcher | None = None
        """Set by `run`."""
        self._closed = False
        self.endpoint = router_port.endpoint
        """Address for ZeroMQ clients."""
        http_port = http_socket.getsockname()[1] if http_socket is not None else 0
        self.url = f"http://{in_url(creator.settings.http_host)}:{http_port}" if http_socket is not None else ""
        """Address for HTTP clients; empty without HTTP."""
        log.info("serving clients at %s%s", self.endpoint, f" and {self.url}" if self.url else "")

    def run(self) -> None:
        """Serve until the env is closed."""
        creator, episodes = self._creator, self.episodes
        codec = EpisodeCodec.of(episodes.spaces, note_outside=episodes.note_outside)
        limits = ServingLimits(
            lease_s=creator.settings.lease_s,
            max_episodes=episodes.capacity,
            max_message_bytes=creator.settings.max_message_bytes,
        )
        with self._lock:
            if self._closed:
                return
            listener, channel = self._open_listener(codec, limits), creator.acting_channel
            dispatcher = Dispatcher(episodes, codec, limits, listener, channel, lambda: creator.waiting_for)
            self.dispatcher = episodes.driver_loop = dispatcher
        try:
            dispatcher.serve()
        finally:
            dispatcher.close()
            self._release()

    def _open_listener(self, codec: EpisodeCodec, limits: ServingLimits) -> Listener:
        zmq_listener = ZmqListener(self._router_port, codec, limits.max_message_bytes)
        if self._http_socket is None:
            return zmq_listener
        from headrace.workers.serving.http.combined_listener import CombinedListener  # needs the extra `http`

        hosts = frozenset({self._creator.settings.http_host.lower(), self._creator.advertised.lower()})
        return CombinedListener(zmq_listener, codec, limits, self._http_socket, self._token, hosts)

    def close(self) -> None:
        """Make `run` return. The ports are free when it has returned."""
        with self._lock:
            self._closed, dispatcher = True, self.dispatcher
        if dispatcher is None:
            self._release()
        else:
            dispatcher.stop()

    def _release(self) -> None:
        self._router_port.close()
        if self._http_socket is not None:
            self._http_socket.close()


class ServedEnv(_ServedByPorts, ExternalEnv):
    """An env whose episodes have one agent each."""


class ServedMultiAgentEnv(_ServedByPorts, ExternalMultiAgentEnv):
    """An env whose episodes have several agents; both spaces are by agent."""
