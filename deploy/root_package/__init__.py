"""Sampler workers for reinforcement learning behind a message broker.

All names that a user needs can be imported from here: `from headrace import EpisodeStream`. Each is loaded when it is
first used, so `import headrace` loads nothing. `docs/reference/python-api.md` describes them.

The five folders at the root of the repository are packages below this one: `headrace.workers`, `headrace.learner_stub`,
`headrace.deploy`, `headrace.broker` and `headrace.schemas`.
"""

TYPE_CHECKING = False
"""Type checkers take it for true. To import it from `typing` would load that."""

if TYPE_CHECKING:
    from headrace.deploy import TrainedPolicy as TrainedPolicy
    from headrace.deploy import load_policy as load_policy
    from headrace.deploy.annexes.programs import RunningFleet as RunningFleet
    from headrace.deploy.annexes.programs import fleet as fleet
    from headrace.learner_stub import ConnectorMerger as ConnectorMerger
    from headrace.learner_stub import EpisodeStream as EpisodeStream
    from headrace.learner_stub import LearnerState as LearnerState
    from headrace.learner_stub import LoadedState as LoadedState
    from headrace.learner_stub import Returns as Returns
    from headrace.learner_stub import StreamDataset as StreamDataset
    from headrace.learner_stub import TaskPublisher as TaskPublisher
    from headrace.learner_stub import WeightPublisher as WeightPublisher
    from headrace.learner_stub import episodes_of as episodes_of
    from headrace.learner_stub import gae as gae
    from headrace.learner_stub import minibatches as minibatches
    from headrace.learner_stub import save_policy as save_policy
    from headrace.learner_stub import spread as spread
    from headrace.learner_stub import to_torch as to_torch
    from headrace.learner_stub import vtrace as vtrace
    from headrace.learner_stub import with_own_logp as with_own_logp
    from headrace.schemas.errors import HeadraceError as HeadraceError
    from headrace.workers import EnvContext as EnvContext
    from headrace.workers import EnvRunner as EnvRunner
    from headrace.workers import EnvRunnerConfig as EnvRunnerConfig
    from headrace.workers import GymVectorEnv as GymVectorEnv
    from headrace.workers import MultiAgentEnv as MultiAgentEnv
    from headrace.workers import MultiAgentEnvRunner as MultiAgentEnvRunner
    from headrace.workers import PolicySpec as PolicySpec
    from headrace.workers import RunnerCallback as RunnerCallback
    from headrace.workers import SingleAgentEnvRunner as SingleAgentEnvRunner
    from headrace.workers import StepFailedRecreateEnv as StepFailedRecreateEnv
    from headrace.workers import VectorEnv as VectorEnv
    from headrace.workers import merge_metrics as merge_metrics
    from headrace.workers import register_env as register_env
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
    from headrace.workers.external import ExternalEnv as ExternalEnv
    from headrace.workers.external import ExternalMultiAgentEnv as ExternalMultiAgentEnv
    from headrace.workers.modules import PolicyModule as PolicyModule
    from headrace.workers.modules import RecurrentModule as RecurrentModule
    from headrace.workers.modules import actor_critic as actor_critic
    from headrace.workers.modules import lstm_actor_critic as lstm_actor_critic
    from headrace.workers.modules import sequences as sequences
    from headrace.workers.serving.acting import ActingClient as ActingClient
    from headrace.workers.serving.client import PolicyClient as PolicyClient

_NAMES = {
    "deploy": "TrainedPolicy load_policy",
    "deploy.annexes.programs": "RunningFleet fleet",
    "learner_stub": "ConnectorMerger EpisodeStream LearnerState LoadedState Returns StreamDataset TaskPublisher"
    " WeightPublisher episodes_of gae minibatches save_policy spread to_torch vtrace with_own_logp",
    "schemas.errors": "HeadraceError",
    "workers": "EnvContext EnvRunner EnvRunnerConfig GymVectorEnv MultiAgentEnv MultiAgentEnvRunner PolicySpec"
    " RunnerCallback SingleAgentEnvRunner StepFailedRecreateEnv VectorEnv merge_metrics register_env",
    "workers.connectors": "AgentOneHot ClipActions Connector FlattenObservations FrameStack MeanStd"
    " PreviousActionReward Rows TimeOneHot UnsquashActions",
    "workers.external": "ExternalEnv ExternalMultiAgentEnv",
    "workers.modules": "PolicyModule RecurrentModule actor_critic lstm_actor_critic sequences",
    "workers.serving.acting": "ActingClient",
    "workers.serving.client": "PolicyClient",
}
_HOMES = {name: f"headrace.{home}" for home, names in _NAMES.items() for name in names.split()}

__all__ = sorted(_HOMES.keys() - {"VectorEnv"})
"""Without the name that a program may have from gymnasium, so that `from headrace import *` leaves it."""

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
    return [*_HOMES, "__version__", *(home for home in _NAMES if "." not in home)]
