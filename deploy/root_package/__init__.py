"""Sampler workers for reinforcement learning behind a message broker.

All names that a user needs can be imported from here: `from headrace import EpisodeStream`. Each is loaded when it is
first used, so `import headrace` loads nothing. `docs/reference/python-api.md` describes them.

The five folders at the root of the repository are packages below this one: `headrace.workers`, `headrace.learner_stub`,
`headrace.deploy`, `headrace.broker` and `headrace.schemas`.
"""

TYPE_CHECKING = False
"""Type checkers take it for true. To import it from `typing` would load that."""

if TYPE_CHECKING:
    from headrace.deploy.annexes.programs import RunningFleet as RunningFleet
    from headrace.deploy.annexes.programs import fleet as fleet
    from headrace.deploy.trained.saved_policy import load_policy as load_policy
    from headrace.learner_stub.checkpoints.learner_state import LearnerState as LearnerState
    from headrace.learner_stub.checkpoints.learner_state import LoadedState as LoadedState
    from headrace.learner_stub.checkpoints.learner_state import save_policy as save_policy
    from headrace.learner_stub.publishing.publisher import WeightPublisher as WeightPublisher
    from headrace.learner_stub.rollouts.own_logp import with_own_logp as with_own_logp
    from headrace.learner_stub.rollouts.returns import Returns as Returns
    from headrace.learner_stub.rollouts.returns import gae as gae
    from headrace.learner_stub.rollouts.returns import vtrace as vtrace
    from headrace.learner_stub.rollouts.tensors import to_torch as to_torch
    from headrace.learner_stub.streaming.connector_merger import ConnectorMerger as ConnectorMerger
    from headrace.learner_stub.streaming.stream import EpisodeStream as EpisodeStream
    from headrace.schemas.chunks.episodes import episodes_of as episodes_of
    from headrace.schemas.errors import HeadraceError as HeadraceError
    from headrace.workers.adapters.gym_vector_env import GymVectorEnv as GymVectorEnv
    from headrace.workers.agents.env import MultiAgentEnv as MultiAgentEnv
    from headrace.workers.agents.multi_agent_env_runner import MultiAgentEnvRunner as MultiAgentEnvRunner
    from headrace.workers.callbacks import RunnerCallback as RunnerCallback
    from headrace.workers.config import EnvRunnerConfig as EnvRunnerConfig
    from headrace.workers.connectors import AgentOneHot as AgentOneHot
    from headrace.workers.connectors import ClipActions as ClipActions
    from headrace.workers.connectors import Connector as Connector
    from headrace.workers.connectors import FlattenObservations as FlattenObservations
    from headrace.workers.connectors import FrameStack as FrameStack
    from headrace.workers.connectors import MeanStd as MeanStd
    from headrace.workers.connectors import PreviousActionReward as PreviousActionReward
    from headrace.workers.connectors import Rows as Rows
    from headrace.workers.connectors import TimeOneHot as TimeOneHot
    from headrace.workers.connectors import UnsquashActions as UnsquashActions
    from headrace.workers.envs.context import EnvContext as EnvContext
    from headrace.workers.envs.context import StepFailedRecreateEnv as StepFailedRecreateEnv
    from headrace.workers.envs.creators import register_env as register_env
    from headrace.workers.envs.vector_env import VectorEnv as VectorEnv
    from headrace.workers.external import ExternalEnv as ExternalEnv
    from headrace.workers.external import ExternalMultiAgentEnv as ExternalMultiAgentEnv
    from headrace.workers.metrics.logger import merge_metrics as merge_metrics
    from headrace.workers.modules import PolicyModule as PolicyModule
    from headrace.workers.modules import RecurrentModule as RecurrentModule
    from headrace.workers.modules import actor_critic as actor_critic
    from headrace.workers.modules import lstm_actor_critic as lstm_actor_critic
    from headrace.workers.modules import sequences as sequences
    from headrace.workers.policy.policies import PolicySpec as PolicySpec
    from headrace.workers.runner.env_runner import EnvRunner as EnvRunner
    from headrace.workers.runner.single_agent_env_runner import SingleAgentEnvRunner as SingleAgentEnvRunner
    from headrace.workers.serving.acting import ActingClient as ActingClient
    from headrace.workers.serving.client import PolicyClient as PolicyClient
    from headrace.workers.trained.trained_policy import TrainedPolicy as TrainedPolicy

_NAMES = {
    "deploy.annexes.programs": "RunningFleet fleet",
    "deploy.trained.saved_policy": "load_policy",
    "learner_stub.checkpoints.learner_state": "LearnerState LoadedState save_policy",
    "learner_stub.publishing.publisher": "WeightPublisher",
    "learner_stub.rollouts.own_logp": "with_own_logp",
    "learner_stub.rollouts.returns": "Returns gae vtrace",
    "learner_stub.rollouts.tensors": "to_torch",
    "learner_stub.streaming.connector_merger": "ConnectorMerger",
    "learner_stub.streaming.stream": "EpisodeStream",
    "schemas.chunks.episodes": "episodes_of",
    "schemas.errors": "HeadraceError",
    "workers.adapters.gym_vector_env": "GymVectorEnv",
    "workers.agents.env": "MultiAgentEnv",
    "workers.agents.multi_agent_env_runner": "MultiAgentEnvRunner",
    "workers.callbacks": "RunnerCallback",
    "workers.config": "EnvRunnerConfig",
    "workers.connectors": "AgentOneHot ClipActions Connector FlattenObservations FrameStack MeanStd"
    " PreviousActionReward Rows TimeOneHot UnsquashActions",
    "workers.envs.context": "EnvContext StepFailedRecreateEnv",
    "workers.envs.creators": "register_env",
    "workers.envs.vector_env": "VectorEnv",
    "workers.external": "ExternalEnv ExternalMultiAgentEnv",
    "workers.metrics.logger": "merge_metrics",
    "workers.modules": "PolicyModule RecurrentModule actor_critic lstm_actor_critic sequences",
    "workers.policy.policies": "PolicySpec",
    "workers.runner.env_runner": "EnvRunner",
    "workers.runner.single_agent_env_runner": "SingleAgentEnvRunner",
    "workers.serving.acting": "ActingClient",
    "workers.serving.client": "PolicyClient",
    "workers.trained.trained_policy": "TrainedPolicy",
}
_HOMES = {name: f"headrace.{home}" for home, names in _NAMES.items() for name in names.split()}

__all__ = sorted(_HOMES)

__version__: str
"""The version, as in `pip show headrace`, read when it is first asked for."""


if not TYPE_CHECKING:  # so that type checkers notice a misspelt name

    def __getattr__(name: str) -> object:
        if name == "__version__":
            from importlib.metadata import version  # takes as long as all else that a light process imports

            return version("headrace")
        if name not in _HOMES:
            raise AttributeError(f"module 'headrace' has no attribute {name!r}")
        from importlib import import_module

        return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
