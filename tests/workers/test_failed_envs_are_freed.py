"""A failed env is freed before the next one is built, also without a `close`: its port is free again."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from headrace.workers import EnvContext, VectorEnv
from headrace.workers.envs.failures import Failure, let_go
from headrace.workers.envs.lane import Lane
from support.envs.counting import Counting
from support.envs.toy import runner
from support.envs.toy_agents import Together, multi_runner

_ports: set[str] = set()
_half_built: set[str] = set()
"""The names of envs whose second constructor has failed."""


class Port:
    """A thing that one object of a process can have, until it is freed."""

    def __init__(self, name: str) -> None:
        if name in _ports:
            raise OSError("address already in use")
        _ports.add(name)
        self.name = name

    def __del__(self) -> None:
        if hasattr(self, "name"):
            _ports.discard(self.name)


class Listens(Counting):
    """Has a port, and no `close`. The first life fails once, at `config["fails_at"]`."""

    def __init__(self, config: EnvContext) -> None:
        super().__init__(config)
        self.port = Port(config["name"])
        self.fails_at = "" if config.recreated else config["fails_at"]
        if config["cycle"]:
            self.itself = self
        if config.recreated and config["fails_at"] == "construction" and config["name"] not in _half_built:
            _half_built.add(config["name"])
            raise RuntimeError("not ready")

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        if self.fails_at == "reset":
            try:
                self.port.accept()  # type: ignore[attr-defined]
            except AttributeError as error:
                raise RuntimeError("not ready") from error
        return super().reset(seed=seed)

    def step(self, action: Any) -> Any:
        if self.t == 2 and self.fails_at in ("step", "construction"):
            raise RuntimeError("connection lost")
        if self.t == 2 and self.fails_at in ERRORS_WITH_AN_ENV:
            raise ERRORS_WITH_AN_ENV[self.fails_at](self)
        observation, *rest = super().step(action)
        return observation * np.nan if self.t == 3 and self.fails_at == "observation" else observation, *rest


class LostError(Exception):
    """Knows the env that it is about."""

    def __init__(self, env: Any) -> None:
        super().__init__("connection lost")
        self.env = env


ERRORS_WITH_AN_ENV: dict[str, Callable[[Any], BaseException]] = {
    "argument": lambda env: RuntimeError("connection lost", env),
    "nested": lambda env: RuntimeError({"envs": [env]}),
    "attribute": LostError,
    "group": lambda env: ExceptionGroup("both", [ValueError(1), LostError(env)]),
}


class ListensTogether(Together):
    """The same with several agents."""

    def __init__(self, config: EnvContext) -> None:
        super().__init__(config)
        self.solo = Listens(config)

    def step(self, actions: Any) -> Any:
        self.solo.step(0)
        return super().step(actions)


def make(context: EnvContext) -> Listens:
    """Return the env, also in another process."""
    return Listens(context)


def make_wrapped(context: EnvContext) -> VectorEnv:
    """Return a vector whose env is new after a failure."""
    made: list[int] = []

    def make_at(index: int) -> Listens:
        context.recreated = bool(made)
        made.append(index)
        return Listens(context)

    return VectorEnv.wrap(make_at, num_envs=1)


KINDS: dict[str, tuple[Any, dict[str, Any]]] = {
    "inline": (make, {}),
    "sync": (make, {"gym_env_vectorize_mode": "sync"}),
    "wrap": (make_wrapped, {}),
    "process": (f"{__name__}:make", {"env_placement": "process"}),
}


@pytest.mark.parametrize("cycle", [False, True], ids=["plain", "cycle"])
@pytest.mark.parametrize("fails_at", ["step", "reset", "observation"])
@pytest.mark.parametrize("kind", ["inline", "sync", "wrap", pytest.param("process", marks=pytest.mark.thorough)])
def test_the_port_of_a_failed_env_is_free_for_the_next(kind: str, fails_at: str, cycle: bool) -> None:
    env, settings = KINDS[kind]
    config = {"name": f"{kind}-{fails_at}-{cycle}", "fails_at": fails_at, "cycle": cycle}
    with runner(env, env_config=config, env_restart_attempts=1, **settings) as sampler:
        assert sum(map(len, sampler.sample(num_timesteps=20))) > 10
        assert sampler.totals.env_rebuilds == 1
        assert sampler.totals.env_failures == 1


def test_the_port_of_a_failed_env_of_several_agents_is_free_for_the_next() -> None:
    config = {"name": "agents", "fails_at": "step", "cycle": False}
    with multi_runner(ListensTogether, env_config=config, env_restart_attempts=1) as sampler:
        sampler.sample(num_timesteps=20)
        assert sampler.totals.env_failures == 1


@pytest.mark.parametrize("cycle", [False, True], ids=["plain", "cycle"])
@pytest.mark.parametrize("kind", ["inline", "sync", pytest.param("process", marks=pytest.mark.thorough)])
def test_the_port_of_a_half_built_env_is_free_for_the_next(kind: str, cycle: bool) -> None:
    env, settings = KINDS[kind]
    config = {"name": f"{kind}-half-{cycle}", "fails_at": "construction", "cycle": cycle}
    with runner(env, env_config=config, env_restart_attempts=2, **settings) as sampler:
        sampler.sample(num_timesteps=20)
        assert sampler.totals.env_failures == 2


@pytest.mark.parametrize("kind", ["inline", "sync", pytest.param("process", marks=pytest.mark.thorough)])
@pytest.mark.parametrize("error", ERRORS_WITH_AN_ENV)
def test_an_error_that_holds_its_env_does_not_keep_the_port(kind: str, error: str) -> None:
    env, settings = KINDS[kind]
    config = {"name": f"{kind}-{error}", "fails_at": error, "cycle": False}
    with runner(env, env_config=config, env_restart_attempts=1, **settings) as sampler:
        sampler.sample(num_timesteps=20)
        assert sampler.totals.env_failures == 1


def test_an_error_that_is_let_go_keeps_its_plain_data() -> None:
    error = LostError(object())
    error.args, error.code = ("lost", 3, ("a", 2.5), object()), {"line": 7}  # type: ignore[attr-defined]
    let_go(error)
    assert error.args == ("lost", 3, ("a", 2.5), "<object>")
    assert vars(error) == {"code": {"line": 7}}


def test_an_env_is_freed_though_callbacks_and_logs_keep_its_error(caplog: pytest.LogCaptureFixture) -> None:
    kept: list[Failure] = []
    config = {"name": "kept", "fails_at": "step", "cycle": False}
    with runner(make, env_config=config, env_restart_attempts=1) as sampler:
        envs = sampler._sampler.envs

        def keep(lane: Lane, failure: Failure) -> None:
            kept.append(failure)

        envs.on_failure = keep
        with caplog.at_level(logging.ERROR):
            sampler.sample(num_timesteps=20)
    assert len(kept) == 1
    assert any(record.exc_info for record in caplog.records)


def test_errors_that_name_each_other_as_causes_are_let_go() -> None:
    first, second = RuntimeError(), RuntimeError()
    first.__cause__, second.__cause__ = second, first
    let_go(first)
