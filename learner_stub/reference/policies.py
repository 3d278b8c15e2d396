"""The policies of the fleet in the learner: trained ones, frozen ones, and the mergers of their connectors.

A fleet of one agent has one module without a name (`DEFAULT_MODULE`). Its weights, metrics and checkpoint are that
module's own, without a module id in any name. With several modules, each is trained on its own batches by a
learner of its own. All are published together, the frozen ones too, so that every worker has the same version of
everything.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from numpy.typing import NDArray
from torch import Tensor, nn

from headrace.learner_stub.reference.ppo import PPO, training_arrays, training_tensors
from headrace.learner_stub.reference.training_stats import RECENT_EPISODES, Metrics, TrainingStats
from headrace.learner_stub.rollouts.connector_merger import ConnectorMerger
from headrace.learner_stub.rollouts.interruption import NO_INTERRUPTION, StopDeadline
from headrace.learner_stub.rollouts.module import build_frozen_module, build_module
from headrace.schemas.accounts.aborted_episodes import AbortedWindow
from headrace.schemas.chunks.batch import ChunkBatch
from headrace.schemas.chunks.spaces import Spaces
from headrace.schemas.errors import ModuleError
from headrace.schemas.messages.weights import CONNECTORS, join_modules, split_modules
from headrace.schemas.settings.config import FleetConfig, ModuleSection
from headrace.schemas.settings.sampling_settings import PolicySettings, SamplingSettings

DEFAULT_MODULE = "default_policy"

Arrays = dict[str, NDArray[Any]]
StateDict = dict[str, Tensor | NDArray[Any]]


class FrozenPolicy:
    """A module that acts as it was built, or as the checkpoint has it. Its batches are counted.

    Its connectors go on learning. Build a connector that must not learn with an option such as `update = false`.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.stats = TrainingStats()

    def weights(self) -> dict[str, Tensor]:
        """Return the module's state dict."""
        return dict(self.module.state_dict())

    def update(self, batches: Sequence[ChunkBatch], interruption: StopDeadline = NO_INTERRUPTION) -> Metrics:
        """Count `batches`."""
        self.stats.count(batches)
        return self.stats.metrics()

    def get_state(self) -> tuple[dict[str, Any], Arrays]:
        """Return counters and weights; the optimizer's state is empty."""
        return {**self.stats.get_state(), "frozen": True}, training_arrays(self.weights(), {"state": {}})

    def set_state(self, state: Mapping[str, Any], arrays: Mapping[str, NDArray[Any]]) -> None:
        """Go on from the result of `get_state`. The optimizer's state of a module once in training is dropped."""
        self.module.load_state_dict(training_tensors(arrays)[0])
        self.stats.set_state(state)


LearnerPolicy = PPO | FrozenPolicy
"""One module's share of the learner."""


class LearnerPolicies:
    """All policies of the learner.

    `by_id`: module id -> its policy. `connectors`: module id -> its merger, for modules with connectors.
    """

    def __init__(
        self, by_id: Mapping[str, LearnerPolicy], connectors: Mapping[str, ConnectorMerger] | None = None
    ) -> None:
        self.by_id = dict(by_id)
        self._mergers = {module_id: (connectors or {}).get(module_id) or ConnectorMerger() for module_id in by_id}
        self._nameless = list(by_id) == [DEFAULT_MODULE]
        self.ends = AbortedWindow(RECENT_EPISODES)

    @property
    def updates(self) -> int:
        """Return how often `update` was called, over the learner's whole life."""
        return next(iter(self.by_id.values())).stats.updates

    @property
    def steps(self) -> int:
        """Return the steps of all modules' batches together, over the learner's whole life."""
        return sum(policy.stats.steps for policy in self.by_id.values())

    @property
    def window_mean(self) -> float | None:
        """Mean of trained policies' mean returns over the newest 100 episodes each; None before all have so many."""
        means = [policy.stats.window_mean for policy in self.by_id.values() if not isinstance(policy, FrozenPolicy)]
        return None if None in means or not means else sum(mean for mean in means if mean is not None) / len(means)

    def update(self, batches: Sequence[ChunkBatch], interruption: StopDeadline = NO_INTERRUPTION) -> Metrics:
        """Train each policy on its own of `batches`, which may be none. Return metrics by "module id/name".

        Updates of connectors count whether or not a policy trains on the batch they came with. Deterministic. Raises
        `ModuleError` for a batch without a policy here, and the errors of `PPO.update` and `ConnectorMerger.take`.
        """
        own: dict[str, list[ChunkBatch]] = {module_id: [] for module_id in self.by_id}
        for batch in batches:
            own[self._module_of(batch)].append(batch)
            self.ends.add(*batch.episode_ends)
        for module_id, merger in self._mergers.items():
            for batch in own[module_id]:
                merger.take(batch)
        metrics = {module_id: policy.update(own[module_id], interruption) for module_id, policy in self.by_id.items()}
        aborted = {"aborted": self.ends.counts[1]}
        if self._nameless:
            return metrics[DEFAULT_MODULE] | aborted
        by_module = {f"{m}/{name}": v for m, told in metrics.items() for name, v in told.items() if name != "update"}
        return {"update": self.updates, "steps": self.steps, **aborted, **by_module}

    def _module_of(self, batch: ChunkBatch) -> str:
        if len(batch.modules) != 1 or batch.modules[0] not in self.by_id:
            raise ModuleError(
                f"a batch of slot {batch.slot} is of {list(batch.modules)!r:.200}, and this learner's policies are "
                f"{sorted(self.by_id)!r:.200}; give workers and learner the same sampling.policies"
            )
        return batch.modules[0]

    def weights(self) -> StateDict | dict[str, StateDict]:
        """Return what to publish: module id -> its tensors and connector state; without ids for a nameless module."""
        by_id: dict[str, StateDict] = {
            m: {**p.weights(), **self._mergers[m].get_state()} for m, p in self.by_id.items()
        }
        return by_id[DEFAULT_MODULE] if self._nameless else by_id

    def get_state(self) -> tuple[dict[str, Any], Arrays]:
        """Return (plain JSON values, arrays by name) for a checkpoint. The arrays are live: write them at once."""
        states, arrays = {}, {}
        for module_id, policy in self.by_id.items():
            states[module_id], own = policy.get_state()
            arrays[module_id] = {**own, **self._mergers[module_id].get_state()}
        aborted = {"recent_aborted": self.ends.get_state()}
        if self._nameless:
            return states[DEFAULT_MODULE] | aborted, arrays[DEFAULT_MODULE]
        return {"modules": states, **aborted}, join_modules(arrays)

    def set_state(self, state: Mapping[str, Any], arrays: Mapping[str, NDArray[Any]]) -> None:
        """Go on from the result of `get_state`; settings stay those of the config.

        Raises `KeyError`, `RuntimeError`, `ValueError` or `ConnectorError` when the state is of other policies.
        """
        states = state.get("modules", {DEFAULT_MODULE: state})
        if states.keys() != self.by_id.keys():
            raise ValueError(f"it is of the modules {sorted(states)}, and this learner's are {sorted(self.by_id)}")
        parts = split_modules(arrays) if "modules" in state else {DEFAULT_MODULE: dict(arrays)}
        self.ends.set_state(state.get("recent_aborted", ()))
        for module_id, policy in self.by_id.items():
            own = (parts or {}).get(module_id, {})
            learnt = {name: array for name, array in own.items() if name.startswith(CONNECTORS)}
            policy.set_state(states[module_id], {name: own[name] for name in own if name not in learnt})
            self._mergers[module_id].set_state(learnt)


def build_policies(config: FleetConfig, spaces: Mapping[str, Spaces]) -> LearnerPolicies:
    """Build the policies of `config`, each for its own of `spaces`.

    Raises `ConfigError`, `ModuleError` and `ConnectorError`.
    """
    named = config.sampling.policies or {DEFAULT_MODULE: PolicySettings()}
    if missing := sorted(named.keys() - spaces.keys()):
        raise ModuleError(
            f"workers have the modules {sorted(spaces)!r:.200}, not {missing!r:.200}; give workers and learner "
            "the same sampling.policies"
        )
    trained = config.learner.policies_to_train
    by_id: dict[str, LearnerPolicy] = {}
    connectors: dict[str, ConnectorMerger] = {}
    for module_id, policy in named.items():
        section, where = _section(policy, config.module), _where(module_id, policy)
        if trained is None or module_id in trained:
            by_id[module_id] = PPO(build_module(section, spaces[module_id], where), config.learner)
        else:
            by_id[module_id] = FrozenPolicy(build_frozen_module(section, spaces[module_id], where))
        connectors[module_id] = _merger(policy, config.sampling)
    return LearnerPolicies(by_id, connectors)


def _section(policy: PolicySettings, default: ModuleSection) -> ModuleSection:
    """Return builder and arguments of a policy. Absent ones come from [module], as in workers."""
    return ModuleSection(
        build=default.build if policy.build is None else policy.build,
        config=default.config if policy.config is None else policy.config,
    )


def _merger(policy: PolicySettings, default: SamplingSettings) -> ConnectorMerger:
    return ConnectorMerger(
        env_to_module=default.env_to_module if policy.env_to_module is None else policy.env_to_module,
        module_to_env=default.module_to_env if policy.module_to_env is None else policy.module_to_env,
    )


def _where(module_id: str, policy: PolicySettings) -> str:
    """Return the setting to name in an error."""
    return "module" if policy.build is None and policy.config is None else f"sampling.policies.{module_id}"
