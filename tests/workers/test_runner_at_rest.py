"""Calls that a callback may make on its own runner, and calls that a stopped runner refuses."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from headrace.schemas.accounts.ledger import Discard
from headrace.schemas.errors import CallbackError, EnvError, HeadraceError
from headrace.workers.runner.env_runner import EnvRunner
from headrace.workers.sampling.poll_loop import SampleSizeError
from support.envs.toy import Counting, runner
from support.envs.toy_agents import Together, multi_runner

Runner = EnvRunner[Any]
both_kinds = pytest.mark.parametrize("make", [runner, multi_runner])

MOVES: dict[str, Callable[[Runner], Any]] = {
    "sample": lambda own: own.sample(num_timesteps=3),
    "episodes": lambda own: own.sample(num_episodes=1),
    "fragment": lambda own: own.sample_fragment(),
    "discard": lambda own: own.discard_open(Discard.RESET),
    "state": lambda own: own.set_state(own.get_state()),
    "env": lambda own: own.make_env(),
    "module": lambda own: own.make_module(),
    "stop": lambda own: own.stop(),
}


def _check_books(sampler: Any) -> None:
    totals = sampler.totals
    assert totals.stepped == totals.open + totals.delivered + sum(totals.discarded.values())


@both_kinds
@pytest.mark.parametrize("event", ["on_episode_created", "on_episode_start", "on_episode_step", "on_episode_end"])
@pytest.mark.parametrize("move", MOVES)
def test_a_runner_refuses_calls_of_a_callback_that_change_it_within_a_step(make: Any, event: str, move: str) -> None:
    errors: list[HeadraceError] = []

    def once(env_runner: Any) -> None:
        if not errors:
            try:
                MOVES[move](env_runner)
            except HeadraceError as error:
                errors.append(error)
                raise

    with make(num_envs=2, callbacks=[{event: once}]) as sampler:
        assert len(sampler.sample(num_timesteps=20)) > 0
        sampler.assert_healthy()
        _check_books(sampler)
        assert not sampler.totals.open
    assert f"cannot be called in {event}, in the midst" in str(errors[0])
    assert "call it in on_sample_end, or after sample()" in str(errors[0])


@both_kinds
@pytest.mark.parametrize("event", ["on_environment_created", "on_weights_applied"])
def test_sampling_in_a_callback_outside_episodes_raises_callback_error(make: Any, event: str) -> None:
    def resample(env_runner: Any) -> None:
        env_runner.sample(num_timesteps=3)

    def build_and_give_weights() -> None:
        with make(callbacks=[{event: resample}]) as sampler:
            sampler.set_weights(sampler.get_state()["rl_module"], seq=1)

    with pytest.raises(CallbackError, match=f"HeadraceError: sample.. cannot be called in {event}"):
        build_and_give_weights()


@both_kinds
@pytest.mark.parametrize("move", ["sample", "fragment", "state", "env", "module"])
def test_on_sample_end_a_callback_may_sample_and_change_its_runner(make: Any, move: str) -> None:
    moved: list[Any] = []

    def once(env_runner: Any) -> None:
        if not moved:
            moved.append(None)
            moved[0] = MOVES[move](env_runner)

    with make(num_envs=2, callbacks=[{"on_sample_end": once}]) as sampler:
        sampler.sample(num_timesteps=7)
        sampler.sample(num_timesteps=7)
        _check_books(sampler)
    assert moved


@both_kinds
def test_within_a_step_a_callback_may_read_its_runner_and_give_it_weights(make: Any) -> None:
    seqs = iter(range(1, 100))

    def look(env_runner: Any) -> None:
        state = env_runner.get_state(components="rl_module")
        env_runner.get_metrics()
        env_runner.set_state({**state, "weights_seq_no": next(seqs)})
        assert [len(view) >= 0 for view in env_runner.running_episodes()]

    with make(callbacks=[{"on_episode_step": look}]) as sampler:
        chunks = sampler.sample(num_timesteps=8)
        assert sampler.weights_version == (0, 8)
        chosen_under = {int(t): int(seq) for c in chunks for t, seq in zip(c.env_t, c.weights_seq, strict=True)}
    assert chosen_under[2] in (2, 7)  # step 2 of the first episode, or of the second, which began at step 5


@both_kinds
def test_a_stopped_runner_refuses_to_sample_until_it_has_envs_again(make: Any) -> None:
    sampler = make(num_envs=2)
    sampler.sample(num_timesteps=4)
    sampler.stop()
    for ask in (MOVES["sample"], MOVES["episodes"], MOVES["fragment"]):
        with pytest.raises(HeadraceError, match="was stopped and has closed its envs; make_env"):
            ask(sampler)
    with pytest.raises(AssertionError):
        sampler.assert_healthy()
    sampler.make_env()
    sampler.assert_healthy()
    with sampler:
        assert sum(map(len, sampler.sample(num_timesteps=4))) >= 4


@pytest.mark.parametrize(("make", "kind"), [(runner, Counting), (multi_runner, Together)])
def test_a_runner_whose_envs_could_not_be_rebuilt_refuses_to_sample(make: Any, kind: Any) -> None:
    broken: list[bool] = []

    def create(context: Any) -> Any:
        if broken:
            raise OSError("no such map")
        return kind(context)

    with make(create) as sampler:
        sampler.sample(num_timesteps=4)
        broken.append(True)
        with pytest.raises(EnvError, match="no such map"):
            sampler.make_env()
        with pytest.raises(HeadraceError, match="was stopped"):
            sampler.sample(num_timesteps=4)
        broken.clear()
        sampler.make_env()
        assert sampler.sample(num_timesteps=4)


@both_kinds
@pytest.mark.parametrize("size", [2.5, "3", float("nan"), True, [4]])
def test_a_size_that_is_no_whole_number_is_refused(make: Any, size: Any) -> None:
    with make() as sampler:
        for name in ("num_timesteps", "num_episodes"):
            with pytest.raises(SampleSizeError, match=f"{name} = .* is no whole number; give an int"):
                sampler.sample(**{name: size})
        assert sum(map(len, sampler.sample(num_timesteps=np.int64(4)))) >= 4
