"""PPO: its bootstrap values, the steps that it leaves out, learning, and resuming to the bit."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from headrace.learner_stub.checkpoints.checkpoint import Checkpoint, load_checkpoint, save_checkpoint
from headrace.learner_stub.reference.ppo import PPO
from headrace.learner_stub.reference.training import staleness
from headrace.learner_stub.rollouts.minibatches import minibatches_for
from headrace.learner_stub.rollouts.module import TrainableModule, build_module
from headrace.learner_stub.rollouts.rollout import join
from headrace.schemas.chunks.batch import ChunkBatch
from headrace.schemas.chunks.chunk import EXPLORE, RANDOM_ACTIONS, ChunkEnd
from headrace.schemas.chunks.spaces import Box, Dict, Discrete, Spaces, Tuple
from headrace.schemas.errors import ConfigError, ModuleError
from headrace.schemas.settings.config import LearnerSection, ModuleSection

NewModule = Callable[[], TrainableModule]
MakeBatch = Callable[..., ChunkBatch]

ONGOING, TERMINATED, TRUNCATED, ABORTED = ChunkEnd
SETTINGS = LearnerSection(steps_per_update=64, epochs=3, minibatch_size=16)


class ConstantValue(nn.Module):
    """Values every observation at 10 and finds all actions alike."""

    def __init__(self, values_shape: tuple[int, ...] = ()) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(1))
        self.values_shape = values_shape

    def forward_train(self, batch: dict[str, Any]) -> dict[str, Tensor]:
        rows = len(batch["obs"])
        values = torch.full((rows, *self.values_shape), 10.0) + self.bias
        return {"action_dist_inputs": self.bias.expand(rows, 1), "values": values}

    def logp(self, dist_inputs: Tensor, actions: Any) -> Tensor:
        return dist_inputs[:, 0] - float(np.log(3))

    def entropy(self, dist_inputs: Tensor) -> Tensor:
        return dist_inputs[:, 0]


def _batches(make_batch: MakeBatch, count: int) -> list[ChunkBatch]:
    return [make_batch([20, 5, 39], [TERMINATED, TRUNCATED, ONGOING], seed=seed) for seed in range(count)]


def test_a_chunk_bootstraps_from_its_last_observation_unless_terminated(make_batch: MakeBatch) -> None:
    batch = make_batch([2, 3, 4, 0], [TERMINATED, TRUNCATED, ONGOING, ABORTED])
    batch.columns["rewards"][:] = 0.0
    ppo = PPO(ConstantValue(), LearnerSection(gamma=1.0, gae_lambda=1.0))
    rollout = join([batch])
    assert rollout is not None
    assert (
        ppo._targets(rollout, minibatches_for(ppo.module, rollout)).returns.tolist()
        == [0.0] * 2 + [10.0] * 3 + [10.0] * 4
    )


def test_each_step_is_matched_with_the_observation_it_was_taken_from(make_batch: MakeBatch) -> None:
    first = make_batch([2, 0, 1], [ONGOING, ABORTED, TERMINATED], seed=1)
    second = make_batch([3], [TRUNCATED], seed=2)
    rollout = join([first, second])
    assert rollout is not None
    chunks = [chunk for batch in (first, second) for chunk in batch if len(chunk)]
    seen, last = rollout.obs.numpy()[rollout.episodes.step_rows], rollout.obs.numpy()[rollout.episodes.last_rows]
    np.testing.assert_array_equal(seen, np.concatenate([chunk.obs[:-1] for chunk in chunks]))
    np.testing.assert_array_equal(last, np.stack([chunk.obs[-1] for chunk in chunks]))
    np.testing.assert_array_equal(rollout.actions.numpy(), np.concatenate([chunk.actions for chunk in chunks]))
    assert rollout.episodes.terminated.tolist() == [False, True, False]


def test_random_actions_are_not_trained_on_but_counted(make_batch: MakeBatch, new_module: NewModule) -> None:
    random = make_batch([8], [TERMINATED], flags=EXPLORE | RANDOM_ACTIONS)
    del random.arrays["logp"]
    ppo = PPO(new_module(), SETTINGS)
    before = {name: tensor.clone() for name, tensor in ppo.module.state_dict().items()}
    metrics = ppo.update([random])
    assert (metrics["steps"], metrics["episodes"]) == (8, 1)
    assert "kl" not in metrics
    assert all(torch.equal(before[name], tensor) for name, tensor in ppo.module.state_dict().items())
    mixed = join([random, make_batch([4], [ONGOING])])
    assert mixed is not None
    assert len(mixed) == 4


def test_steps_without_logp_are_refused_with_advice(make_batch: MakeBatch) -> None:
    batch = make_batch([4], [ONGOING])
    del batch.arrays["logp"]
    with pytest.raises(ModuleError, match=r"no column 'logp'.*sample with explore = true"):
        join([batch])


def test_nested_spaces_reach_the_module_as_they_are_nested(make_batch: MakeBatch) -> None:
    observation = Dict(spaces={"near": Box(shape=(3,), dtype="<f4"), "which": Discrete(n=4)})
    action = Tuple(spaces=(Discrete(n=3), Box(shape=(2,), dtype="<f4")))
    plain = make_batch([6, 3], [TERMINATED, ONGOING])
    columns = dict(plain.arrays)
    columns |= {"obs/near": columns.pop("obs"), "obs/which": np.arange(11) % 4}
    columns |= {"actions/0": columns.pop("actions"), "actions/1": np.ones((9, 2), np.float32)}
    batch = replace(plain, arrays=columns, observation_space=observation, action_space=action)
    module = build_module(ModuleSection(), Spaces(observation=observation, action=action))
    metrics = PPO(module, SETTINGS).update([batch])
    assert metrics["kl"] >= 0.0
    assert metrics["steps"] == 9


def test_ppo_learns_to_guess(guessing: Any, new_module: NewModule) -> None:
    ppo = PPO(new_module(), LearnerSection(learning_rate=0.01, gamma=1.0))
    first = ppo.update([guessing.batch(ppo.module, 256)])["mean_return"]
    for _ in range(15):
        metrics = ppo.update([guessing.batch(ppo.module, 256)])
    assert first < 0.6
    assert metrics["mean_return"] > 0.95
    assert metrics["entropy"] < 0.5


def test_the_ratio_is_taken_against_the_stored_log_probs(make_batch: MakeBatch) -> None:
    batch = make_batch([64], [ONGOING])
    batch.arrays["logp"] -= 1.0  # the sampler found every action e times less likely than the module does
    metrics = PPO(ConstantValue(), LearnerSection(epochs=1)).update([batch])
    assert metrics["behaviour_kl"] == pytest.approx(-1.0, abs=1e-5)
    assert metrics["clip_fraction"] == 1.0


def test_an_update_stops_early_once_the_policy_has_moved_far(make_batch: MakeBatch, new_module: NewModule) -> None:
    far = LearnerSection(learning_rate=0.1, epochs=50, target_kl=0.01)
    metrics = PPO(new_module(), far).update(_batches(make_batch, 2))
    assert metrics["epochs"] < 50
    assert metrics["kl"] > 0.01


def test_counters_and_mean_return_come_from_finished_episodes(make_batch: MakeBatch, new_module: NewModule) -> None:
    batch = make_batch([4, 4, 4, 0], [ONGOING, TERMINATED, TRUNCATED, ABORTED])
    metrics = PPO(new_module(), SETTINGS).update([batch])
    assert (metrics["update"], metrics["steps"], metrics["episodes"]) == (1, 12, 2)
    assert metrics["mean_return"] == 1.5  # of returns 1 and 2


def test_staleness_counts_versions_of_this_learner_only(make_batch: MakeBatch) -> None:
    mine = [make_batch([2], [ONGOING], learner_epoch=3, weights_seq=seq) for seq in (5, 7)]
    earlier = make_batch([2], [ONGOING], learner_epoch=2, weights_seq=90)
    *mine, earlier = (replace(batch, newest=(3, 8)) for batch in (*mine, earlier))
    assert staleness([*mine, earlier]) == {"staleness": 2.0, "staleness_max": 3.0}
    assert staleness([earlier]) == {}


def test_two_learners_with_the_same_batches_agree_to_the_bit(make_batch: MakeBatch, new_module: NewModule) -> None:
    one, other = PPO(new_module(), SETTINGS), PPO(new_module(), SETTINGS)
    for batch in _batches(make_batch, 3):
        torch.rand(5)  # the global generator plays no part
        assert one.update([batch]) == other.update([batch])
    _assert_same(one, other)


def _with_dropout(module: Any) -> Any:
    """Let training draw from torch's own generator."""
    forward = module.forward_train
    module.forward_train = lambda batch: forward(batch | {"obs": nn.functional.dropout(batch["obs"], 0.2)})
    return module


@pytest.mark.parametrize("draws", [False, True])
def test_resuming_from_the_file_continues_to_the_bit(
    make_batch: MakeBatch, new_module: NewModule, tmp_path: Path, *, draws: bool
) -> None:
    def new_ppo() -> PPO:
        return PPO(_with_dropout(new_module()) if draws else new_module(), SETTINGS)

    batches = _batches(make_batch, 6)
    straight = new_ppo()
    expected = [straight.update([batch]) for batch in batches]
    first = new_ppo()
    seen = [first.update([batch]) for batch in batches[:2]]
    save_checkpoint(tmp_path / "c", Checkpoint(1, [], *first.get_state()))
    saved = load_checkpoint(tmp_path / "c")
    assert saved is not None
    resumed = new_ppo()
    torch.manual_seed(7)  # as another life of the learner would begin
    resumed.set_state(saved.state, saved.arrays)
    seen += [resumed.update([batch]) for batch in batches[2:]]
    assert seen == expected
    _assert_same(resumed, straight)


def _assert_same(one: PPO, other: PPO) -> None:
    state, arrays = one.get_state()
    other_state, other_arrays = other.get_state()
    assert state == other_state
    assert arrays.keys() == other_arrays.keys()
    for name, array in arrays.items():
        np.testing.assert_array_equal(array, other_arrays[name], err_msg=name)


def test_values_of_the_wrong_shape_are_refused(make_batch: MakeBatch) -> None:
    with pytest.raises(ModuleError, match=r"values of shape \(65, 1\) for 65 observations"):
        PPO(ConstantValue((1,)), SETTINGS).update([make_batch([64], [ONGOING])])


def test_a_module_that_cannot_be_built_raises_an_error_with_the_reason(spaces: Spaces) -> None:
    with pytest.raises(ConfigError, match=r"module\.build: 'nowhere' is not of the form"):
        build_module(ModuleSection(build="nowhere"), spaces)
    with pytest.raises(ModuleError, match=r"could not be built \(TypeError: .*'colour'"):
        build_module(ModuleSection(config={"colour": "red"}), spaces)
    with pytest.raises(ModuleError, match="returned a dict; it must be a torch"):
        build_module(ModuleSection(build="builtins:dict", config={}), Dict(spaces={}))  # type: ignore[arg-type]
    with pytest.raises(ModuleError, match="has no forward_train, logp, entropy"):
        build_module(ModuleSection(build="torch.nn:Identity"), spaces)
    with (
        torch.device("meta"),
        pytest.raises(ModuleError, match="is on meta, and the reference learner trains on the CPU"),
    ):
        build_module(ModuleSection(), spaces)
