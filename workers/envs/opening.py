"""Which kind of envs a config asks for. One cannot tell before its creator has been called."""

from __future__ import annotations

from collections.abc import Callable

import gymnasium as gym

from headrace.schemas.errors import ConfigError
from headrace.workers.callbacks import CallbackList
from headrace.workers.config import EnvRunnerConfig
from headrace.workers.envs.creators import find_creator, naming_what_failed
from headrace.workers.envs.driver import EnvDriver, ReadyDriver
from headrace.workers.envs.inline import CreatedEnvs, InlinePlacement
from headrace.workers.envs.lane_table import LaneTable, context_of
from headrace.workers.envs.native.construction import limited_construction
from headrace.workers.envs.native.partial import PartialVector, answers_in_part
from headrace.workers.envs.native.vector import NativeVector
from headrace.workers.envs.pace import Pace
from headrace.workers.envs.process.pool_placement import ProcessPlacement
from headrace.workers.envs.remote.pool_placement import RemotePlacement
from headrace.workers.envs.user_vector import UserVectorEnvs
from headrace.workers.envs.vector import EnvVector
from headrace.workers.envs.vector_env import VectorEnv
from headrace.workers.external.env import ExternalEnv
from headrace.workers.external.vector import ExternalVector
from headrace.workers.metrics.totals import RunnerTotals
from headrace.workers.randomness.seeds import SeedTree


def open_envs(
    config: EnvRunnerConfig,
    worker_index: int,
    seeds: SeedTree,
    totals: RunnerTotals,
    callbacks: CallbackList,
    on_wait: Callable[[], None] | None = None,
) -> EnvDriver:
    """The envs that `config` asks for, built, in the hands of a driver of their kind. Raises what `build` does.

    `on_wait` is called now and then while nobody has come yet who could build them.
    """
    table = LaneTable(config, worker_index, seeds, totals, callbacks)
    if config.env_placement == "remote":
        return EnvVector(table, RemotePlacement(on_wait), Pace.LOCK_STEP)
    if config.env_placement == "process":
        return EnvVector(table, ProcessPlacement(), Pace.LOCK_STEP)
    if config.gym_env_vectorize_mode is not None:
        return NativeVector(config, worker_index, seeds, totals, callbacks)
    creator, context = find_creator(config.env), context_of(config, worker_index, 0, seeds)
    with naming_what_failed(config, 0), limited_construction(config.env_construct_timeout_s):
        first = creator(context)
    check_batch_wait(config, is_external=isinstance(first, ExternalEnv))
    if isinstance(first, ExternalEnv):
        return ExternalVector(config, worker_index, seeds, totals, callbacks, (first, context))
    if isinstance(first, gym.vector.VectorEnv):
        kind = PartialVector if answers_in_part(first) else NativeVector
        return kind(config, worker_index, seeds, totals, callbacks, (first, context))
    source = UserVectorEnvs() if isinstance(first, VectorEnv) else CreatedEnvs()
    return EnvVector(table, InlinePlacement(source, (first, context)), Pace.LOCK_STEP)


def open_ready_envs(
    config: EnvRunnerConfig,
    worker_index: int,
    seeds: SeedTree,
    totals: RunnerTotals,
    callbacks: CallbackList,
    on_wait: Callable[[], None] | None = None,
) -> ReadyDriver:
    """Likewise, where `config` asks for envs that are stepped each in its own time."""
    table = LaneTable(config, worker_index, seeds, totals, callbacks)
    remote = config.env_placement == "remote"
    return EnvVector(table, RemotePlacement(on_wait) if remote else ProcessPlacement(), Pace.READY)


def check_batch_wait(config: EnvRunnerConfig, *, is_external: bool) -> None:
    """Raise `ConfigError` where envs of this process, which are stepped one after the other, are to be waited for."""
    if config.remote_env_batch_wait_ms is not None and not is_external:
        message = "is for envs in processes and external ones; leave it out, or take env_placement = 'process'"
        raise ConfigError(message, key="remote_env_batch_wait_ms")
