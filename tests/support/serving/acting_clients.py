"""A runner that serves, as a worker does, and clients of it that act by themselves or ship by hand."""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import gymnasium as gym
import numpy as np

from headrace.schemas.accounts.ledger import Discard, WorkerTotals
from headrace.schemas.chunks.batch import BatchHeader, ChunkBatch, encode_batch
from headrace.schemas.chunks.chunk import ChunkEnd, EpisodeChunk
from headrace.schemas.messages.weights import join_modules, weights_digest
from headrace.schemas.settings.serving_settings import ServingSection
from headrace.workers import EnvRunnerConfig, MultiAgentEnvRunner, SingleAgentEnvRunner
from headrace.workers.policy.module_weights import read_weights
from headrace.workers.serving.acting import ActingClient
from headrace.workers.serving.client import PolicyClient
from headrace.workers.serving.served_env import ServedEnvs
from headrace.workers.serving.serving_messages import ChunkShipment
from support.waiting import TIMEOUT_S

SETTINGS: dict[str, Any] = {
    "num_envs": 4,
    "seed": 3,
    "rollout_fragment_length": 8,
    "external_fragment_max_age_s": 200.0,
    "infos": "all",
    "episode_lookback_horizon": 2,
}
PAIR_ENV = "headrace.workers.agents.examples:two_carts"
PAIR: dict[str, Any] = {"policies": {"short": None, "long": None}, "missing_final_observation": "repeat"}
"""Of a runner, or a client, of several agents."""


class ServingRunner:
    """A runner that serves, with a thread that does what a worker does for clients of both kinds.

    It serves by a Unix socket in `socket_dir`, or for "" in a new folder. With keys: by TCP.
    """

    def __init__(
        self,
        lease_s: float = 20.0,
        max_message_bytes: int = 1 << 20,
        socket_dir: str = "",
        keys_dir: str = "",
        http_port: int | None = None,
        **changes: Any,
    ) -> None:
        host = "127.0.0.1" if keys_dir else ""
        settings = ServingSection(
            enabled=True,
            host=host,
            http_port=http_port,
            lease_s=lease_s,
            client_inference=True,
            max_message_bytes=max_message_bytes,
        )
        several = "policies" in changes
        env = PAIR_ENV if several else "CartPole-v1"
        self.creator = ServedEnvs(settings, env, keys_dir, socket_dir=socket_dir, several_agents=several)
        kind: Any = MultiAgentEnvRunner if several else SingleAgentEnvRunner
        self.runner = kind(EnvRunnerConfig(env=self.creator, **{**SETTINGS, **changes}))
        self.endpoint = self.runner.env.endpoint
        assert self.creator.acting_channel is not None
        self.acting_channel = self.creator.acting_channel
        self.acting_channel.open(self.runner.module_spaces, self.runner.config.num_envs, self.runner.policy_columns())
        self.publish(1)
        self.chunks: list[EpisodeChunk] = []
        self.held = threading.Event()
        """While it is set, nothing of clients is taken."""
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def publish(self, seq: int) -> None:
        arrays = self.runner.get_state("rl_module")["rl_module"]
        if isinstance(self.runner, MultiAgentEnvRunner):
            arrays = join_modules(arrays)
        digest = weights_digest(arrays)
        self.runner.set_weights(arrays, seq, 1, digest)
        self.acting_channel.offer((1, seq), arrays, digest)

    def _run(self) -> None:
        while not self._stopping.is_set():
            try:
                self.chunks += self.runner.sample_fragment(self._between_polls)
            except InterruptedError:
                self.chunks += self.runner.cut_fragment()

    def _between_polls(self) -> None:
        while not self.held.is_set() and (delivery := self.acting_channel.take()) is not None:
            self._deliver(delivery)
        if self._stopping.is_set():
            raise InterruptedError

    def _deliver(self, delivery: Any) -> None:
        self.runner.take_over(delivery.taken)
        self.chunks += delivery.taken.batch or ()
        delivery.done()

    def close(self) -> None:
        self._stopping.set()
        self._thread.join(100)
        for delivery in self.acting_channel.end(Discard.SHUTDOWN):
            self._deliver(delivery)
        self.chunks += self.runner.discard_open(Discard.SHUTDOWN)
        self.runner.stop()
        totals = self.runner.totals
        assert totals.stepped == sum(map(len, self.chunks)) + sum(totals.discarded.values())
        check_whole(self.chunks)


def check_whole(chunks: list[EpisodeChunk]) -> None:
    """Each agent's chunks of an episode follow on one another to an end, and no two open ones have one place."""
    places: dict[Any, Any] = {}
    seen: dict[Any, int] = {}
    steps: dict[Any, int] = defaultdict(int)
    for chunk in chunks:
        id, place = (chunk.episode_id, chunk.agent_id), (chunk.env_index, chunk.agent_id)
        assert chunk.chunk_index == seen.get(id, 0)
        assert chunk.t_start == steps[id] or (chunk.agent_id != "default_agent" and chunk.t_start > steps[id])
        assert places.setdefault(place, id) == id
        seen[id] = seen.get(id, 0) + 1
        steps[id] = int(chunk.env_t[-1]) + 1 if len(chunk) else chunk.t_start
        if chunk.end is not ChunkEnd.ONGOING:
            del places[place]
    assert not places, "an episode was left open"


@contextmanager
def serving_runner(**changes: Any) -> Iterator[ServingRunner]:
    made = ServingRunner(**changes)
    try:
        yield made
    finally:
        made.close()


def acting(endpoint: str, keys: str | None = None, **changes: Any) -> ActingClient:
    config = EnvRunnerConfig(**{**SETTINGS, **changes})
    patient: dict[str, Any] = {"timeout_s": TIMEOUT_S, "connect_timeout_s": TIMEOUT_S}
    return ActingClient(endpoint, config, keys=keys, update_interval_s=0.05, **patient)


def play(client: Any, steps: int, episodes: int = 3) -> None:
    """CartPole, one episode after another; the second has an action of the client's own in each third step."""
    env = gym.make("CartPole-v1")
    for number in range(episodes):
        observation, _ = env.reset(seed=number)
        episode, over = client.start_episode(), False
        for t in range(steps):
            if number == 1 and t % 3 == 0:
                action = t % 2
                client.log_action(episode, observation, action)
            else:
                action = int(client.get_action(episode, observation))
            observation, reward, over, _, _ = env.step(action)
            client.log_returns(episode, float(reward), {"t": t})
            if over:
                break
        client.end_episode(episode, observation, truncated=not over)
    env.close()


def play_pair(client: Any, steps: int, episodes: int = 3, **of_episode: Any) -> None:
    """Agent "long" comes late, pauses, and is done before the end; the second episode has actions of the client's."""
    for number in range(episodes):
        rows = np.random.default_rng(number).uniform(-0.05, 0.05, (steps + 1, 2, 4)).astype(np.float32)
        episode = client.start_episode(**of_episode)
        for t, (short, long) in enumerate(rows[:-1]):
            seen = {"short": short, "long": long} if 2 <= t < steps - 2 and t % 5 else {"short": short}
            if number == 1 and t % 3 == 0:
                client.log_action(episode, seen, dict.fromkeys(seen, t % 2))
            else:
                assert client.get_action(episode, seen).keys() == seen.keys()
            client.log_returns(episode, {"short": 1.0, "long": 0.5 * (t > 2)}, {"short": {"t": t}})
        client.end_episode(episode, {"short": rows[-1][0]}, truncated=number == 2)


class Shipper:
    """Ships by hand what a client might."""

    def __init__(self, there: ServingRunner, link: PolicyClient) -> None:
        self._there, self._link = there, link
        config = EnvRunnerConfig(env="CartPole-v1", **{**SETTINGS, "episode_lookback_horizon": 0})
        self._runner = SingleAgentEnvRunner(config)
        arrays = read_weights(there.runner.module)  # type: ignore[arg-type]
        self._runner.set_weights(arrays, 1, 1, weights_digest(arrays))

    def batch(self) -> ChunkBatch:
        """As a client's, whose steps say whether the policy was asked for them."""
        batch = self._runner.sample_fragment()
        batch.arrays["off_policy"] = np.zeros(batch.steps, np.bool_)
        return batch

    def ship(self, batch: ChunkBatch, number: int, discarded: dict[str, int] | None = None, spoil: int = 0) -> None:
        header = BatchHeader(
            fleet_id="",
            slot=0,
            incarnation=0,
            seq=number,
            steps=batch.steps,
            chunks=len(batch),
            learner_epoch=batch.learner_epoch,
            weights_digest=batch.weights_digest,
            reasons=list(batch.reasons),
            totals=WorkerTotals(),
        )
        frames = encode_batch(batch, header)
        array = np.frombuffer(b"".join(frames), np.uint8).copy()
        array[spoil] ^= spoil > 0
        sizes = [len(frame) for frame in frames]
        fields = {"number": number, "frame_sizes": sizes, "discarded": discarded or {}}
        self._link.ask(ChunkShipment, {"batch": array}, timeout_s=5, **fields)

    def close(self) -> None:
        self._runner.stop()


def assert_alike(a: EpisodeChunk, b: EpisodeChunk) -> None:
    for name in ("chunk_index", "t_start", "end", "end_reason", "infos", "agent_id", "module_id", "seed", "explore"):
        assert getattr(a, name) == getattr(b, name), name
    for name in ("random_actions", "learner_epoch", "weights_digest", "episode_return", "episode_length"):
        assert getattr(a, name) == getattr(b, name), name
    for name in ("obs", "actions", "rewards", "weights_seq", "env_t"):
        np.testing.assert_array_equal(getattr(a, name), getattr(b, name), strict=True)
    assert a.columns.keys() == b.columns.keys() >= {"logp", "off_policy", "action_dist_inputs"}
    for name, column in a.columns.items():
        np.testing.assert_array_equal(column, b.columns[name], strict=True)
    assert (a.lookback is None) == (b.lookback is None)
    if a.lookback is not None and b.lookback is not None:
        np.testing.assert_array_equal(a.lookback.obs, b.lookback.obs, strict=True)


def external(batch: ChunkBatch) -> ChunkBatch:
    """As one of external envs, whose steps say whether the policy was asked."""
    further = {"off_policy": np.zeros(batch.steps, np.bool_)}
    if "lookback/rewards" in batch.arrays:
        further["lookback/off_policy"] = np.zeros(len(batch.arrays["lookback/rewards"]), np.bool_)
    return replace(batch, arrays={**batch.arrays, **further})
