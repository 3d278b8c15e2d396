"""The single-agent runner: a vector of envs, one policy, and chunks of episodes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from numpy.typing import NDArray

from headrace.schemas.batch import ChunkBatch
from headrace.schemas.errors import ConfigError, MissingEnvError, ModuleError
from headrace.schemas.module_spaces import DEFAULT_MODULE_ID
from headrace.schemas.spaces import Spaces
from headrace.workers.config import EnvRunnerConfig
from headrace.workers.connectors.connector import State
from headrace.workers.connectors.vector_connectors import join_states, split_states
from headrace.workers.envs.actions import RandomActions
from headrace.workers.envs.lane import Lane
from headrace.workers.modules.protocol import build_module
from headrace.workers.policy.acting import Actor, BlockActor, Columns
from headrace.workers.policy.columns import PolicyColumns
from headrace.workers.policy.lane_noise import LaneNoises
from headrace.workers.policy.module_weights import check_weights, read_weights, write_weights
from headrace.workers.policy.random_streams import check_lanes, read_lanes, write_lanes
from headrace.workers.runner.env_runner import EnvRunner, no_module_error
from headrace.workers.runner.runner_state import Version
from headrace.workers.runner.state_components import RL_MODULE, Selection
from headrace.workers.sampling.episode_view import EpisodeView
from headrace.workers.sampling.external_sampler import ExternalSampler
from headrace.workers.sampling.opening import open_sampler
from headrace.workers.sampling.ready_sampler import ReadySampler
from headrace.workers.sampling.vector_sampler import VectorSampler


class SingleAgentEnvRunner(EnvRunner[ChunkBatch]):
    """Samples `config.num_envs` single-agent envs in this process.

    A failing env costs only its own unfinished fragment; what its siblings live through is the same to the bit as
    without the fault. `totals` is true after every poll. `incarnation` and `run_uid` make episode ids and random
    numbers unlike those of any other runner of the run; with `config.seed` and `run_uid` given, both repeat. `on_wait`
    is called now and then while envs on other hosts have no host yet.
    """

    def __init__(
        self,
        config: EnvRunnerConfig,
        worker_index: int = 0,
        *,
        incarnation: int = 0,
        run_uid: str = "",
        on_wait: Callable[[], None] | None = None,
        **_: Any,
    ) -> None:
        if config.policies is not None or config.policy_mapping_fn is not None:
            raise ConfigError("several policies need MultiAgentEnvRunner; leave it out", key="policies")
        super().__init__(config, worker_index, incarnation, run_uid)
        self.module: torch.nn.Module | None = None
        self._sampler: VectorSampler | None = None
        self._actor: Actor | BlockActor | None = None
        self._noises = LaneNoises(in_step=True)
        self._on_wait_for_hosts = on_wait
        if config.env is not None or config.env_placement == "remote":
            self._make_parts()
        self._healthy = True

    # -- parts --------------------------------------------------------------------------------------------------------

    def _make_envs(self) -> None:
        if self._sampler is None:
            parts = self.config, self.worker_index, self._seeds, self.totals
            self._sampler = open_sampler(*parts, self._id_high, self.callbacks, self._on_wait_for_hosts)
            if isinstance(self._sampler, ExternalSampler):
                self._sampler.envs.read_version = lambda: self.weights_version
        else:
            self._sampler.rebuild(self.config)
        self._random = RandomActions(self.spaces.action)
        self._noises = LaneNoises(in_step=not isinstance(self._sampler, ReadySampler))
        self._noises.begin("random_actions", self._seeds.random_actions, self._random.noise_size, "uniform")
        if self.module is not None:
            self._make_actor(self.module)

    def make_module(self) -> None:
        """See `EnvRunner`. A builder that raises NotImplementedError leaves the runner to random actions."""
        self.callbacks.check_at_rest("make_module()")
        self.module = self._actor = None
        self._noises.forget("policy")
        try:
            module = build_module(self.config.module, self.spaces, self.config.module_config)
        except NotImplementedError:
            return
        self.module = module.eval()
        self._version = Version()
        self._make_actor(module)

    def _make_actor(self, module: Any) -> None:
        parts = module, self.spaces, self._vector.connectors.columns, lambda: self.fleet_steps
        blocks = self._vector.blocks
        self._actor = BlockActor(*parts, blocks) if blocks else Actor(*parts)
        self._vector.use_memory(self._actor.memory)
        if isinstance(self._sampler, ExternalSampler):
            self._sampler.module = module
        self._noises.begin("policy", self._seeds.policy, module.noise_size, module.noise_kind)

    @property
    def _vector(self) -> VectorSampler:
        if self._sampler is None:
            raise MissingEnvError
        return self._sampler

    @property
    def env(self) -> gym.Env[Any, Any] | None:
        """Env 0 of the vector, or all of a native one; None before `make_env`, and while it is to be rebuilt."""
        return self._sampler.envs.lanes[0].env if self._sampler is not None else None

    @property
    def spaces(self) -> Spaces:
        """Observation and action space as the module and the chunks have them: each env's own after all connectors."""
        return self._vector.connectors.spaces

    @property
    def module_spaces(self) -> dict[str, Spaces]:
        """See `EnvRunner`."""
        return {DEFAULT_MODULE_ID: self.spaces}

    def call_before_rebuilds(self, on_rebuild: Callable[[], None]) -> None:
        """See `EnvRunner`."""
        self._vector.envs.on_rebuild = on_rebuild

    # -- one poll and one cut, for the loop of `EnvRunner` ------------------------------------------------------------

    def _check_can_act(self) -> None:
        if self._actor is None:
            raise no_module_error()

    def _poll(self, on_wait: Callable[[], None] | None, stop_at_episodes: int | None) -> None:
        self._vector.poll(self._choose_actions, self._version.seq, on_wait=on_wait, stop_at_episodes=stop_at_episodes)

    def _choose_actions(self, acting: NDArray[np.intp] | None) -> Columns:
        mode, connectors = self._vector.mode, self._vector.connectors
        if mode.random_actions:
            columns = self._random(self._noises.draw("random_actions", acting))
            return connectors.for_env(columns, acting) if connectors.maps_actions else columns
        assert self._actor is not None
        noise = self._noises.draw("policy", acting) if mode.explore else None
        return connectors.for_env(self._actor(noise, acting), acting)

    def _cut(self, keep_open: bool) -> ChunkBatch:
        version = self._version
        chunks, batch = self._vector.cut(
            version.learner_epoch, version.digest, self.worker_index, self.incarnation, keep_open=keep_open
        )
        self._metrics.add(chunks, batch)
        if isinstance(self._sampler, ExternalSampler):
            for episode_return, length in self._sampler.take_untrained():
                self._metrics.add_untrained(episode_return, length)
        return batch

    def policy_columns(self) -> dict[str, PolicyColumns]:
        """See `EnvRunner`."""
        self._check_can_act()
        config, env_spaces = self.config, self._vector.envs.spaces
        columns = PolicyColumns.of(self.module, self.spaces, env_spaces, config, maps=bool(config.module_to_env))
        return {DEFAULT_MODULE_ID: columns}

    # -- weights and state --------------------------------------------------------------------------------------------

    def _write_weights(self, state: Mapping[str, Any]) -> None:
        weights, connectors = split_states(state)
        if self.module is None:
            raise ModuleError("this runner has no module to take weights")
        check_weights(self.module, weights)
        self._write_connectors(connectors)
        write_weights(self.module, weights)

    def _write_connectors(self, states: Mapping[str, State]) -> None:
        self._vector.connectors.check_state(states)
        self._vector.connectors.set_state(states)

    def _read_connectors(self) -> dict[str, State]:
        return self._vector.connectors.get_state() if self._sampler is not None else {}

    def take_connector_update(self) -> dict[str, State]:
        """What the connectors have learnt since the last call, for `merge_connector_updates`."""
        return self._vector.connectors.take_update()

    def _attach_updates(self, batch: ChunkBatch) -> ChunkBatch:
        return self._vector.connectors.attach_update(batch)

    def merge_connector_updates(self, state: State, updates: Sequence[Mapping[str, State]]) -> State:
        """`state`, as this method gave it before (at first {}), with the `updates` of all runners; sets nothing.

        Give it, beside new weights in one mapping, to `set_weights` of every runner.
        """
        _, before = split_states(state)
        return join_states(self._vector.connectors.merge(before, updates))

    def _select_weights(self, selection: Selection, weights: Mapping[str, Any]) -> dict[str, Any]:
        named: dict[str, Any] = selection.part(RL_MODULE, {DEFAULT_MODULE_ID: weights})
        return dict(named.get(DEFAULT_MODULE_ID, {}))

    def _read_weights(self) -> dict[str, Any] | None:
        return read_weights(self.module) if self.module is not None else None

    def _read_streams(self) -> dict[str, Any] | None:
        if self._sampler is None:
            return None
        unstepped = [not len(self._sampler.look(lane, lane.episode)) if lane.episode else False for lane in self._lanes]
        if not self._sampler.envs.seeds_every_episode:
            unstepped = [False] * len(unstepped)  # what a vector began by itself cannot be begun again
        return {"worker_index": self.worker_index, "lanes": read_lanes(self._lanes, unstepped), **self._noises.read()}

    def _accept_streams(self, state: Mapping[str, Any]) -> Callable[[], None]:
        check_lanes(self._lanes, state.get("lanes"))
        self._noises.check(state)
        return lambda: self._write_streams(state)

    def _write_streams(self, state: Mapping[str, Any]) -> None:
        write_lanes(self._lanes, state["lanes"])
        self._noises.write(state)

    @property
    def _lanes(self) -> list[Lane]:
        return self._vector.envs.lanes

    # -- what else one may ask ----------------------------------------------------------------------------------------

    def running_episodes(self) -> list[EpisodeView]:
        """The episodes that are going on, by env: how long they last already, their length and return so far."""
        if self._sampler is None:
            return []
        sampler = self._sampler
        return [sampler.look(lane, lane.episode) for lane in sampler.envs.lanes if lane.episode is not None]

    def try_render_at(self, index: int = 0) -> NDArray[np.uint8] | None:
        """What env `index` shows now, rgb uint8 (height, width, 3); None where it gives no rgb_array, or is down."""
        return self._vector.envs.try_render_at(index)

    def get_metrics(self) -> dict[str, Any]:
        """See `EnvRunner`; figures that have no value are absent."""
        return self._metrics.report(self._version.seq)

    def get_spaces(self) -> dict[str, tuple[gym.Space[Any], gym.Space[Any]]]:
        """See `EnvRunner`."""
        return {DEFAULT_MODULE_ID: self._vector.envs.gym_spaces}
