"""Several policies in one learner: each learns from its own batches, as if it were alone, and all go on together."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from headrace.learner_stub.checkpoints.checkpoint import Checkpoint, save_checkpoint
from headrace.learner_stub.reference.best_checkpoint import BestCheckpoint
from headrace.learner_stub.reference.policies import DEFAULT_MODULE, FrozenPolicy, LearnerPolicies, build_policies
from headrace.learner_stub.reference.ppo import PPO, training_arrays
from headrace.learner_stub.rollouts.connector_merger import ConnectorMerger
from headrace.learner_stub.rollouts.module import TrainableModule
from headrace.schemas.chunks.batch import ChunkBatch
from headrace.schemas.chunks.chunk import EXPLORE, RANDOM_ACTIONS, ChunkEnd
from headrace.schemas.chunks.spaces import Box, Discrete, Spaces
from headrace.schemas.errors import ConfigError, ConnectorError, ModuleError
from headrace.schemas.settings.config import FleetConfig, LearnerSection

MakeBatch = Callable[..., ChunkBatch]
NewModule = Callable[[], TrainableModule]

SETTINGS = LearnerSection(epochs=2, minibatch_size=16)
ONGOING, TERMINATED = ChunkEnd.ONGOING, ChunkEnd.TERMINATED


def _of(module_id: str, batch: ChunkBatch) -> ChunkBatch:
    return replace(batch, modules=(module_id,))


def _telling(batch: ChunkBatch, rows: list[float]) -> ChunkBatch:
    """`batch` with word of `rows`, which a MeanStd has seen."""
    seen = {"count": np.array(float(len(rows))), "mean": np.mean(rows), "m2": np.var(rows) * len(rows)}
    return replace(
        batch, connector_update={f"env_to_module/0.MeanStd/obs/{name}": np.asarray(a) for name, a in seen.items()}
    )


def _config(policies: dict[str, Any] | None, **sections: Any) -> FleetConfig:
    return FleetConfig.model_validate({"sampling": {"policies": policies}, **sections})


def _assert_same_weights(policy: Any, other: Any) -> None:
    assert policy.weights().keys() == other.weights().keys()
    for name, tensor in policy.weights().items():
        assert torch.equal(tensor, other.weights()[name]), name


def test_each_policy_learns_as_if_it_were_alone(make_batch: MakeBatch, new_module: NewModule) -> None:
    together = LearnerPolicies({"one": PPO(new_module(), SETTINGS), "two": PPO(new_module(), SETTINGS)})
    alone = {"one": PPO(new_module(), SETTINGS), "two": PPO(new_module(), SETTINGS)}
    for seed in range(3):
        ones = [make_batch([20, 5], [TERMINATED, ONGOING], seed=seed + i) for i in (0, 100)]
        two = make_batch([9], [TERMINATED], seed=seed + 200)
        metrics = together.update([_of("one", ones[0]), _of("two", two), _of("one", ones[1])])
        expected = {"one": alone["one"].update(ones), "two": alone["two"].update([two])}
        for module_id, own in expected.items():
            assert {f"{module_id}/{name}": value for name, value in own.items() if name != "update"}.items() <= (
                metrics.items()
            )
        assert (metrics["update"], metrics["steps"]) == (seed + 1, 59 * (seed + 1))
    for module_id, policy in alone.items():
        _assert_same_weights(together.by_id[module_id], policy)


def test_a_policy_without_batches_stays_while_the_others_learn(make_batch: MakeBatch, new_module: NewModule) -> None:
    policies = LearnerPolicies({"one": PPO(new_module(), SETTINGS), "idle": PPO(new_module(), SETTINGS)})
    metrics = policies.update([_of("one", make_batch([20], [TERMINATED]))])
    assert (metrics["one/steps"], metrics["idle/steps"]) == (20, 0)
    assert "idle/kl" not in metrics
    assert policies.updates == 1
    _assert_same_weights(policies.by_id["idle"], PPO(new_module(), SETTINGS))


def test_batches_of_an_unknown_module_are_refused_before_anything_is_trained(
    make_batch: MakeBatch, new_module: NewModule
) -> None:
    policies = LearnerPolicies({"one": PPO(new_module(), SETTINGS)})
    with pytest.raises(ModuleError, match=r"slot 0 is of \['other'\], and this learner's policies are \['one'\]"):
        policies.update([_of("one", make_batch([20], [TERMINATED])), _of("other", make_batch([20], [TERMINATED]))])
    _assert_same_weights(policies.by_id["one"], PPO(new_module(), SETTINGS))


def test_a_module_without_a_name_has_flat_weights_metrics_and_checkpoint(
    make_batch: MakeBatch, new_module: NewModule
) -> None:
    ppo, batch = PPO(new_module(), SETTINGS), make_batch([20], [TERMINATED])
    policies = LearnerPolicies({DEFAULT_MODULE: ppo})
    assert policies.update([batch]) == {**PPO(new_module(), SETTINGS).update([batch]), "aborted": 0}
    assert policies.weights().keys() == ppo.module.state_dict().keys()
    state, arrays = policies.get_state()
    assert state.keys() == {"updates", "steps", "episodes", "recent_returns", "recent_aborted"}
    assert {name.partition("/")[0] for name in arrays} == {"module", "optimizer"}


def test_aborted_episodes_of_all_batches_count_over_restarts(make_batch: MakeBatch, new_module: NewModule) -> None:
    batch = replace(make_batch([20], [TERMINATED]), episode_ends=(1, 4))
    for names in ([DEFAULT_MODULE], ["one", "two"]):
        policies, again = (LearnerPolicies({name: PPO(new_module(), SETTINGS) for name in names}) for _ in range(2))
        told = policies.update([_of(name, batch) for name in names])
        assert told["aborted"] == 4 * len(names)
        again.set_state(*policies.get_state())
        assert again.ends.counts == (len(names), 4 * len(names))


def test_a_learner_resumes_from_an_older_checkpoint_of_a_single_module(
    make_batch: MakeBatch, new_module: NewModule
) -> None:
    ppo = PPO(new_module(), SETTINGS)
    ppo.update([make_batch([20], [TERMINATED])])
    arrays = training_arrays(ppo.module.state_dict(), ppo.optimizer.state_dict())
    policies = LearnerPolicies(
        {DEFAULT_MODULE: PPO(new_module(), SETTINGS)},
        {DEFAULT_MODULE: ConnectorMerger(["headrace.workers.connectors:MeanStd"])},
    )
    policies.set_state({"updates": 1, "steps": 20, "episodes": 1, "recent_returns": [0.0]}, arrays)
    second = make_batch([30], [TERMINATED], seed=1)
    assert policies.update([second]) == {**ppo.update([second]), "aborted": 0}
    _assert_same_weights(policies.by_id[DEFAULT_MODULE], ppo)


def test_connector_state_is_published_with_its_modules_weights(make_batch: MakeBatch, new_module: NewModule) -> None:
    mean_std = "headrace.workers.connectors:MeanStd"
    policies = LearnerPolicies(
        {"one": PPO(new_module(), SETTINGS), "two": FrozenPolicy(torch.nn.Identity())},
        {"one": ConnectorMerger([mean_std]), "two": ConnectorMerger([mean_std])},
    )
    random = make_batch([8], [TERMINATED], flags=EXPLORE | RANDOM_ACTIONS)
    policies.update(
        [
            _of("one", _telling(make_batch([4], [ONGOING]), [1.0, 3.0])),
            _of("one", _telling(random, [5.0])),
            _of("two", _telling(make_batch([4], [ONGOING]), [7.0])),
        ]
    )
    weights: Any = policies.weights()
    count, mean = (f"connectors/env_to_module/0.MeanStd/obs/{name}" for name in ("count", "mean"))
    assert {m: (float(own[count]), float(own[mean])) for m, own in weights.items()} == {"one": (3, 3), "two": (1, 7)}
    assert weights["one"].keys() > new_module().state_dict().keys()


def test_a_batch_of_foreign_connectors_is_refused_before_anything_is_trained(
    make_batch: MakeBatch, new_module: NewModule
) -> None:
    policies = LearnerPolicies({"one": PPO(new_module(), SETTINGS)})
    with pytest.raises(ConnectorError, match="give workers and learner the same ones"):
        policies.update([_of("one", _telling(make_batch([4], [ONGOING]), [1.0]))])
    _assert_same_weights(policies.by_id["one"], PPO(new_module(), SETTINGS))


def test_a_policy_may_be_frozen_and_trained_again_over_restarts(make_batch: MakeBatch, new_module: NewModule) -> None:
    batch = _of("one", make_batch([20], [TERMINATED]))
    trained = LearnerPolicies({"one": PPO(new_module(), SETTINGS), "two": FrozenPolicy(new_module())})  # type: ignore[arg-type]
    trained.update([batch])
    frozen = LearnerPolicies({"one": FrozenPolicy(new_module()), "two": PPO(new_module(), SETTINGS)})  # type: ignore[arg-type]
    frozen.set_state(*trained.get_state())
    _assert_same_weights(frozen.by_id["one"], trained.by_id["one"])
    assert frozen.by_id["one"].stats.steps == 20
    frozen.update([batch])
    _assert_same_weights(frozen.by_id["one"], trained.by_id["one"])
    again = LearnerPolicies({"one": PPO(new_module(), SETTINGS), "two": FrozenPolicy(new_module())})  # type: ignore[arg-type]
    again.set_state(*frozen.get_state())
    assert again.update([batch])["one/steps"] == 60


def test_the_figure_of_the_best_checkpoint_leaves_frozen_policies_out(new_module: NewModule, tmp_path: Path) -> None:
    """In a zero-sum game the opponent loses what the trained policy wins."""
    policies = LearnerPolicies({"learns": PPO(new_module(), SETTINGS), "earlier": FrozenPolicy(new_module())})
    policies.by_id["earlier"].stats.recent_returns.extend([-3.0] * 99)
    assert policies.window_mean is None
    policies.by_id["learns"].stats.recent_returns.extend([3.0] * 100)
    assert policies.window_mean == 3.0
    best = BestCheckpoint(tmp_path / "learner.checkpoint", 1)
    save_checkpoint(tmp_path / "learner.checkpoint", Checkpoint(1, [], *policies.get_state()))
    best.saved(policies.window_mean)
    assert BestCheckpoint(tmp_path / "learner.checkpoint", 2)._highest == 3.0


def test_the_state_of_other_policies_is_refused_by_name(new_module: NewModule) -> None:
    one, two = (LearnerPolicies({module_id: PPO(new_module(), SETTINGS)}) for module_id in ("one", "two"))
    with pytest.raises(ValueError, match=r"it is of the modules \['one'\], and this learner's are \['two'\]"):
        two.set_state(*one.get_state())


# -- as the config names them ------------------------------------------------------------------------------------------

WIDE = Spaces(observation=Box(shape=(7,), dtype="<f4"), action=Discrete(n=2))


def test_policies_get_their_own_spaces_and_default_to_the_module_section(spaces: Spaces) -> None:
    config = _config(
        {"plain": {}, "large": {"config": {"hidden": (32,)}}, "idle": {"build": "torch.nn:Identity"}},
        module={"config": {"hidden": (8,)}},
        learner={"policies_to_train": ["plain", "large"]},
    )
    policies = build_policies(config, {"plain": spaces, "large": WIDE, "idle": spaces})
    shapes = {m: tuple(p.weights()["trunk.0.weight"].shape) for m, p in policies.by_id.items() if p.weights()}
    assert shapes == {"plain": (8, 3), "large": (32, 7)}
    assert isinstance(policies.by_id["idle"], FrozenPolicy)


def test_a_config_without_policies_builds_the_default_module(spaces: Spaces) -> None:
    assert list(build_policies(_config(None), {DEFAULT_MODULE: spaces}).by_id) == [DEFAULT_MODULE]


def test_connectors_of_the_config_are_merged_for_each_policy(spaces: Spaces, make_batch: MakeBatch) -> None:
    mean_std = {"build": "headrace.workers.connectors:MeanStd", "config": {"clip": 3.0}}
    own = {"one": {}, "two": {"env_to_module": []}}
    config = FleetConfig.model_validate({"sampling": {"policies": own, "env_to_module": [mean_std]}})
    policies = build_policies(config, {"one": spaces, "two": spaces})
    told = _telling(make_batch([4], [ONGOING]), [2.0])
    policies.update([_of("one", told)])
    assert "connectors/env_to_module/0.MeanStd/obs/count" in policies.weights()["one"]
    with pytest.raises(ConnectorError, match=r"the learner's connectors are \[\]"):
        policies.update([_of("two", told)])


def test_policies_that_cannot_be_built_are_named_with_their_setting(spaces: Spaces) -> None:
    by_id = {"one": spaces}
    with pytest.raises(ConfigError, match=r"sampling\.policies\.one\.build: 'nowhere' is not of the form"):
        build_policies(_config({"one": {"build": "nowhere"}}), by_id)
    with pytest.raises(ModuleError, match=r"could not be built .* sampling\.policies\.one\.config = \{'colour'"):
        build_policies(_config({"one": {"config": {"colour": "red"}}}), by_id)
    with pytest.raises(ModuleError, match="has no forward_train"):
        build_policies(_config({"one": {"build": "torch.nn:Identity"}}), by_id)
    with pytest.raises(ModuleError, match=r"workers have the modules \['one'\], not \['two'\]"):
        build_policies(_config({"one": {}, "two": {}}), by_id)
