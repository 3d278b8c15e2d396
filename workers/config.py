"""The settings of a runner: one frozen value object, checked when it is built."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from pydantic import ConfigDict, Field, ModelWrapValidatorHandler, ValidationError, model_validator

from headrace.schemas.basics.bounds import MOST_SILENCE_S
from headrace.schemas.basics.printable import brief
from headrace.schemas.errors import ConfigError
from headrace.schemas.peers.socket_folder import make_socket_folder
from headrace.schemas.settings.config import FleetConfig
from headrace.schemas.settings.nearest_names import nearest_name
from headrace.schemas.settings.sampling_settings import SamplingSettings

DEFAULT_MODULE = "headrace.workers.modules:actor_critic"


class EnvRunnerConfig(SamplingSettings):
    """Settings of one env runner. Raises `ConfigError` for an unknown field (naming the nearest) or a bad value.

    `SamplingSettings` has what a fleet's file can say. Envs and modules may also be given here as objects.
    """

    model_config = ConfigDict(arbitrary_types_allowed=True)

    env: str | Callable[..., Any] | None = None
    """gymnasium id (also "module:Id-v0"), registered name, "package.module:make_env", class, or callable(EnvContext);
    it creates one env, or all of them as one `gymnasium.vector.VectorEnv` or as one `VectorEnv` of Headrace"""
    num_envs: int = Field(default=1, ge=1, le=65_536)
    """environments stepped together by one runner"""
    socket_dir: str = ""
    """folder of the runner's Unix socket for env hosts, of mode 0700; empty: a new one, which ends with the runner"""
    env_hosts_host: str = ""
    """remote envs: address where the runner listens for their hosts by TCP, which needs keys; empty: a Unix socket"""
    env_hosts_allow_insecure: bool = False
    """remote envs: listen by TCP without keys; every start warns"""
    env_hosts_lease_s: float = Field(default=10.0, gt=0, le=MOST_SILENCE_S)
    """silence after which an env host counts as lost, and its episodes with it"""
    env_hosts_keys: str | None = None
    """folder of the keys for the port of env hosts; None: the folder of HEADRACE_KEYS__DIR; '': no keys"""
    env_hosts_keys_group: str | None = None
    """group of the worker's key at that port, as in keys.group; None: that of HEADRACE_KEYS__GROUP"""
    num_workers: int = Field(default=1, ge=0)
    """number of runners in the fleet: it is passed to env creators and divides the window of metrics"""
    module: str | Callable[..., Any] = DEFAULT_MODULE
    """the policy: "package.module:build" or a callable, called as `build(spaces, **module_config)`"""
    module_config: dict[str, Any] = Field(default={})
    """keyword arguments of the module's builder"""
    module_compile: bool = False
    """let torch.compile make the modules' passes; the first one may take a minute"""
    policies: Any = None
    """several agents: module id -> policy, or just the ids; a policy is a PolicySpec, a table of build and config, a
    builder as in `module`, or None for `module` itself"""
    policy_mapping_fn: Any = None
    """several agents: (agent id, episode id) -> module id, called once for each agent that appears in an episode; or
    its "package.module:name", or a mapping from agent ids to module ids"""
    env_to_module: list[Any] = Field(default=[])
    """pieces that observations pass on their way to the module: connectors, factories, or "package.module:factory" of
    one"""
    module_to_env: list[Any] = Field(default=[])
    """pieces that actions pass on their way to the env, in the same forms"""
    callbacks: list[Any] = Field(default=[])
    """classes, objects, {event: function or list of them}, or "package.module:name" of one; see `callbacks.py`"""

    @model_validator(mode="wrap")
    @classmethod
    def _translate_errors(cls, data: Any, handler: ModelWrapValidatorHandler[EnvRunnerConfig]) -> EnvRunnerConfig:
        if isinstance(data, Mapping):
            for key in data:
                if key not in cls.model_fields:
                    near = f"; the nearest is {nearest_name(str(key), cls.model_fields, cutoff=0.0)!r}"
                    raise ConfigError(f"no such setting of EnvRunnerConfig{near}", key=str(key))
            if data.get("env_hosts_port") and not data.get("env_hosts_host"):
                wanted = "is for TCP; give env_hosts_host and env_hosts_keys, or leave it out for a Unix socket"
                raise ConfigError(f"{data['env_hosts_port']!r} {wanted}", key="env_hosts_port")
            _refuse_built(data.get("env"))
        try:
            config = handler(data)
        except ValidationError as error:
            first = error.errors()[0]
            key = str(first["loc"][0]) if first["loc"] else None
            raise ConfigError(f"{first['msg']}, got {brief(first['input'])}", key=key) from error
        return config


def runner_config(config: FleetConfig) -> EnvRunnerConfig:
    """Return the runner's settings in a fleet's. For a policy server, see `serving.served_env.served_config`.

    Makes the folder of the worker's Unix sockets, where it has any. Raises `RunDirError`.
    """
    has_socket = config.sampling.env_placement == "remote" and not config.env_hosts_host
    return EnvRunnerConfig(
        socket_dir=socket_dir(config) if has_socket else "",
        **config.sampling.model_dump(),
        num_workers=config.fleet.workers,
        env_hosts_host=config.env_hosts_host,
        env_hosts_allow_insecure=config.broker.allow_insecure,
        env_hosts_lease_s=config.broker.lease_s,
        env_hosts_keys=config.keys.dir,
        env_hosts_keys_group=config.keys.group,
        module=config.module.build,
        module_config=config.module.config,
        module_compile=config.module.compile,
    )


def socket_dir(config: FleetConfig) -> str:
    """Return the folder of the Unix sockets of the run. Make it if there is none; "" without a run directory."""
    return str(make_socket_folder(Path(config.fleet.run_dir))) if config.fleet.run_dir else ""


def _refuse_built(env: Any) -> None:
    """Raise `ConfigError` for an env in place of what builds one."""
    if hasattr(env, "reset") and not callable(env):
        name, spec = type(getattr(env, "unwrapped", env)).__qualname__, getattr(env, "spec", None)
        builder = f"{name} or env=lambda context: {name}(...)" if spec is None else repr(spec.id)
        raise ConfigError(
            f"got a {name} that is already built; give what builds one, as env={builder}, because a runner builds "
            "num_envs of them and rebuilds one that fails",
            key="env",
        )
