"""The sampling side: it steps environments with the newest policy and cuts their episodes into chunks.

Names are loaded on first use, so that a learner can import `headrace.workers.modules` without gymnasium.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from headrace.workers.adapters.gym_vector_env import GymVectorEnv as GymVectorEnv
    from headrace.workers.agents.env import MultiAgentEnv as MultiAgentEnv
    from headrace.workers.agents.multi_agent_env_runner import MultiAgentEnvRunner as MultiAgentEnvRunner
    from headrace.workers.callbacks import RunnerCallback as RunnerCallback
    from headrace.workers.config import EnvRunnerConfig as EnvRunnerConfig
    from headrace.workers.envs.context import EnvContext as EnvContext
    from headrace.workers.envs.context import StepFailedRecreateEnv as StepFailedRecreateEnv
    from headrace.workers.envs.creators import register_env as register_env
    from headrace.workers.envs.vector_env import VectorEnv as VectorEnv
    from headrace.workers.metrics.logger import merge_metrics as merge_metrics
    from headrace.workers.policy.policies import PolicySpec as PolicySpec
    from headrace.workers.runner.env_runner import EnvRunner as EnvRunner
    from headrace.workers.runner.single_agent_env_runner import SingleAgentEnvRunner as SingleAgentEnvRunner

_HOMES = {
    "EnvContext": "headrace.workers.envs.context",
    "EnvRunner": "headrace.workers.runner.env_runner",
    "EnvRunnerConfig": "headrace.workers.config",
    "GymVectorEnv": "headrace.workers.adapters.gym_vector_env",
    "RunnerCallback": "headrace.workers.callbacks",
    "MultiAgentEnv": "headrace.workers.agents.env",
    "MultiAgentEnvRunner": "headrace.workers.agents.multi_agent_env_runner",
    "PolicySpec": "headrace.workers.policy.policies",
    "SingleAgentEnvRunner": "headrace.workers.runner.single_agent_env_runner",
    "StepFailedRecreateEnv": "headrace.workers.envs.context",
    "VectorEnv": "headrace.workers.envs.vector_env",
    "__version__": "headrace",
    "merge_metrics": "headrace.workers.metrics.logger",
    "register_env": "headrace.workers.envs.creators",
}

__all__ = sorted(_HOMES.keys() - {"__version__"})
__version__: str


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
