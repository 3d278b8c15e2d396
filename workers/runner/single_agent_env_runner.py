"""The single-agent runner: a vector of envs, one policy, and chunks of episodes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

import gymnasium as gym
import torch

from headrace.schemas.chunks.batch import ChunkBatch
from headrace.schemas.chunks.module_spaces import DEFAULT_MODULE_ID
from headrace.schemas.chunks.spaces import Spaces
from headrace.schemas.errors import ConfigError
from headrace.workers.annex_parts import part
from headrace.workers.config import EnvRunnerConfig
from headrace.workers.metrics.call_mark import CallMark
from headrace.workers.runner.env_runner import EnvRunner
from headrace.workers.runner.policy_names import OneModuleNames
from headrace.workers.sampling.cutting import Stamp
from headrace.workers.sampling.lane_steps import LaneSteps
from headrace.workers.sampling.opening import open_envs


class SingleAgentEnvRunner(EnvRunner[ChunkBatch]):
    """Samples `config.num_envs` single-agent envs in this process.

    A failing env costs only its own unfinished fragment. The episodes of other envs are bit-identical to those without
    the fault. `EnvRunner` says what the arguments mean.
    """

    _names = OneModuleNames()

    def _read_policies(self) -> None:
        if self.config.policies is not None or self.config.policy_mapping_fn is not None:
            raise ConfigError("several policies need MultiAgentEnvRunner; leave it out", key="policies")

    def _open_steps(self) -> LaneSteps:
        envs = open_envs(self._lane_table(), self._on_wait_for_hosts)
        return LaneSteps(self.config, envs, self._seeds, self.totals, self._id_high)

    def _builder_of(self, module_id: str) -> tuple[Any, Mapping[str, Any]]:
        return self.config.module, self.config.module_config

    @property
    def module(self) -> torch.nn.Module | None:
        """The policy's module; None if its builder raised NotImplementedError, or without an env."""
        return self.modules.get(DEFAULT_MODULE_ID)

    @property
    def _rl_module(self) -> Any:
        return self.module

    @property
    def _lane_steps(self) -> LaneSteps:
        return cast(LaneSteps, self._existing_sampler.steps)

    @property
    def spaces(self) -> Spaces:
        """Observation and action space as the module and the chunks have them: each env's own after all connectors."""
        return self.module_spaces[DEFAULT_MODULE_ID]

    def _cut(self, stamp: Stamp, keep_open: bool) -> ChunkBatch:
        steps = self._lane_steps
        chunks, batch = steps.cut(stamp, keep_open=keep_open)
        self._metrics.add(batch, len(chunks), lambda row: chunks[row].episode.duration_s)
        for episode_return, length in steps.take_untrained():
            self._metrics.add_untrained(episode_return, length)
        return batch

    def get_spaces(self) -> dict[str, tuple[gym.Space[Any], gym.Space[Any]]]:
        """See `EnvRunner`."""
        spaces = self._lane_steps.envs.gym_spaces
        return {DEFAULT_MODULE_ID: spaces, **self._env_spaces(*spaces)}


AnyRunner = EnvRunner[Any]


def open_runner(
    config: EnvRunnerConfig, worker_index: int = 0, *, calls: CallMark | None = None, **options: Any
) -> AnyRunner:
    """Build the runner of one agent, or of several where `config` has policies. `options`: see `EnvRunner`."""
    kind = part("MultiAgentEnvRunner") if config.is_multi_agent else SingleAgentEnvRunner
    runner: AnyRunner = kind(config, worker_index, calls=calls, **options)
    if calls is not None and calls.sides is not None:
        calls.sides.keep()
    return runner
