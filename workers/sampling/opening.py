"""Creation of the envs that a config asks for, in every placement."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import gymnasium as gym

from headrace.schemas.accounts.user_calls import UserCall
from headrace.schemas.errors import ConfigError
from headrace.workers.annex_parts import part
from headrace.workers.config import EnvRunnerConfig
from headrace.workers.envs.creators import find_creator, naming_what_failed
from headrace.workers.envs.driver import EnvDriver, Pace, own_driver
from headrace.workers.envs.inline import InlineEnvs
from headrace.workers.envs.lane_table import LaneTable
from headrace.workers.envs.process.pool import open_processes
from headrace.workers.envs.vector import EnvVector, OpenBackend
from headrace.workers.envs.vector_env import UserVectorEnvs, VectorEnv

OnWait = Callable[[str], None] | None


def open_envs(table: LaneTable, on_wait: OnWait = None) -> EnvDriver:
    """Build the envs of one agent for the table's config. Raises what the `build` of their driver raises.

    The creator of envs in this process is called once before their kind is known. While no env host has connected,
    `on_wait` is called from time to time with the address for env hosts.
    """
    config = table.config
    if config.env_placement != "inline":
        return EnvVector(table, backend_of(config, on_wait), pace_of(config))
    opened: EnvDriver
    if config.gym_env_vectorize_mode is not None:
        opened = part("open_native")(table)
        return opened
    first = first_env(table, part("limited_construction")(config.construct_timeout_s))
    driver = own_driver(first)
    check_batch_wait(config, has_own_driver=driver is not None)
    if driver is not None:
        opened = driver(table, first)
        return opened
    if isinstance(first, gym.vector.VectorEnv):
        opened = part("open_native")(table, first)
        return opened
    vector, built = UserVectorEnvs() if isinstance(first, VectorEnv) else None, [first]
    return EnvVector(table, lambda own: InlineEnvs(own, vector, built.pop() if built else None), Pace.LOCK_STEP)


def backend_of(config: EnvRunnerConfig, on_wait: OnWait) -> OpenBackend:
    """Return the function that opens the backend of envs outside this process."""
    if config.env_placement == "process":
        return open_processes
    kind_problem = partial(part("problem_of_kind"), several_agents=config.is_multi_agent)
    opened: OpenBackend = part("RemotePlacement")(kind_problem, on_wait).open
    return opened


def pace_of(config: EnvRunnerConfig) -> Pace:
    """Return the pace of envs outside this process."""
    return Pace.READY if config.steps_the_ready else Pace.LOCK_STEP


def first_env(table: LaneTable, limit: AbstractContextManager[None] | None = None) -> Any:
    """Return the creator's result for env 0, built within `limit`. Stores the context in the table."""
    creator, context = find_creator(table.config.env), table.new_context(0)
    calls = table.totals.calls
    with naming_what_failed(table.config, 0), calls.of(UserCall.CONSTRUCTION, 0), limit or nullcontext():
        return creator(context)


def check_batch_wait(config: EnvRunnerConfig, *, has_own_driver: bool) -> None:
    """Raise `ConfigError` if a batch wait is set for envs of this process: these step one after the other."""
    if config.remote_env_batch_wait_ms is not None and not has_own_driver:
        message = "is for envs in processes and external ones; leave it out, or take env_placement = 'process'"
        raise ConfigError(message, key="remote_env_batch_wait_ms")
