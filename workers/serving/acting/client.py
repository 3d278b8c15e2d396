"""A client of a policy server that acts by itself: it receives weights and sends back whole chunks.

Its episodes go through the same table, sampler and cutting as a worker's, in this process, so its chunks are the same.
It needs torch. The client in `serving.client` needs neither torch nor the policy.
"""

from __future__ import annotations

import logging
import queue
import secrets
import threading
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Self

from headrace.schemas.accounts.ledger import Discard
from headrace.schemas.basics.closable import Closable
from headrace.schemas.basics.dropped import when_dropped
from headrace.schemas.chunks.gymnasium_spaces import to_gym
from headrace.schemas.chunks.spaces import Spaces, column_dtype, leaf_size, leaves
from headrace.schemas.credentials.keys import CLIENT, ClientKeys, client_keys
from headrace.schemas.errors import ConfigError, HeadraceError
from headrace.schemas.errors.episodes import EpisodeTimeoutError
from headrace.schemas.errors.serving import MessageTooLargeError, UnknownSessionError
from headrace.workers.config import EnvRunnerConfig
from headrace.workers.external.calls import Answer
from headrace.workers.external.env import ExternalEnv, ExternalMultiAgentEnv
from headrace.workers.runner.single_agent_env_runner import open_runner
from headrace.workers.sampling.module_batches import Cut
from headrace.workers.serving.acting.shipments import Shipments
from headrace.workers.serving.acting.weights_puller import WeightsPuller
from headrace.workers.serving.client import PolicyClient
from headrace.workers.serving.client.connection import ServerPlace, find_server
from headrace.workers.serving.episode_codec import EpisodeCodec
from headrace.workers.serving.serving_messages import ClientBye

log = logging.getLogger(__name__)

_LEAVING_S = 5.0
"""Seconds that `close` waits for a server that is gone."""
_FURTHER_BYTES = 64
"""The size of a step's other columns: reward, version, log-prob, ..."""
_SESSION_LOST = "the policy server has restarted, or has ended this session because it was silent"


class _InterruptedError(HeadraceError):
    """Interrupts the sampling of a fragment: the client closes, its session has ended, or a message is full."""


class ActingClient(Closable):
    """Drives episodes by a policy in this process, with the newest weights of a policy server.

    `config` is that of the worker: module, connectors, fragment length and so on must be the same; leave out `env`.
    Give clients with the same seed different values of `index`. The server's config needs
    serving.client_inference = true.

    Calls have the deadlines and errors of `ExternalEnv`, or of `ExternalMultiAgentEnv`. Agents go by the texts of their
    ids, in the policies' mapping too. Calls wait until the first weights have come.

    Steps are lost if the server ends before it has taken them, if it ends the session of a client that was silent, or
    if a chunk fits no message. The client reports them as `unshipped` to the next session. Their open episodes are
    aborted, and the next call of each raises `EpisodeAbortedError`. An error that ends the client itself is in
    `failure`, and later calls raise `EpisodesClosedError`.
    """

    @classmethod
    def of(
        cls,
        where: str | Path | None,
        config: EnvRunnerConfig,
        *,
        slot: int | None = None,
        keys: ClientKeys | str | None = None,
        connect_timeout_s: float = 60.0,
        **options: Any,
    ) -> Self:
        """Open a session with a worker at the rendezvous `where`, and follow it, as `PolicyClient.of` does."""
        found = client_keys(keys, CLIENT)
        place = find_server(where, found, slot, connect_timeout_s)
        return cls(place, config, keys=found, connect_timeout_s=connect_timeout_s, **options)

    def __init__(
        self,
        endpoint: str | ServerPlace,
        config: EnvRunnerConfig,
        *,
        index: int = 0,
        session: str | None = None,
        keys: ClientKeys | str | None = None,
        timeout_s: float = 300.0,
        connect_timeout_s: float = 60.0,
        update_interval_s: float = 1.0,
    ) -> None:
        """Open a session. Raises what `PolicyClient` raises, and what building module and connectors raises."""
        if config.env is not None:
            raise ConfigError("an ActingClient has no env: its callers drive the episodes; leave it out", key="env")
        self._timeout_s = timeout_s
        link = PolicyClient(
            endpoint,
            session=session,
            keys=keys,
            timeout_s=timeout_s,
            connect_timeout_s=connect_timeout_s,
            reopens=False,  # a new session of the same name would take a shipment again whose answer was lost
        )
        self.spaces = link.spaces
        """The spaces of the one agent, or of each agent by the text of its id."""
        try:
            _check_kind(config, self.spaces)
            self._codec = EpisodeCodec.of(self.spaces, check_bounds=False)  # its table of episodes checks
            self._env = _caller_driven_env(self.spaces)
            self._acting = _Acting(link, self._env, config, index, timeout_s, update_interval_s)
        except BaseException:
            link.close()
            raise
        self.start_episode = self._env.start_episode
        sentence = f"the acting client {link.session} was dropped without close()"
        self._dropped = when_dropped(self, sentence, self._acting.stop)

    @property
    def failure(self) -> HeadraceError | None:
        """The error that ended the client, or None."""
        return self._acting.failure

    def get_action(self, episode_id: str, observation: Any) -> Any:
        """Return the action of the policy, as `ExternalEnv` does. Observations may be lists and numbers, too."""
        return self._env.get_action(episode_id, self._codec.observation.read(observation))

    def log_action(self, episode_id: str, observation: Any, action: Any) -> None:
        """Log an action that the caller chose, as `ExternalEnv` does."""
        codec = self._codec
        self._env.log_action(episode_id, codec.observation.read(observation), codec.action.read(action))

    def log_returns(self, episode_id: str, reward: Any, info: Any = None, *dones: Any, **named_dones: Any) -> None:
        """Add to the reward since the last action, as `ExternalEnv` does."""
        self._env.log_returns(episode_id, reward, info, *dones, **named_dones)

    def end_episode(self, episode_id: str, observation: Any, truncated: bool = False) -> None:
        """End the episode with its last observation. Blocks until the place of the episode is free."""
        answers: queue.SimpleQueue[Answer] = queue.SimpleQueue()
        last = self._codec.observation.read(observation)
        self._env.episodes.end(episode_id, last, answers.put, truncated=truncated)
        try:
            answer = answers.get(timeout=self._timeout_s)
        except queue.Empty:
            raise EpisodeTimeoutError(episode_id, "end_episode()", self._timeout_s) from None
        if answer.error is not None:
            raise answer.error

    def abort_episode(self, episode_id: str, reason: str = "given up") -> None:
        """Abort an episode that will never finish."""
        self._env.episodes.abort(episode_id, str(reason)[:200])

    def close(self) -> None:
        """Ship finished chunks, end the session, and abort open episodes. Call it when no other call is under way."""
        self._dropped.detach()
        self._acting.stop()


class _Acting:
    """The thread that acts, and what it uses. The client, which its callers may drop, is not known to it.

    When it ends, it ends the session of `link`.
    """

    def __init__(
        self,
        link: PolicyClient,
        env: ExternalEnv | ExternalMultiAgentEnv,
        config: EnvRunnerConfig,
        index: int,
        timeout_s: float,
        update_interval_s: float,
    ) -> None:
        self._link, self._env, self._timeout_s = link, env, timeout_s
        here = config.model_copy(update={"env": lambda context: env, "env_placement": "inline"})
        self._runner = open_runner(here, index, run_uid=secrets.token_hex(8))
        self.failure: HeadraceError | None = None
        self._closing = threading.Event()
        self._shipments = Shipments(link, self._runner, self._closing, timeout_s)
        most_bytes = max(map(_step_bytes, self._runner.module_spaces.values()))
        self._most_open = self._shipments.room // (2 * most_bytes)
        self._puller = WeightsPuller(link, update_interval_s)
        self._thread = threading.Thread(target=self._run, name="acting", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Ship finished chunks, and end."""
        self._closing.set()
        self._thread.join()

    def _run(self) -> None:
        try:
            self._wait_for_weights()
            while not self._closing.is_set():
                self._ship(self._gather())
            self._ship(self._runner.discard_open(Discard.CLIENT_LOST))
        except _InterruptedError:
            pass
        except HeadraceError as error:
            self.failure = error
            log.error("the client ends: %s", error)
            self._env.episodes.close(f"the client has ended ({error})")
        finally:
            self._runner.stop()
            self._puller.stop()
            self._link.close()

    def _wait_for_weights(self) -> None:
        while not self._puller.arrived.wait(0.05):
            if self._closing.is_set():
                raise _InterruptedError
            if self._puller.session_lost.is_set():
                self._open_new_session()
        self._apply_newest()

    def _gather(self) -> Cut:
        cut: Cut
        try:
            cut = self._runner.sample_fragment(self._between_polls)
        except _InterruptedError:
            cut = self._runner.cut_fragment()
        return cut

    def _between_polls(self) -> None:
        self._apply_newest()
        if self._closing.is_set() or self._puller.session_lost.is_set() or self._runner.totals.open > self._most_open:
            raise _InterruptedError

    def _apply_newest(self) -> None:
        pulled = self._puller.take()
        if pulled is not None and pulled.version > self._runner.weights_version:
            epoch, seq = pulled.version
            self._runner.set_weights(pulled.arrays, seq, epoch, pulled.digest)
        if self._puller.failure is not None:
            raise self._puller.failure

    def _ship(self, cut: Cut) -> None:
        """Ship a fragment. Blocks until the server's stream has it, so no client acts while no learner trains."""
        if self._puller.session_lost.is_set():
            self._shipments.lose(cut)
            self._start_over(_SESSION_LOST)
            return
        try:
            self._shipments.ship(cut)
        except UnknownSessionError:
            self._start_over(_SESSION_LOST)
        except MessageTooLargeError as error:
            self._start_over(str(error))

    def _start_over(self, reason: str) -> None:
        """Open another session with other episodes. Nothing may continue what was shipped before."""
        self._env.episodes.abort_all(reason)
        self._shipments.lose(self._runner.discard_open(Discard.UNSHIPPED))
        log.warning("%s; %d steps of this client are lost so far, and reported", reason, self._shipments.lost_steps)
        self._open_new_session()
        if self._closing.is_set():  # otherwise the next shipment reports them
            self._shipments.report()

    def _open_new_session(self) -> None:
        with suppress(HeadraceError):  # a server that does not know the session has ended it already
            self._link.ask(ClientBye, timeout_s=1.0)
        self._link.open_new_session(_LEAVING_S if self._closing.is_set() else self._timeout_s)
        self._shipments.start_over()
        self._puller.session_lost.clear()


def _caller_driven_env(spaces: Spaces | Mapping[str, Spaces]) -> ExternalEnv | ExternalMultiAgentEnv:
    """Return an env with a server's `spaces`. The client's callers drive its episodes: its `run` only waits."""
    env: ExternalEnv | ExternalMultiAgentEnv
    if isinstance(spaces, Spaces):
        env = ExternalEnv(to_gym(spaces.action), to_gym(spaces.observation))
    else:
        actions = {agent: to_gym(own.action) for agent, own in spaces.items()}
        env = ExternalMultiAgentEnv(actions, {agent: to_gym(own.observation) for agent, own in spaces.items()})
    closed = threading.Event()
    env.run, env.close = closed.wait, closed.set  # type: ignore[method-assign, assignment]
    return env


def _check_kind(config: EnvRunnerConfig, spaces: Any) -> None:
    if config.is_multi_agent is isinstance(spaces, Spaces):
        there, here = ("one agent", "several") if config.is_multi_agent else ("several agents", "one")
        raise ConfigError(f"the server's episodes are of {there}, and this config's of {here}", key="policies")


def _step_bytes(spaces: Spaces) -> int:
    """Return the approximate size of a step in a message."""
    both = (*leaves(spaces.observation, "obs"), *leaves(spaces.action, "actions"))
    return _FURTHER_BYTES + sum(leaf_size(leaf) * column_dtype(leaf).itemsize for _, leaf in both)
