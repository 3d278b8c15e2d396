"""The policies of a config, the spaces each module is built for, and the mapping from agents to modules."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from headrace.schemas.basics.stop_event import raise_stop
from headrace.schemas.chunks.module_spaces import check_mapping_table, check_module_ids
from headrace.schemas.chunks.spaces import Spaces
from headrace.schemas.errors import ConfigError, words_of
from headrace.schemas.settings.plugins import load_object
from headrace.schemas.settings.sampling_settings import PolicySettings
from headrace.workers.config import EnvRunnerConfig
from headrace.workers.envs.spaces import convert

NO_EPISODE = "0" * 32
"""Episode id passed to the mapping to find out which spaces a module needs; no episode has this id."""


class PolicyMappingError(ConfigError):
    """`policy_mapping_fn` returned no module for `agent`, or one that is not among the policies."""

    def __init__(self, agent: Any, reason: str, policies: Mapping[str, Any]) -> None:
        self.agent = agent
        super().__init__(
            f"agent {agent!r} {reason}; it must be mapped to one of the policies {sorted(policies)!r:.200}",
            key="policy_mapping_fn",
        )


@dataclass(frozen=True, slots=True)
class Policy:
    """One module: its builder, the builder's keyword arguments, the spaces it was given, if any, and its connectors."""

    module: str | Callable[..., Any]
    module_config: Mapping[str, Any]
    spaces: Spaces | None
    gym_spaces: tuple[Any, Any] | None
    env_to_module: Sequence[Any]
    module_to_env: Sequence[Any]


@dataclass(frozen=True, slots=True)
class Policies:
    """The modules by id, and the mapping from agents to them."""

    specs: Mapping[str, Policy]
    mapping_fn: Callable[[Any, str], str] | None = None

    @classmethod
    def of(cls, config: EnvRunnerConfig) -> Policies:
        """Return the policies of the config. Raises `ConfigError` if it names neither policies nor a mapping."""
        if config.policies is None and config.policy_mapping_fn is None:
            raise ConfigError(
                "this config is not multi-agent; give EnvRunnerConfig(policies={module_id: ...}, policy_mapping_fn="
                "lambda agent_id, episode_id: module_id), or use SingleAgentEnvRunner",
                key="policies",
            )
        given: Any = config.policies if config.policies is not None else ("default_policy",)
        named = _named(given)
        specs = {module_id: _policy(module_id, spec, config) for module_id, spec in named.items()}
        return cls(specs, _mapping(config.policy_mapping_fn, specs))

    def module_of(self, agent: Any, episode_id: str) -> str:
        """Return the module that plays `agent` in the episode.

        Without a mapping, it is the only module, or the one named like the agent. Raises `PolicyMappingError`.
        """
        if self.mapping_fn is None:
            module: Any = next(iter(self.specs)) if len(self.specs) == 1 else str(agent)
        else:
            try:
                module = self.mapping_fn(agent, episode_id)
            except KeyError as error:
                raise PolicyMappingError(agent, "is not in the mapping", self.specs) from error
            except BaseException as error:
                raise_stop(error)
                reason = f"could not be mapped ({words_of(error)})"
                raise PolicyMappingError(agent, reason, self.specs) from error
        if not isinstance(module, str) or module not in self.specs:
            raise PolicyMappingError(agent, f"was mapped to {module!r:.80}", self.specs)
        return module

    def spaces(self, by_agent: Mapping[Any, Spaces]) -> dict[str, Spaces]:
        """Return the spaces that each module is built for: its own, or those of its agents.

        Where agents differ and a policy names no spaces, the mapping is called once for every possible agent. Raises
        `ConfigError` for a module whose agents differ, or that has no agent.
        """
        kinds = list({spaces.model_dump_json(): spaces for spaces in by_agent.values()}.values())
        asked: dict[str, dict[Any, Spaces]] = {}
        if len(kinds) > 1 and any(spec.spaces is None for spec in self.specs.values()):
            for agent, spaces in by_agent.items():
                asked.setdefault(self.module_of(agent, NO_EPISODE), {})[agent] = spaces
        return {
            module: spec.spaces or (kinds[0] if len(kinds) == 1 else _common(module, asked.get(module, {})))
            for module, spec in self.specs.items()
        }


def _named(given: Any) -> Mapping[str, Any]:
    """Return the description of each policy by its id; None for a policy that is only named."""
    if isinstance(given, set | frozenset):
        given = sorted(given, key=str)  # in an order that every process shares
    if not isinstance(given, Mapping | list | tuple):
        raise ConfigError(f"{given!r:.80} is no mapping by policy id, and no list of such ids", key="policies")
    try:
        check_module_ids(given)
    except ValueError as error:
        raise ConfigError(str(error), key="policies") from error
    return given if isinstance(given, Mapping) else dict.fromkeys(given)


def _common(module: str, by_agent: Mapping[Any, Spaces]) -> Spaces:
    agents = list(by_agent)
    if not agents:
        raise ConfigError(
            f"no agent is mapped to {module!r}, so its spaces are unknown; "
            "give PolicySpec(observation_space=..., action_space=...)",
            key="policies",
        )
    for agent in agents[1:]:
        if by_agent[agent] != by_agent[agents[0]]:
            raise ConfigError(
                f"agents {agents[0]!r} and {agent!r} have different spaces and are both mapped to {module!r}; "
                "give each kind of agent a policy of its own",
                key="policy_mapping_fn",
            )
    return by_agent[agents[0]]


def _mapping(given: Any, specs: Mapping[str, Policy]) -> Callable[[Any, str], str] | None:
    """Return the mapping function: `given` itself, or one for a path or a table. A table has agents' names as text."""
    if isinstance(given, str):
        given = load_object(given, "policy_mapping_fn")
    if isinstance(given, Mapping):
        table = {str(agent): module_id for agent, module_id in given.items()}
        try:
            check_mapping_table(table, specs)
        except ValueError as error:
            raise ConfigError(str(error), key="policy_mapping_fn") from error
        return lambda agent, episode_id: table[str(agent)]
    if given is not None and not callable(given):
        raise ConfigError(
            f"{given!r:.80} is no function of (agent id, episode id), no 'package.module:function', and no table of "
            "module ids by agent",
            key="policy_mapping_fn",
        )
    mapping: Callable[[Any, str], str] | None = given
    return mapping


def _of_table(module_id: str, table: Mapping[str, Any]) -> PolicySpec:
    """Return the PolicySpec of a table with the fields of `PolicySettings`; absent fields are None."""
    if strange := table.keys() - PolicySettings.model_fields.keys():
        raise ConfigError(
            f"the table of policy {module_id!r} has {sorted(strange)!r:.100}; it may have "
            f"{', '.join(PolicySettings.model_fields)}",
            key="policies",
        )
    return PolicySpec(
        table.get("build"),
        table.get("config"),
        env_to_module=table.get("env_to_module"),
        module_to_env=table.get("module_to_env"),
    )


def _check_parts(module_id: str, spec: PolicySpec) -> None:
    for name, kinds, wanted in (
        ("module_config", Mapping, "a mapping of keyword arguments"),
        ("env_to_module", list | tuple, "a list of connectors"),
        ("module_to_env", list | tuple, "a list of connectors"),
    ):
        part = getattr(spec, name)
        if part is not None and not isinstance(part, kinds):
            raise ConfigError(f"{name} of policy {module_id!r} should be {wanted}, got {part!r:.80}", key="policies")


def _policy(module_id: str, given: Any, config: EnvRunnerConfig) -> Policy:
    if isinstance(given, Mapping):
        given = _of_table(module_id, given)
    if given is None or isinstance(given, str) or (callable(given) and not isinstance(given, PolicySpec)):
        given = PolicySpec(given)
    if not isinstance(given, PolicySpec) or (given.observation_space is None) != (given.action_space is None):
        raise ConfigError(
            f"policy {module_id!r} is {given!r:.200}; give None, 'package.module:build', a callable, a table of build "
            "and config, or a PolicySpec with both spaces or neither",
            key="policies",
        )
    _check_parts(module_id, given)
    spaces = None
    if given.observation_space is not None:
        observation = convert(given.observation_space, f"observation space of policy {module_id!r}")
        action = convert(given.action_space, f"action space of policy {module_id!r}")
        spaces = Spaces(observation=observation, action=action)
    own = config.module if given.module is None else given.module
    own_config = dict(config.module_config if given.module_config is None else given.module_config)
    gym_spaces = None if spaces is None else (given.observation_space, given.action_space)
    inward = config.env_to_module if given.env_to_module is None else given.env_to_module
    outward = config.module_to_env if given.module_to_env is None else given.module_to_env
    return Policy(own, own_config, spaces, gym_spaces, inward, outward)


@dataclass(frozen=True, slots=True)
class PolicySpec:
    """One module: its builder and its spaces.

    A field that is None is taken from the config, or from the module's agents. `module`, `env_to_module` and
    `module_to_env` are as in `EnvRunnerConfig`. Give both spaces or neither. They are gymnasium spaces, those of the
    module's agents before any connector.
    """

    module: str | Callable[..., Any] | None = None
    module_config: Mapping[str, Any] | None = None
    observation_space: Any = None
    action_space: Any = None
    env_to_module: Sequence[Any] | None = None
    module_to_env: Sequence[Any] | None = None
