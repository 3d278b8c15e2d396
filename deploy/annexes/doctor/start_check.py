"""The check before a start: it builds and tries what the config names, once, in a process of its own.

The supervisor starts that process by `check_process.py`, and reads its announced steps and the error with which it
ends. Quick checks of common mistakes come first. torch takes a second or two, so it is imported last,
and only for a module that may be wrong.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np

from headrace.deploy.annexes.doctor.env_trial import try_env
from headrace.deploy.trained.policy_spaces import built_env
from headrace.schemas.chunks.module_spaces import DEFAULT_MODULE_ID
from headrace.schemas.chunks.spaces import Spaces, leaf_size, leaves
from headrace.schemas.errors import ConfigError, ModuleError
from headrace.schemas.frames.compression import LZ4
from headrace.schemas.settings.config import FleetConfig
from headrace.schemas.settings.plugins import check_package, load_factory, load_object
from headrace.workers.config import DEFAULT_MODULE, EnvRunnerConfig, runner_config
from headrace.workers.connectors.pipeline import Pipeline
from headrace.workers.envs.native.creators import vector_creator
from headrace.workers.policy.policies import Policies, Policy

Say = Callable[[str], None]


def check_start(config: FleetConfig, say: Say) -> str:
    """Check that workers and learner can be built from `config`. `say` gets a text before each step.

    Return what the user should know of the env's speed; "" for nothing.

    Raises the error with which a worker or the learner would end.
    """
    runner = runner_config(config)
    say("looking up what the config names")
    envs_are_here = config.fleet.workers > 0 and (
        config.sampling.env_placement != "remote" or config.fleet.env_hosts > 0
    )
    if envs_are_here:
        vector_creator(runner)
    _check_packages(config)
    several = runner if runner.is_multi_agent else runner.model_copy(update={"policies": [DEFAULT_MODULE_ID]})
    policies = Policies.of(several).specs
    _check_names(config, policies)
    device: Any = None
    if (config.fleet.workers or config.learner.evaluate_every_steps) and config.sampling.device != "cpu":
        from headrace.workers.devices.open_device import open_device

        device = open_device(config.sampling.device)
    if not envs_are_here or not config.fleet.check_env:
        return ""
    say(f"building one env of {config.sampling.env!r}")
    with built_env(runner) as built:
        say(f"resetting and stepping that env of {config.sampling.env!r} once")
        took_s = try_env(runner, built)
    spaces = dict(_connected(policies, built.by_module, config.sampling.num_envs))
    if not runner.is_multi_agent:
        _check_sizes(config, spaces[DEFAULT_MODULE_ID])
    if not all(policy.module == DEFAULT_MODULE and not policy.module_config for policy in policies.values()):
        what = "compiling" if config.module.compile else "building"
        say(f"{what} the modules of " + ", ".join(sorted({repr(policy.module) for policy in policies.values()})))
        _check_modules(config, runner, policies, spaces, device)
    return _slow_polls(config, took_s)


def _slow_polls(config: FleetConfig, took_s: Mapping[str, float]) -> str:
    sampling, what = config.sampling, max(took_s, key=took_s.__getitem__, default="")
    is_inline = sampling.env_placement == "inline"
    together = sampling.num_envs if is_inline else min(sampling.num_envs, sampling.envs_per_process)
    poll_s = took_s.get(what, 0.0) * together
    if (together == 1 and not is_inline) or poll_s <= config.broker.lease_s:
        return ""
    home = f"a worker with {together} inline envs" if is_inline else f"a process of {together} envs"
    placement = "--set sampling.env_placement=process " if is_inline else ""
    return (
        f"the first {what} of env {sampling.env!r} took {took_s[what]:.1f} s, so {home} takes {poll_s:.0f} s for all "
        f"of them, one after the other; {placement}--set sampling.envs_per_process=1 runs them side by side, and there "
        "a hang costs one env"
    )


def _check_sizes(config: FleetConfig, spaces: Spaces) -> None:
    """Raise `ConfigError` where limits in bytes are too small for a chunk, or for the batches of one update.

    A batch has more bytes than its observations, so a limit that passes may still be too small.
    """
    if config.sampling.batch_mode != "truncate_episodes":
        return
    rows = [leaf_size(leaf) * np.dtype(leaf.dtype).itemsize for _, leaf in leaves(spaces.observation, "obs")]
    nbytes = config.cut_steps * sum(rows)
    batch = (
        f"a batch of sampling.num_envs = {config.sampling.num_envs} times sampling.rollout_fragment_length = "
        f"{config.sampling.rollout_fragment_length} steps has {nbytes:,} bytes of observations or more"
    )
    broker, update = config.broker, f"one update of learner.steps_per_update = {config.learner.steps_per_update}"
    if (chunk_bytes := config.sampling.rollout_fragment_length * sum(rows)) > broker.max_batch_bytes:
        raise ConfigError(
            f"{broker.max_batch_bytes:,} is too little: a chunk of sampling.rollout_fragment_length steps has "
            f"{chunk_bytes:,} bytes of observations or more, and would be dropped as oversize; raise the limit, or "
            "lower that",
            key="broker.max_batch_bytes",
        )
    waits = "workers and learner would wait for each other; raise the limit, or lower one of the others"
    if config.holds_too_little(broker.max_held_bytes // max(1, nbytes)):
        raise ConfigError(
            f"{broker.max_held_bytes:,} holds too little for {update}: {batch}; {waits}", key="broker.max_held_bytes"
        )
    if config.keeps_too_little(max(1, config.window_bytes // max(1, nbytes))):
        raise ConfigError(
            f"{broker.max_held_bytes:,} is too little: a worker keeps a quarter of it, and {update} needs more: "
            f"{batch}; {waits}",
            key="broker.max_held_bytes",
        )


# -- names ------------------------------------------------------------------------------------------------------------


def _check_packages(config: FleetConfig) -> None:
    asked = config.serving.enabled and config.serving.http_port is not None
    if asked and config.fleet.workers:
        check_package("HTTP", "httptools", "http", key="serving.http_port")
    if config.fleet.workers and config.worker.compression == LZ4:
        check_package("compression", "lz4", "lz4", key="worker.compression")


def _check_names(config: FleetConfig, policies: Mapping[str, Policy]) -> None:
    """Import connectors, modules and callbacks, as far as they are used on this machine."""
    if config.fleet.workers or config.learner.enabled:
        for policy in policies.values():
            for key in ("env_to_module", "module_to_env"):
                for number, piece in enumerate(getattr(policy, key)):
                    load_factory(piece, f"{key}[{number}]")
            if policy.module != DEFAULT_MODULE:
                _load_builder(str(policy.module))
    if config.fleet.workers:
        for name in config.sampling.callbacks:
            load_object(name, "sampling.callbacks")


def _load_builder(build: str) -> None:
    try:
        found = load_object(build, "module.build")
    except ConfigError as error:
        raise ModuleError(f"module {build!r} cannot be found ({error})") from error
    if not callable(found):
        raise ModuleError(f"module {build!r} is a {type(found).__name__}; name a function build(spaces, **config)")


# -- spaces -----------------------------------------------------------------------------------------------------------


def _connected(
    policies: Mapping[str, Policy], spaces: Mapping[str, Spaces], num_envs: int
) -> Iterator[tuple[str, Spaces]]:
    """Yield each module with its spaces after all its connectors. Raises `ConnectorError`."""
    for module_id, policy in policies.items():
        owner = "" if module_id == DEFAULT_MODULE_ID else f" of policy {module_id!r}"
        outward = Pipeline("module_to_env", policy.module_to_env, owner).connect_actions(spaces[module_id], num_envs)
        yield module_id, Pipeline("env_to_module", policy.env_to_module, owner).connect_observations(outward, num_envs)


# -- modules ----------------------------------------------------------------------------------------------------------


def _check_modules(
    config: FleetConfig,
    runner: EnvRunnerConfig,
    policies: Mapping[str, Policy],
    spaces: Mapping[str, Spaces],
    device: Any,
) -> None:
    """Build each module as workers do, let it act once, and build it as the learner does. Raises `ModuleError`."""
    from headrace.learner_stub.reference.policies import build_policies
    from headrace.workers.policy.batch_columns import PolicyColumns
    from headrace.workers.policy.module_protocol import build_module, compile_passes

    trained = config.learner.policies_to_train
    for module_id, policy in policies.items():
        try:
            module = build_module(policy.module, spaces[module_id], policy.module_config).eval()
        except NotImplementedError:
            continue  # the policy acts at random
        rows = 1
        if config.module.compile:
            compile_passes(module)
            rows = config.sampling.num_envs  # workers then find what torch keeps of this compilation on disk
        try:
            own = spaces[module_id]
            columns = PolicyColumns.of(module, own, own, runner, maps=False, device=device, rows=rows).kinds
        except ModuleError as error:
            compiles = ", or torch does not compile it (module.compile = true)" * config.module.compile
            fault = f"module {policy.module!r} does not fit its env's spaces{compiles}: {error}"
            raise ModuleError(fault) from error.__cause__
        is_trained = config.learner.enabled and (trained is None or module_id in trained)
        if is_trained and "logp" not in columns:
            raise ModuleError(
                f"module {policy.module!r} gives no 'logp' in forward_exploration, which the reference learner needs; "
                "return it, or train with a learner of your own: --set learner.enabled=false"
            )
    if config.learner.enabled:
        build_policies(config, spaces)
