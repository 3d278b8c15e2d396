"""The multi-agent runner: a vector of multi-agent envs, several policies, and chunks of each agent's episodes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from headrace.schemas.errors import ConnectorError, MissingEnvError, ModuleError, StateError
from headrace.schemas.spaces import Spaces
from headrace.workers.agents.episodes import MultiAgentEpisode
from headrace.workers.config import EnvRunnerConfig
from headrace.workers.connectors.connector import State
from headrace.workers.connectors.vector_connectors import join_states, split_states
from headrace.workers.external.agents import ExternalAgents
from headrace.workers.modules.protocol import build_module
from headrace.workers.policy.columns import PolicyColumns
from headrace.workers.policy.module_states import ByModule, by_module, by_pipeline
from headrace.workers.policy.module_weights import check_weights, read_weights, weights_by_module, write_weights
from headrace.workers.policy.policies import Policies
from headrace.workers.policy.random_streams import check_lanes, read_lanes, write_lanes
from headrace.workers.policy.seat_streams import check_seats, read_seats, write_seats
from headrace.workers.runner.env_runner import EnvRunner, no_module_error
from headrace.workers.runner.runner_state import Version
from headrace.workers.sampling.agent_views import MultiAgentEpisodeView
from headrace.workers.sampling.agents_sampler import MultiAgentSampler
from headrace.workers.sampling.module_batches import ModuleBatches
from headrace.workers.sampling.opening import open_agents, sampler_of


class MultiAgentEnvRunner(EnvRunner[ModuleBatches]):
    """Samples `config.num_envs` multi-agent envs with one forward pass a poll for each module.

    A chunk is a part of one agent's episode, and `sample` gives a `ModuleBatches`. A failing env costs only what its
    own agents had open; what its siblings live through is the same to the bit as without the fault. `totals` count
    agent steps, and env steps besides. Weights are mappings by module id; a module that is left out is frozen: it goes
    on acting with those it has. Each module has connectors of its own.

    `on_wait`: see `SingleAgentEnvRunner`. Raises `NotMultiAgentError` for a config without policies, and
    `EnvContractError` for a single-agent env.
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
        super().__init__(config, worker_index, incarnation, run_uid)
        self._policies = Policies.of(self.config)
        self._metrics.count_losses = self._count_losses
        self._sampler: MultiAgentSampler | None = None
        self.modules: dict[str, torch.nn.Module | None] = {}
        """The module of each policy; None where its builder raised NotImplementedError."""
        self._on_wait_for_hosts = on_wait
        if config.env is not None or config.env_placement == "remote":
            self._make_parts()
        self._healthy = True

    # -- parts --------------------------------------------------------------------------------------------------------

    def _make_envs(self) -> None:
        if self._sampler is None:
            parts = self.config, self.worker_index, self._seeds, self.totals
            envs = open_agents(*parts, self._policies, self._id_high, self.callbacks, self._on_wait_for_hosts)
            if isinstance(envs, ExternalAgents):
                envs.read_version = lambda: self.weights_version
            self._sampler = sampler_of(envs, self.config, self.totals, self._id_high, self.callbacks)
        else:
            self._sampler.rebuild(self.config)
        self._sampler.use(self.modules, lambda: self.fleet_steps)

    def make_module(self) -> None:
        """Build all modules anew. A builder that raises NotImplementedError leaves the runner to random actions."""
        self.callbacks.check_at_rest("make_module()")
        seats = self._vector.envs.modules
        self.modules = {module_id: self._build(module_id, seats[module_id].spaces) for module_id in seats}
        self._version = Version()
        self._vector.use(self.modules, lambda: self.fleet_steps)

    def _build(self, module_id: str, spaces: Spaces) -> torch.nn.Module | None:
        policy = self._policies.specs[module_id]
        try:
            module = build_module(policy.module, spaces, policy.module_config)
        except NotImplementedError:
            return None
        built: torch.nn.Module = module.eval()
        return built

    @property
    def _vector(self) -> MultiAgentSampler:
        if self._sampler is None:
            raise MissingEnvError
        return self._sampler

    @property
    def env(self) -> Any:
        """Env 0 of the vector, in the dict protocol; None before `make_env`, and while it waits to be rebuilt."""
        return self._sampler.envs.lanes[0].env if self._sampler is not None else None

    @property
    def spaces(self) -> dict[str, Spaces]:
        """Module id -> the spaces it was built for, as data: its agents' own after all its connectors."""
        return {module.module_id: module.spaces for module in self._vector.modules}

    @property
    def module_spaces(self) -> dict[str, Spaces]:
        """See `EnvRunner`."""
        return self.spaces

    def policy_columns(self) -> dict[str, PolicyColumns]:
        """See `EnvRunner`."""
        self._check_can_act()
        maps = {module_id: bool(policy.module_to_env) for module_id, policy in self._policies.specs.items()}
        return {
            id: PolicyColumns.of(seats.module, seats.spaces, seats.env_spaces, self.config, maps=maps[id])
            for id, seats in self._vector.envs.modules.items()
        }

    def call_before_rebuilds(self, on_rebuild: Callable[[], None]) -> None:
        """See `EnvRunner`."""
        self._vector.envs.on_rebuild = on_rebuild

    # -- one poll and one cut, for the loop of `EnvRunner` ------------------------------------------------------------

    def _check_can_act(self) -> None:
        if any(module is None for module in self.modules.values()):
            raise no_module_error()

    def _poll(self, on_wait: Callable[[], None] | None, stop_at_episodes: int | None) -> None:
        self._vector.poll(self._version.seq, on_wait=on_wait, stop_at_episodes=stop_at_episodes)

    def _cut(self, keep_open: bool) -> ModuleBatches:
        version = self._version
        over, batches = self._vector.chunks.cut(
            version.learner_epoch, version.digest, self.worker_index, self.incarnation, keep_open=keep_open
        )
        actions = batches.agent_steps()
        agents = dict(actions)
        modules = {module_id: batch.steps for module_id, batch in batches.batches.items() if batch.steps}
        for (agent, module_id), more in self._vector.chunks.observed_more.items():
            agents[agent] += more
            modules[module_id] += more
        self._metrics.count_steps(agents, modules, actions)
        for episode in over:
            self._count_episode(episode)
        return batches

    def _count_episode(self, episode: MultiAgentEpisode) -> None:
        agents: dict[str, tuple[float, int]] = {}
        modules: dict[str, float] = {}
        for seat in episode.seats.values():
            own, module_id = seat.episode, seat.module.module_id
            agents[own.agent] = own.episode_return, own.steps
            modules[module_id] = modules.get(module_id, 0.0) + own.episode_return
        whole = sum(r for r, _ in agents.values())
        if not episode.trains:
            self._metrics.add_untrained(whole, episode.t)
            return
        self._metrics.add_episode(whole, episode.t, episode.duration_s, agents, modules)

    # -- weights and what else one may ask ----------------------------------------------------------------------------

    def _read_streams(self) -> dict[str, Any] | None:
        if self._sampler is None:
            return None
        envs = self._sampler.envs
        unstepped = [isinstance(lane.episode, MultiAgentEpisode) and not lane.episode.t for lane in envs.lanes]
        return {
            "worker_index": self.worker_index,
            "lanes": read_lanes(envs.lanes, unstepped),
            "seats": read_seats(self._seeds.seats, envs.modules),
        }

    def _accept_streams(self, state: Mapping[str, Any]) -> Callable[[], None]:
        envs = self._vector.envs
        check_lanes(envs.lanes, state.get("lanes"))
        check_seats(envs.modules, len(envs.lanes), len(envs.agents), state.get("seats"))

        def write() -> None:
            write_lanes(envs.lanes, state["lanes"])
            write_seats(self._seeds.seats, envs.modules, state["seats"])

        return write

    def _callback_arguments(self) -> dict[str, Any]:
        return super()._callback_arguments() | {"rl_module": self.modules or None}

    def running_episodes(self) -> list[MultiAgentEpisodeView]:
        """The episodes that are going on, by env: how long they last already, their length and return so far."""
        return self._sampler.running() if self._sampler is not None else []

    def _write_weights(self, state: Mapping[str, Any]) -> None:
        given = weights_by_module(state, list(self.modules))
        parts = {module_id: split_states(own) for module_id, own in given.items()}
        for module_id, (weights, connectors) in parts.items():
            module = self.modules[module_id]
            if module is None and (weights or not connectors):
                raise ModuleError(f"this runner has no module {module_id!r} to take weights; its builder gave none")
            if module is not None and (weights or not connectors):
                check_weights(module, weights)
        self._set_connectors({module_id: connectors for module_id, (_, connectors) in parts.items() if connectors})
        for module_id, (weights, _) in parts.items():
            module = self.modules[module_id]
            if module is not None and weights:
                write_weights(module, weights)

    def _read_weights(self) -> dict[str, Any] | None:
        weights = {module_id: read_weights(module) for module_id, module in self.modules.items() if module is not None}
        return weights or None

    def _join(self, weights: Mapping[str, Any], connectors: Mapping[str, State]) -> dict[str, Any]:
        if flat := [name for name, own in weights.items() if not isinstance(own, Mapping)]:
            raise StateError(f"rl_module should have weights by module id, {sorted(self.modules)}, got {flat[0]!r:.80}")
        states = by_module(connectors)
        return {
            module_id: {**weights.get(module_id, {}), **join_states(states.get(module_id, {}))}
            for module_id in {**weights, **states}
        }

    # -- connectors ---------------------------------------------------------------------------------------------------

    def _read_connectors(self) -> dict[str, State]:
        if self._sampler is None:
            return {}
        return by_pipeline({module.module_id: module.connectors.get_state() for module in self._sampler.modules})

    def _write_connectors(self, states: Mapping[str, State]) -> None:
        self._set_connectors(by_module(states))

    def _set_connectors(self, states: Mapping[str, Mapping[str, State]]) -> None:
        """All of it or, with a `ConnectorError`, nothing."""
        modules = self._vector.envs.modules
        for module_id, own in states.items():
            if module_id not in modules:
                raise ConnectorError(f"of {module_id!r}", f"there is no such module; they are {sorted(modules)!r:.200}")
            modules[module_id].connectors.check_state(own)
        for module_id, own in states.items():
            modules[module_id].connectors.set_state(own)

    def take_connector_update(self) -> ByModule:
        """What each module's connectors have learnt since the last call, by module id."""
        return {module.module_id: module.connectors.take_update() for module in self._vector.modules}

    def merge_connector_updates(
        self, state: Mapping[str, State], updates: Sequence[Mapping[str, Mapping[str, State]]]
    ) -> dict[str, State]:
        """`state`, as this method gave it before (at first {}), with the `updates` of all runners; sets nothing.

        By module id: give each module's, beside its new weights, to `set_weights` of every runner.
        """
        merged = {}
        for module in self._vector.modules:
            _, before = split_states(state.get(module.module_id, {}))
            own = [update.get(module.module_id, {}) for update in updates]
            merged[module.module_id] = join_states(module.connectors.merge(before, own))
        return merged

    def _attach_updates(self, batch: ModuleBatches) -> ModuleBatches:
        modules = self._vector.envs.modules
        attached = {i: modules[i].connectors.attach_update(own) for i, own in batch.batches.items()}
        learnt = any(attached[i] is not own for i, own in batch.batches.items())
        return ModuleBatches(attached) if learnt else batch

    def get_metrics(self) -> dict[str, Any]:
        """See `EnvRunner`; figures that have no value are absent. Steps that hang are not counted as sampled yet.

        Besides: agent steps that were discarded; rewards for which there was no step, because their agents never acted
        or their last step was dropped, by agents concerned and, of this life only, in sum; final observations that were
        repeated, and final steps that were dropped.
        """
        report = self._metrics.report(self._version.seq)
        if self._sampler is not None:
            report["agent_rewards_lost_lifetime"] = self._sampler.chunks.losses.return_
        return report

    def _count_losses(self) -> dict[str, int]:
        if self._sampler is None:
            return {}
        losses = self._sampler.chunks.losses
        return {
            "num_agent_steps_discarded_lifetime": sum(self.totals.discarded.values()),
            "num_agent_rewards_lost_lifetime": losses.rewards,
            "num_final_observations_repeated_lifetime": losses.final_observations_repeated,
            "num_final_steps_dropped_lifetime": losses.final_steps_dropped,
        }

    def get_spaces(self) -> dict[str, tuple[Any, Any]]:
        """Module id -> (observation space, action space) as the env has them, or as they were given for the policy."""
        envs = self._vector.envs
        by_kind = {own.model_dump_json(): envs.agent_gym_spaces[agent] for agent, own in envs.agent_spaces.items()}
        given = {module_id: policy.gym_spaces for module_id, policy in self._policies.specs.items()}
        return {
            module_id: given[module_id] or by_kind[module.env_spaces.model_dump_json()]
            for module_id, module in envs.modules.items()
        }
