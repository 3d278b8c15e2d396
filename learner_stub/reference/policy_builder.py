"""Builder of the policies that the config names, each for its own spaces, as workers build theirs."""

from __future__ import annotations

from collections.abc import Mapping

from headrace.learner_stub.reference.policies import DEFAULT_MODULE, FrozenPolicy, LearnerPolicies, LearnerPolicy
from headrace.learner_stub.reference.ppo import PPO
from headrace.learner_stub.rollouts.module import build_frozen_module, build_module
from headrace.learner_stub.streaming.connector_merger import ConnectorMerger
from headrace.schemas.chunks.spaces import Spaces
from headrace.schemas.errors import ModuleError
from headrace.schemas.settings.config import FleetConfig, ModuleSection
from headrace.schemas.settings.sampling_settings import PolicySettings, SamplingSettings


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
