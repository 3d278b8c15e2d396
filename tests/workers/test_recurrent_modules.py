"""The state of a recurrent module: from episode start, over polls and cuts, into chunks, and back in the learner."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch

from headrace.learner_stub import with_own_logp
from headrace.schemas.accounts.ledger import Discard
from headrace.schemas.chunks.batch import ChunkBatch
from headrace.schemas.chunks.chunk import ChunkEnd
from headrace.schemas.chunks.spaces import Box, Discrete, Spaces
from headrace.schemas.errors import ModuleError
from headrace.workers.connectors import PreviousActionReward
from headrace.workers.modules import LstmActorCritic, RecurrentModule, lstm_actor_critic, sequences
from headrace.workers.policy.acting import BlockActor
from support.envs.toy import Counting, Faulty, Walk, check_books, runner
from support.envs.toy_agents import multi_runner
from support.runners.recurrent import LSTM, Ages, WithoutState, over_the_wire


class WrongShape(Ages):
    def forward_exploration(self, batch: dict[str, Any]) -> dict[str, Any]:
        return {**super().forward_exploration(batch), "state_out": {"age": torch.zeros(3)}}


@pytest.mark.parametrize("polls", [1, 3, 8])
def test_state_begins_with_the_episode_and_goes_on_over_cuts(polls: int) -> None:
    with runner(num_envs=3, env_config={"lengths": {0: 1, 1: 4, 2: 50}}, module=Ages) as sampler:
        for _ in range(5):
            for chunk in sampler.sample(num_timesteps=3 * polls):
                np.testing.assert_array_equal(chunk.columns["age"], 100 + chunk.t_start + np.arange(len(chunk)))
                assert chunk.state_in["age"] == 100 + chunk.t_start
                assert chunk.state_in["pair"].tolist() == [chunk.t_start / 2] * 2


def test_whole_episodes_carry_the_state_they_began_with() -> None:
    settings: dict[str, Any] = {"batch_mode": "complete_episodes", "rollout_fragment_length": 2, "module": Ages}
    with runner(num_envs=2, env_config={"lengths": {0: 3, 1: 7}}, **settings) as sampler:
        for _ in range(3):
            assert {int(chunk.state_in["age"]) for chunk in sampler.sample_fragment()} == {100}


def test_a_failed_env_restarts_its_state_and_other_envs_keep_theirs() -> None:
    def diverge(answer: Any) -> Any:
        raise RuntimeError("diverged")

    config = {"fault": diverge, "faulty": {1}, "every": 5, "steps": {}}
    with runner(Faulty, num_envs=3, env_config=config, module=Ages, rollout_fragment_length=4) as sampler:
        for _ in range(8):
            for chunk in sampler.sample_fragment():
                if chunk.end is not ChunkEnd.ABORTED:
                    assert chunk.state_in["age"] == 100 + chunk.t_start
                    np.testing.assert_array_equal(chunk.columns["age"], 100 + chunk.t_start + np.arange(len(chunk)))
        check_books(sampler)


def test_random_actions_leave_the_state_unchanged_and_record_none() -> None:
    with runner(env_config={"length": 50}, module=Ages) as sampler:
        assert sampler.sample(num_timesteps=3, random_actions=True)[0].state_in == {}
        (chunk,) = sampler.sample(num_timesteps=3)
        assert (chunk.t_start, int(chunk.state_in["age"])) == (3, 100)


class Learnt(Ages):
    """Begins each episode with a state that is learnt: `weight`."""

    def initial_state(self) -> dict[str, torch.Tensor]:
        return {"h": self.weight}

    def forward_exploration(self, batch: dict[str, Any]) -> dict[str, Any]:
        state = batch["state_in"]
        return {"actions": torch.zeros(len(state["h"]), dtype=torch.int64), "h": state["h"][:, 0], "state_out": state}

    forward_inference = forward_train = forward_exploration


def test_episodes_begin_with_the_initial_state_of_the_weights_that_act_first() -> None:
    with (
        runner(num_envs=3, env_config={"lengths": {0: 2, 1: 5, 2: 50}}, module=Learnt) as alone,
        multi_runner(num_envs=2, env_config={"lengths": [2, 3]}, module=Learnt) as several,
    ):
        for sampler, module_id in ((alone, None), (several, "shared")):
            began: set[int] = set()
            versions = {}
            for seq in range(1, 9):
                weights: dict[str, Any] = {"weight": np.full(1, seq, np.float32)}
                sampler.set_weights(weights if module_id is None else {module_id: weights}, seq)
                for chunk in sampler.sample(num_timesteps=3):
                    first = versions.setdefault((chunk.episode_id, chunk.agent_id), int(chunk.weights_seq[0]))
                    began.add(first)
                    assert chunk.state_in["h"].tolist() == [first]
                    assert set(chunk.columns["h"].tolist()) == {first}
            assert len(began) > 4


def test_lanes_that_pass_in_blocks_begin_with_the_initial_state_of_the_newest_weights() -> None:
    module, columns = Learnt(), {"obs": np.zeros((4, 2), np.float32)}
    spaces = Spaces(observation=Box(shape=(2,), dtype="<f4"), action=Discrete(n=2))
    actor = BlockActor(module, spaces, columns, lambda: 0, [np.array([0, 1]), np.array([2, 3])])
    assert actor.memory is not None
    noise = np.zeros((4, 1), np.float32)
    actor.memory.reset([0, 1, 2, 3])
    given = actor.memory.of(3)
    actor(noise, np.array([0, 1]))
    module.load_state_dict({"weight": torch.tensor([7.0])})
    answer = actor(noise, np.array([2, 3]))
    assert answer["h"][2:].tolist() == [7.0, 7.0]
    assert given["h"].tolist() == [7.0]
    assert actor.memory.rows["h"][:, 0].tolist() == [0.0, 0.0, 7.0, 7.0]


def test_an_initial_state_that_changes_its_shape_is_refused() -> None:
    class Grows(Learnt):
        def initial_state(self) -> dict[str, torch.Tensor]:
            return {"h": torch.zeros(1 + int(self.weight))}

    with runner(module=Grows) as sampler:
        sampler.set_weights({"weight": np.ones(1, np.float32)}, 1)
        with pytest.raises(ModuleError, match="Grows has other shapes than before"):
            sampler.sample(num_timesteps=1)


def test_state_columns_have_no_row_for_end_markers_and_go_through_the_codec() -> None:
    with runner(num_envs=2, env_config={"lengths": {0: 2, 1: 50}}, module=Ages) as sampler:
        sampler.sample(num_timesteps=2)
        batch = sampler.sample(num_timesteps=6, force_reset=True, end_markers=True)
        assert isinstance(batch, ChunkBatch)
    assert [len(chunk) for chunk in batch][-2:] == [0, 0]
    decoded = over_the_wire(batch)
    assert len(decoded.arrays["state_in/age"]) == len(batch) - 2
    by_key = {(c.episode_id, c.chunk_index): c for c in decoded}
    for chunk in batch:
        other = by_key[chunk.episode_id, chunk.chunk_index]
        assert chunk.state_in.keys() == other.state_in.keys()
        assert all(np.array_equal(chunk.state_in[name], other.state_in[name]) for name in chunk.state_in)


def test_a_state_in_bfloat16_is_kept_as_float32() -> None:
    class Brief(Ages):
        def initial_state(self) -> dict[str, torch.Tensor]:
            return {name: state.bfloat16() for name, state in super().initial_state().items()}

        def forward_exploration(self, batch: dict[str, Any]) -> dict[str, Any]:
            answer = super().forward_exploration(batch)
            return {**answer, "state_out": {name: state.bfloat16() for name, state in answer["state_out"].items()}}

    with runner(env_config={"length": 50}, module=Brief) as sampler:
        sampler.sample(num_timesteps=3)
        (chunk,) = sampler.sample(num_timesteps=2)
    assert chunk.state_in["age"].dtype == np.float32
    assert chunk.state_in["age"] == 103


@pytest.mark.parametrize(
    ("module", "match"),
    [
        (WithoutState, "initial_state of WithoutState must give a dict of tensors"),
        (WrongShape, "'state_out' should have the shape"),
    ],
)
def test_a_module_that_breaks_the_protocol_raises_module_error(module: Any, match: str) -> None:
    with pytest.raises(ModuleError, match=match), runner(module=module) as sampler:
        sampler.sample(num_timesteps=1)


def test_make_module_resets_the_recurrent_state() -> None:
    with runner(env_config={"length": 50}, module=Ages) as sampler:
        sampler.sample(num_timesteps=3)
        sampler.make_module()
        assert [int(chunk.state_in["age"]) for chunk in sampler.sample(num_timesteps=2)] == [100]


# -- the default recurrent module --------------------------------------------------------------------------------------


class Vector(Walk):
    """A walk whose action has a choice and a Box, observed in a Dict."""

    action_space = gym.spaces.Tuple((gym.spaces.Discrete(3), gym.spaces.Box(-1.0, 1.0, (2,), np.float32)))

    def step(self, action: Any) -> Any:
        return super().step(action[0])


@pytest.mark.parametrize("env", [Walk, Vector])
@pytest.mark.parametrize("explore", [True, False])
def test_a_learner_recomputes_the_stored_log_probabilities_from_chunks(env: Any, explore: bool) -> None:
    settings: dict[str, Any] = {"module_config": {"hidden": (16,), "cell_size": 8, "seed": 3}, "explore": explore}
    with runner(env, num_envs=5, env_config={}, module=LSTM, env_to_module=[PreviousActionReward], **settings) as s:
        spaces, weights = s.spaces, {name: torch.from_numpy(a) for name, a in s.get_state()["rl_module"].items()}
        batches = [over_the_wire(s.sample_fragment()) for _ in range(4)]
    learner = lstm_actor_critic(spaces, hidden=(16,), cell_size=8)
    learner.load_state_dict(weights)
    assert any(chunk.t_start and chunk.state_in["h"].any() for batch in batches for chunk in batch)
    for batch in batches:
        train = sequences(batch)
        answer = learner.forward_train(train)
        steps = train["step_rows"]
        actions = torch.from_numpy(batch.columns["actions"].copy()) if env is Walk else tuple(
            torch.from_numpy(batch.columns[f"actions/{i}"].copy()) for i in range(2)
        )  # fmt: skip
        logp = learner.logp(answer["action_dist_inputs"][steps], actions)
        np.testing.assert_allclose(logp.detach().numpy(), batch.columns["logp"], atol=1e-5)
        np.testing.assert_allclose(answer["values"][steps].detach().numpy(), batch.columns["values"], atol=1e-5)
        logp.sum().backward()
        assert all(p.grad is not None for p in learner.lstm.parameters())


def test_with_an_lstm_envs_beside_a_failing_env_give_bit_identical_chunks() -> None:
    def diverge(answer: Any) -> Any:
        raise RuntimeError("diverged")

    def live(faulty: set[int]) -> dict[int, list[Any]]:
        config = {"fault": diverge, "faulty": faulty, "every": 9, "steps": {}}
        lives = defaultdict(list)
        with runner(Faulty, num_envs=4, env_config=config, module=LSTM, env_restart_attempts=100) as sampler:
            for _ in range(4):
                for chunk in sampler.sample_fragment():
                    lives[chunk.env_index].append(chunk)
        return lives

    expected, lives = live(set()), live({2})
    for index in (0, 1, 3):
        for a, b in zip(expected[index], lives[index], strict=True):
            for name in ("logp", "values"):
                assert a.columns[name].tobytes() == b.columns[name].tobytes()
            assert a.state_in["c"].tobytes() == b.state_in["c"].tobytes()


def test_building_an_lstm_neither_uses_nor_changes_global_random_state() -> None:
    with runner(Counting) as sampler:
        spaces = sampler.spaces
    torch.manual_seed(1)
    before = torch.get_rng_state()
    first = lstm_actor_critic(spaces, seed=5)
    assert torch.equal(before, torch.get_rng_state())
    torch.manual_seed(2)
    second = lstm_actor_critic(spaces, seed=5)
    assert isinstance(first, LstmActorCritic)
    assert isinstance(first, RecurrentModule)
    for a, b in zip(first.state_dict().values(), second.state_dict().values(), strict=True):
        assert torch.equal(a, b)


def test_an_lstm_refuses_a_zero_size_and_batches_without_sequences() -> None:
    with runner(Counting) as sampler:
        with pytest.raises(ModuleError, match="cell_size = 0: give positive sizes"):
            lstm_actor_critic(sampler.spaces, cell_size=0)
        with pytest.raises(ModuleError, match="learns from sequences"):
            lstm_actor_critic(sampler.spaces).forward_train({"obs": torch.zeros(3, 2)})
        with pytest.raises(ModuleError, match="without state_in columns"):
            sequences(sampler.sample_fragment())


def test_a_batch_of_end_markers_has_no_sequences_and_a_learner_of_them_gets_no_rows() -> None:
    with runner(Counting, module=LSTM) as sampler:
        sampler.sample_fragment()
        markers = over_the_wire(sampler.discard_open(Discard.SHUTDOWN))
        module: Any = lstm_actor_critic(sampler.spaces)
    assert (len(markers) > 0, markers.steps) == (True, 0)
    for batch in (markers, with_own_logp(module, markers)):
        answer = module.forward_train(sequences(batch))
        assert {len(rows) for rows in answer.values()} == {0}
        assert answer["values"].ndim == 1
