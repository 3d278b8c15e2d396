"""IMPALA: its targets equal a plain loop, stale data is corrected, it learns, and it resumes to the bit."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from headrace.learner_stub.checkpoints.checkpoint import Checkpoint, load_checkpoint, save_checkpoint
from headrace.learner_stub.reference.impala import Impala
from headrace.learner_stub.rollouts.interruption import NO_INTERRUPTION
from headrace.learner_stub.rollouts.minibatches import minibatches_for
from headrace.learner_stub.rollouts.module import TrainableModule
from headrace.learner_stub.rollouts.rollout import join
from headrace.schemas.chunks.batch import ChunkBatch
from headrace.schemas.chunks.chunk import ChunkEnd
from headrace.schemas.errors import ConfigError
from headrace.schemas.settings.config import LearnerSection
from headrace.schemas.settings.config_loading import build_config

NewModule = Callable[[], TrainableModule]
MakeBatch = Callable[..., ChunkBatch]

ONGOING, TERMINATED, TRUNCATED, ABORTED = ChunkEnd
SETTINGS = LearnerSection(algorithm="impala", minibatch_size=16)


def test_a_pass_trains_towards_what_a_plain_loop_over_the_transitions_gives(
    make_batch: MakeBatch, new_module: NewModule
) -> None:
    batch = make_batch([7, 3, 5, 0], [TERMINATED, TRUNCATED, ONGOING, ABORTED])
    batch.columns["rewards"] *= 5.0  # returns in the tens: the unit of advantages is not 1
    batch.columns["logp"] += np.random.default_rng(1).normal(size=15).astype(np.float32)
    impala = Impala(new_module(), SETTINGS)
    targets, advantages = [], []
    for chunk in [chunk for chunk in batch if len(chunk)]:
        with torch.no_grad():
            answer = impala.module.forward_train({"obs": torch.tensor(chunk.obs)})
            logp = impala.module.logp(answer["action_dist_inputs"][:-1], torch.tensor(chunk.actions)).double().numpy()
        values = answer["values"].double().numpy()
        values[-1] *= chunk.end is not TERMINATED
        ratio = np.minimum(1.0, np.exp(logp - chunk.columns["logp"]))
        after = values[-1]
        own: list[tuple[float, float]] = []
        for t in reversed(range(len(chunk))):
            advantage = ratio[t] * (chunk.rewards[t] + SETTINGS.gamma * after - values[t])
            delta = ratio[t] * (chunk.rewards[t] + SETTINGS.gamma * values[t + 1] - values[t])
            goes_on = t + 1 < len(chunk)
            after = values[t] + delta + (SETTINGS.gamma * ratio[t] * (after - values[t + 1]) if goes_on else 0.0)
            own.insert(0, (after, advantage))
        targets += [target for target, _ in own]
        advantages += [advantage for _, advantage in own]
    rollout = join([batch])
    assert rollout is not None
    goal, _ = impala._goal(rollout, minibatches_for(impala.module, rollout), NO_INTERRUPTION)
    np.testing.assert_allclose(goal.targets, targets, rtol=1e-6, atol=1e-6)
    unit = max(float(np.std(targets)), 1.0)
    np.testing.assert_allclose(goal.advantages, np.array(advantages) / unit, rtol=1e-6, atol=1e-6)


def test_impala_learns_to_guess(guessing: Any, new_module: NewModule) -> None:
    impala = Impala(new_module(), LearnerSection(algorithm="impala", learning_rate=0.01))
    first = impala.update([guessing.batch(impala.module, 256)])["mean_return"]
    for _ in range(30):
        last = impala.update([guessing.batch(impala.module, 256)])["mean_return"]
    assert first < 0.5
    assert last > 0.9


def test_a_step_that_the_module_would_hardly_take_any_more_moves_it_less(
    make_batch: MakeBatch, new_module: NewModule
) -> None:
    def moved_by(behaviour_logp: float) -> float:
        batch = make_batch([16], [TERMINATED])
        batch.columns["logp"][:] = behaviour_logp
        impala = Impala(new_module(), SETTINGS)
        rollout = join([batch])
        assert rollout is not None
        goal, _ = impala._goal(rollout, minibatches_for(impala.module, rollout), NO_INTERRUPTION)
        return float(goal.advantages.abs().sum())

    # the module gives each of the three actions about the same probability
    assert moved_by(0.0) < 0.5 * moved_by(float(np.log(1 / 3)))
    assert moved_by(-5.0) == pytest.approx(moved_by(-9.0)), "ratios above 1 count as 1"


def test_resuming_from_the_file_continues_to_the_bit(
    make_batch: MakeBatch, new_module: NewModule, tmp_path: Path
) -> None:
    batches = [make_batch([20, 5, 39], [TERMINATED, TRUNCATED, ONGOING], seed=seed) for seed in range(6)]
    straight = Impala(new_module(), SETTINGS)
    expected = [straight.update([batch]) for batch in batches]
    first = Impala(new_module(), SETTINGS)
    seen = [first.update([batch]) for batch in batches[:2]]
    save_checkpoint(tmp_path / "c", Checkpoint(1, [], *first.get_state()))
    saved = load_checkpoint(tmp_path / "c")
    assert saved is not None
    resumed = Impala(new_module(), SETTINGS)
    resumed.set_state(saved.state, saved.arrays)
    seen += [resumed.update([batch]) for batch in batches[2:]]
    assert seen == expected
    for name, tensor in straight.weights().items():
        assert torch.equal(tensor, resumed.weights()[name]), name


def test_an_algorithm_has_defaults_of_its_own_and_a_given_value_wins() -> None:
    assert LearnerSection().steps_per_update == 2048
    assert LearnerSection(algorithm="impala").steps_per_update == 512
    learner = build_config({"learner": {"algorithm": "impala", "epochs": "3"}}).learner
    assert (learner.epochs, learner.steps_per_update) == (3, 512)


@pytest.mark.parametrize("wrong", ["a2c", ["ppo"]])
def test_an_unknown_algorithm_is_refused_with_the_names_of_those_there_are(wrong: Any) -> None:
    with pytest.raises(ConfigError, match=r"learner\.algorithm.*'ppo'.*'impala'"):
        build_config({"learner": {"algorithm": wrong}})
