"""A restored multi-agent runner continues as the saved runner would have, also with agents that appear later."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np
import pytest

from headrace.schemas.errors import StateError
from headrace.workers.policy.noise import RowNoise
from headrace.workers.randomness.seeds import SeatStreams
from support.envs.toy_agents import Schedule, Together, check_books, multi_runner, scheduled
from support.runners.comparing import contents, equal_states, through_arrays
from support.runners.recurrent import REMEMBERING

POLICIES = pytest.mark.parametrize(
    "policies",
    [
        {"policies": ["shared"]},
        {"policies": ["a0", "a1", "a2", "a3"]},
        # Who plays an agent is another in each episode, so that modules meet agents late.
        {"policies": ["m", "n"], "policy_mapping_fn": lambda a, e: "mn"[(int(a[1:]) + int(e[-4:], 16)) % 3 == 0]},
    ],
)


@pytest.mark.one_in(2)
@POLICIES
@pytest.mark.parametrize("random_actions", [True, False])
def test_a_restored_runner_samples_the_same_whole_episodes(policies: Any, random_actions: bool) -> None:
    def runner(**settings: Any) -> Any:
        return multi_runner(scheduled([], agents=4), num_envs=3, run_uid="r", **policies, **settings)

    with runner() as first, runner() as second:
        first.sample(num_episodes=2, random_actions=random_actions)
        second.set_state(through_arrays(first.get_state()))
        assert equal_states(first.get_state(), second.get_state())
        for _ in range(25):  # beyond a block of numbers
            ours, theirs = (s.sample(num_episodes=3, random_actions=random_actions) for s in (first, second))
            assert contents(ours) == contents(theirs)
        assert equal_states(first.get_state(), second.get_state())
        check_books(second)


def test_a_restored_runner_continues_connectors_and_memory() -> None:
    """Both runners load the state, by force since its weights are not newer: means by seat become one shared mean.

    What a seat has seen and not told yet counts beside any state, so the first tells it before.
    """

    def runner() -> Any:
        return multi_runner(scheduled([], agents=3), num_envs=2, **REMEMBERING)

    with runner() as first, runner() as second:
        first.sample(num_episodes=2)
        first.take_connector_update()
        state = through_arrays(first.get_state())
        for sampler in (first, second):
            sampler.set_state(state, force=True)
        for _ in range(5):
            assert contents(first.sample(num_episodes=2)) == contents(second.sample(num_episodes=2))
        assert equal_states(first.get_state(), second.get_state())


def test_another_incarnation_continues_the_random_streams_of_the_first() -> None:
    """This holds with another seed, and with agents that neither runner has met before."""
    late = False

    class Late(Schedule):
        """All but a0 come only once it is `late`."""

        def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
            self.possible_agents = [f"a{i}" for i in range(4)] if late else ["a0"]
            observations, infos = super().reset(seed=seed)
            return observations or {"a0": self._see("a0")}, infos

    def runner(**settings: Any) -> Any:
        return multi_runner(lambda c: Late(c.vector_index, [], 4, 0.0), num_envs=2, **settings)

    with runner(seed=None) as first, runner(seed=3, incarnation=5) as second:
        first.sample(num_episodes=4)
        second.sample(num_episodes=4)
        second.set_state(first.get_state(), force=True)
        late = True
        for _ in range(5):
            ours, theirs = first.sample(num_episodes=2), second.sample(num_episodes=2)
            assert len({c.agent_id for c in ours}) > 1
            drawn = [sorted((c.seed, c.actions.tobytes()) for c in chunks) for chunks in (ours, theirs)]
            assert drawn[0] == drawn[1]


def test_a_restore_restarts_the_streams_of_seats_that_the_state_lacks() -> None:
    plays = ["x"]

    def runner() -> Any:
        return multi_runner(
            env_config={"lengths": [4, 4]}, policies=["x", "y"], policy_mapping_fn=lambda a, _: plays[-1]
        )

    with runner() as first, runner() as second:
        first.sample(num_episodes=1)
        plays.append("y")
        second.sample(num_episodes=40)
        second.set_state(first.get_state())
        for module_id in ("y", "x", "y"):
            plays.append(module_id)
            assert [c.actions.tolist() for c in first.sample(num_episodes=20)] == [
                c.actions.tolist() for c in second.sample(num_episodes=20)
            ]


def test_a_restored_runner_continues_after_make_env_and_make_module() -> None:
    with multi_runner(num_envs=2) as first, multi_runner(num_envs=2) as second:
        first.sample(num_episodes=9)
        first.make_module()
        first.make_env()
        second.set_state(through_arrays(first.get_state()), force=True)
        assert contents(first.sample(num_episodes=9)) == contents(second.sample(num_episodes=9))


class Wide(Together):
    """Actions of another size."""

    def __init__(self, config: Any = None) -> None:
        super().__init__(config)
        self.action_spaces = dict.fromkeys(self.possible_agents, gym.spaces.MultiDiscrete([3, 3]))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"num_envs": 3}, r"random_streams/lanes/ahead should be int64 \(3,\), got int64 \(2,\)"),
        ({"policies": ["other"]}, r"is of the modules \['shared'\]; this runner has \['other'\]"),
        ({"env_config": {"lengths": [5]}}, r"seats/keys should be from 0 to below .* the state is of another env"),
        (
            {"env": Wide},
            r"seats/shared/random_actions/numbers should be float32 \(4, 64, 2\), got float32 \(4, 64, 1\)",
        ),
    ],
)
def test_random_streams_that_do_not_fit_are_refused_and_change_nothing(settings: dict[str, Any], message: str) -> None:
    with multi_runner(num_envs=2) as first, multi_runner(**{"num_envs": 2, **settings}) as second:
        first.sample(num_timesteps=2)
        before = second.get_state()
        with pytest.raises(StateError, match=message):
            second.set_state(first.get_state(not_components="rl_module"))
        assert equal_states(second.get_state(), before)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda seats: seats.update(incarnation="x"), "incarnation should be a whole number, got 'x'"),
        (
            lambda seats: seats["modules"]["shared"]["policy"]["used"].fill(64),
            "policy/used should be from 0 to below 64",
        ),
        (lambda seats: seats["modules"]["shared"].pop("policy"), "policy/numbers should be float32"),
        (lambda seats: seats["modules"].update(shared=3), "agents should be int64"),
        (lambda seats: seats.pop("entropy"), "seats/entropy should be uint8"),
        (lambda seats: seats.pop("modules"), "is of the modules None"),
    ],
)
def test_a_state_that_was_tampered_with_is_refused(change: Any, message: str) -> None:
    with multi_runner() as sampler:
        sampler.sample(num_timesteps=3)
        state = sampler.get_state()
        change(state["random_streams"]["seats"])
        with pytest.raises(StateError, match=message):
            sampler.set_state(state)
        check_books(sampler)


def test_a_runner_without_an_env_has_no_streams_and_random_streams_can_be_left_out() -> None:
    with multi_runner() as sampler:
        assert "random_streams" not in sampler.get_state(not_components="random_streams")
    with multi_runner(None) as sampler:
        assert "random_streams" not in sampler.get_state()


def test_numbers_of_a_seat_do_not_depend_on_when_it_was_restored() -> None:
    """A restored row draws the same numbers, however much of its block was used when it was read."""
    rows = np.arange(3)

    def noise() -> RowNoise:
        streams = SeatStreams(9, 0, 0)
        made = RowNoise(2, "normal")
        made.add(streams.of("policy", 0, 0, agent) for agent in range(3))
        return made

    for used in (0, 1, 63, 64, 100):
        one, other = noise(), noise()
        for _ in range(used):
            one.next(np.array([1]))
        drawn = one.read()
        other.write(rows, drawn["numbers"], drawn["used"])
        for poll in range(64 - used % 64):
            acting = np.array([poll % 3])
            np.testing.assert_array_equal(one.next(acting), other.next(acting))
