"""The multi-agent runner: a vector of multi-agent envs, several policies, and chunks of each agent's episodes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

import gymnasium as gym

from headrace.schemas.chunks.spaces import Spaces
from headrace.workers.agents.episodes import MultiAgentEpisode
from headrace.workers.agents.inline import InlineAgents
from headrace.workers.agents.packed import PackedAgents
from headrace.workers.agents.seat_steps import SeatSteps
from headrace.workers.agents.seating import Seating
from headrace.workers.agents.vector import AgentSource, MultiAgentVector
from headrace.workers.envs.driver import own_driver
from headrace.workers.policy.policies import Policies
from headrace.workers.runner.env_runner import EnvRunner
from headrace.workers.runner.policy_names import ModuleIdNames
from headrace.workers.sampling.cutting import Stamp
from headrace.workers.sampling.module_batches import ModuleBatches
from headrace.workers.sampling.opening import backend_of, check_batch_wait, first_env, pace_of


class MultiAgentEnvRunner(EnvRunner[ModuleBatches]):
    """Samples `config.num_envs` multi-agent envs with one forward pass a poll for each module.

    A chunk is a part of one agent's episode, and `sample` gives a `ModuleBatches`. A failing env costs only the open
    steps of its own agents. The episodes of other envs are bit-identical to those without the fault. `totals` count
    agent steps, and also env steps. Weights are mappings by module id. A module that is left out is frozen: it keeps
    its weights. Each module has its own connectors.

    `EnvRunner` says what the arguments mean. Raises `ConfigError` for a config without policies, and `EnvContractError`
    for a single-agent env.
    """

    _names = ModuleIdNames()

    def _read_policies(self) -> None:
        self._specs = Policies.of(self.config)
        self._metrics.count_losses = self._count_losses

    def _open_steps(self) -> SeatSteps:
        config, table = self.config, self._lane_table()
        seating = Seating(self._specs, config.num_envs, self._seeds, self._id_high)
        source: AgentSource
        if config.env_placement != "inline":
            source = PackedAgents(table, backend_of(config, self._on_wait_for_hosts), pace_of(config), seating)
        else:
            first = first_env(table)
            driver = own_driver(first, several_agents=True)
            check_batch_wait(config, has_own_driver=driver is not None)
            source = (InlineAgents if driver is None else driver)(table, seating, first)
        vector = MultiAgentVector(source, seating, table)
        return SeatSteps(config, vector, self._seeds, self.totals, self._id_high)

    def _builder_of(self, module_id: str) -> tuple[Any, Mapping[str, Any]]:
        policy = Policies.of(self.config).specs[module_id]  # the config may have changed since
        return policy.module, policy.module_config

    def _maps_actions(self, module_id: str) -> bool:
        return bool(self._specs.specs[module_id].module_to_env)

    @property
    def _seat_steps(self) -> SeatSteps:
        return cast(SeatSteps, self._existing_sampler.steps)

    @property
    def spaces(self) -> dict[str, Spaces]:
        """Module id -> the spaces it was built for, as data: its agents' own after all its connectors."""
        return self.module_spaces

    def _cut(self, stamp: Stamp, keep_open: bool) -> ModuleBatches:
        steps = self._seat_steps
        over, batches = steps.cut(stamp, keep_open=keep_open)
        actions = batches.agent_steps()
        agents = dict(actions)
        modules = {module_id: batch.steps for module_id, batch in batches.batches.items() if batch.steps}
        for (agent, module_id), more in steps.observed_more.items():
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
        self._metrics.add_episode(whole, episode.t, episode.duration_s, agents, modules, episode.task)

    def get_metrics(self) -> dict[str, Any]:
        """See `EnvRunner`. Figures that have no value are absent, and steps without an answer are not counted yet.

        Further figures: discarded agent steps; rewards without a step, because their agents never acted or their last
        step was dropped (as a count of agents, and as a sum for this life only); repeated final observations; dropped
        final steps.
        """
        report = super().get_metrics()
        if self._sampler is not None:
            report["agent_rewards_lost_lifetime"] = self._seat_steps.lost_rewards.total
        return report

    def _count_losses(self) -> dict[str, int]:
        if self._sampler is None:
            return {}
        lost = self._seat_steps.lost_rewards
        return {
            "num_agent_steps_discarded_lifetime": sum(self.totals.discarded.values()),
            "num_agent_rewards_lost_lifetime": lost.agents,
            "num_final_observations_repeated_lifetime": lost.final_observations_repeated,
            "num_final_steps_dropped_lifetime": lost.final_steps_dropped,
        }

    def get_spaces(self) -> dict[str, tuple[Any, Any]]:
        """See `EnvRunner`. A policy whose spaces are in the config has those spaces."""
        seating = self._seat_steps.seating
        of_agents = seating.agent_gym_spaces
        by_kind = {own.model_dump_json(): of_agents[agent] for agent, own in seating.agent_spaces.items()}
        given = {module_id: policy.gym_spaces for module_id, policy in self._specs.specs.items()}
        of_modules = {
            module_id: given[module_id] or by_kind[module.env_spaces.model_dump_json()]
            for module_id, module in seating.modules.items()
        }
        seen, done = (gym.spaces.Dict({a: pair[i] for a, pair in of_agents.items()}) for i in (0, 1))
        return {**of_modules, **self._env_spaces(seen, done)}
