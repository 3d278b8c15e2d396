"""`sys.exit()` and errors that are no `Exception`: each fails under the name of the user's code that did it."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch

from headrace.deploy.loggers.logger_thread import LoggerThread
from headrace.schemas.errors import CallbackError, ConnectorError, ModuleError
from headrace.workers.connectors import Connector
from headrace.workers.policy.policies import PolicyMappingError
from support.envs.fleet import Panic
from support.envs.toy import Faulty, check_books, runner, with_fault
from support.envs.toy_agents import multi_runner


class Unreadable(Exception):
    """An error whose text cannot be read."""

    def __str__(self) -> str:
        return None  # type: ignore[return-value]


ENDINGS = pytest.mark.parametrize(
    ("error", "words"),
    [
        (SystemExit(3), r"it called sys\.exit\(3\) instead of raising an exception"),
        (SystemExit(), r"it called sys\.exit\(None\) instead of raising an exception"),
        (Panic("in C"), "Panic: in C"),
        (Unreadable(), "Unreadable, whose message cannot be read: TypeError"),
    ],
)


class Ends:
    """User code of every kind: each call of it raises."""

    def __init__(self, error: BaseException) -> None:
        self._error = error

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        raise self._error


class Policy(torch.nn.Module):
    """A policy that ends in each call."""

    noise_size = 1
    noise_kind = "uniform"

    def __init__(self, ends: Ends) -> None:
        super().__init__()
        self.forward_exploration = self.forward_inference = self.forward_train = ends


class Ending(Connector):
    """A connector that ends when it processes rows."""

    def __init__(self, ends: Ends) -> None:
        self._ends = ends

    def connect(self, spaces: Any, width: int) -> Any:
        return spaces

    def process(self, rows: Any) -> Any:
        return self._ends(rows)


@ENDINGS
def test_a_policy_that_ends_is_named(error: BaseException, words: str) -> None:
    with runner(module=lambda spaces: Policy(Ends(error)), num_envs=2) as sampler:
        with pytest.raises(ModuleError, match=f"the policy Policy failed while acting: {words}"):
            sampler.sample(num_timesteps=8)
        check_books(sampler)


@ENDINGS
def test_a_module_that_cannot_be_built_is_named(error: BaseException, words: str) -> None:
    with pytest.raises(ModuleError, match=rf"module .* could not be built \({words}\)"):
        runner(module=Ends(error))


@ENDINGS
def test_a_callback_that_ends_is_named(error: BaseException, words: str) -> None:
    with runner(callbacks=[{"on_sample_end": Ends(error)}]) as sampler:
        with pytest.raises(CallbackError, match=rf"failed in on_sample_end \({words}\)"):
            sampler.sample(num_timesteps=8)
        check_books(sampler)


@ENDINGS
def test_a_callback_that_ends_costs_its_episode(
    error: BaseException, words: str, caplog: pytest.LogCaptureFixture
) -> None:
    left = [error]

    def end_once(**_: Any) -> None:
        if left:
            raise left.pop()

    with runner(callbacks=[{"on_episode_step": end_once}], num_envs=2) as sampler:
        assert len(sampler.sample(num_timesteps=20)) > 0
        assert set(sampler.totals.discarded) == {"callback_exception"}
        check_books(sampler)
    assert "end_once failed in on_episode_step" in caplog.text


@ENDINGS
def test_a_connector_that_ends_is_named(error: BaseException, words: str) -> None:
    with runner(env_to_module=[lambda: Ending(Ends(error))]) as sampler:
        with pytest.raises(ConnectorError, match=rf"\(Ending\) failed: {words}"):
            sampler.sample(num_timesteps=8)
        check_books(sampler)


@ENDINGS
def test_a_mapping_that_ends_is_named(error: BaseException, words: str) -> None:
    with (
        multi_runner(policy_mapping_fn=Ends(error)) as sampler,
        pytest.raises(PolicyMappingError, match=rf"could not be mapped \({words}\)"),
    ):
        sampler.sample(num_timesteps=8)


class Answer:
    """A value of an env that ends when it is read."""

    def __init__(self, error: BaseException) -> None:
        self._error = error

    def _end(self, *_: Any, **__: Any) -> Any:
        raise self._error

    __array__ = __bool__ = __iter__ = __float__ = _end


@ENDINGS
@pytest.mark.parametrize("place", [0, 1, 2, 3, 4, "whole", "in an info"])
def test_an_answer_of_an_env_that_ends_when_it_is_read_costs_that_env_only(
    place: Any, error: BaseException, words: str
) -> None:
    value = Answer(error)

    def spoil(answer: Any) -> Any:
        if place == "whole":
            return value
        spoilt = list(answer)
        spoilt[4 if place == "in an info" else place] = {"x": value} if place == "in an info" else value
        return tuple(spoilt)

    with runner(Faulty, num_envs=3, env_config=with_fault(spoil, faulty={1}, every=6), infos="all") as sampler:
        sampler.sample(num_timesteps=60)
        assert (sampler.totals.env_failures > 0) == (place != "in an info"), (
            "such an info is left out, and costs no step"
        )
        assert set(sampler.totals.discarded) <= {"env_bad_data", "env_exception"}
        check_books(sampler)


@ENDINGS
def test_a_logger_that_ends_is_switched_off_and_named(
    error: BaseException, words: str, caplog: pytest.LogCaptureFixture
) -> None:
    class Logger:
        def log(self, row: Any, step: int) -> None:
            raise error

        def close(self) -> None: ...

    thread = LoggerThread("mine", Logger())
    with caplog.at_level(logging.ERROR):
        thread.offer({}, 1)
        thread._thread.join(60.0)
    assert "logger mine failed and is switched off" in caplog.text


def test_an_error_of_an_env_whose_text_cannot_be_read_fails_that_env_alone(caplog: pytest.LogCaptureFixture) -> None:
    config = with_fault(Ends(Unreadable()), faulty={1}, every=6)
    with runner(Faulty, num_envs=3, env_config=config) as sampler:
        sampler.sample(num_timesteps=60)
        check_books(sampler)
        assert sampler.totals.env_failures == sampler.totals.env_rebuilds > 0
    assert "env 1 failed at " in caplog.text
    assert "(Unreadable: (its message cannot be read: TypeError))" in caplog.text
