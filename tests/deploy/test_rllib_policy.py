"""A policy that RLlib has trained acts in Headrace as in RLlib."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from headrace.deploy.annexes.ray.rllib_policy import build, save_weights
from headrace.schemas.chunks.spaces import Box, Discrete, Spaces
from headrace.schemas.errors import ModuleError

SPACES = Spaces(observation=Box(shape=(4,), dtype="<f4"), action=Discrete(n=2))
OBS = np.random.default_rng(1).normal(size=(5, 4)).astype(np.float32)
State = dict[str, NDArray[Any]]


def state(*, shared: bool, hidden: int = 8) -> State:
    """Weights with the names and shapes that RLlib's default module has."""
    rng, layers = np.random.default_rng(0), {"pi.net.mlp.0": (2, hidden), "vf.net.mlp.0": (1, hidden)}
    for encoder in ("encoder",) if shared else ("actor_encoder", "critic_encoder"):
        layers |= {f"encoder.{encoder}.net.mlp.0": (hidden, 4), f"encoder.{encoder}.net.mlp.2": (hidden, hidden)}
    found: State = {}
    for name, shape in layers.items():
        found[f"{name}.weight"] = rng.normal(size=shape).astype(np.float32)
        found[f"{name}.bias"] = rng.normal(size=shape[0]).astype(np.float32)
    return found


def by_hand(weights: State, encoder: str, head: str) -> NDArray[Any]:
    features = OBS
    for number in (0, 2):
        layer = f"encoder.{encoder}.net.mlp.{number}"
        features = np.tanh(features @ weights[f"{layer}.weight"].T + weights[f"{layer}.bias"])
    result: NDArray[Any] = features @ weights[f"{head}.net.mlp.0.weight"].T + weights[f"{head}.net.mlp.0.bias"]
    return result


@pytest.mark.parametrize("shared", [True, False])
def test_the_policy_gives_the_outputs_of_its_rllib_layers(tmp_path: Path, shared: bool) -> None:
    weights = state(shared=shared)
    constants = {f"{head}.log_std_clip_param_const": np.array([20.0]) for head in ("pi", "vf")}
    save_weights(weights | constants, tmp_path / "policy.npz")
    answer = build(SPACES, weights=str(tmp_path / "policy.npz")).forward_train({"obs": torch.from_numpy(OBS)})
    policy, value = ("encoder", "encoder") if shared else ("actor_encoder", "critic_encoder")
    np.testing.assert_allclose(answer["action_dist_inputs"].detach(), by_hand(weights, policy, "pi"), rtol=1e-5)
    np.testing.assert_allclose(answer["values"].detach(), by_hand(weights, value, "vf")[:, 0], rtol=1e-4)


def test_the_policy_acts_without_a_value_function_like_rllibs_env_runners(tmp_path: Path) -> None:
    weights = {name: array for name, array in state(shared=False).items() if "critic" not in name and "vf." not in name}
    save_weights(weights | {"pi.log_std_clip_param_const": np.array([20.0])}, tmp_path / "policy.npz")
    answer = build(SPACES, weights=str(tmp_path / "policy.npz")).forward_train({"obs": torch.from_numpy(OBS)})
    expected = by_hand(weights, "actor_encoder", "pi")
    np.testing.assert_allclose(answer["action_dist_inputs"].detach(), expected, rtol=1e-5)
    assert answer["values"].shape == (len(OBS),)


BOX = Spaces(observation=SPACES.observation, action=Box(shape=(2,), dtype="<f4", low=-1.0, high=1.0))


def test_a_gaussian_has_rllibs_log_standard_deviations(tmp_path: Path) -> None:
    weights = state(shared=False) | {"pi.log_std": np.array([-0.5, 0.25], np.float32)}
    save_weights(weights, tmp_path / "policy.npz")
    answer = build(BOX, weights=str(tmp_path / "policy.npz")).forward_train({"obs": torch.from_numpy(OBS)})
    means, log_std = answer["action_dist_inputs"].detach().numpy().reshape(len(OBS), 2, 2).swapaxes(0, 1)
    np.testing.assert_allclose(means, by_hand(weights, "actor_encoder", "pi"), rtol=1e-5)
    np.testing.assert_array_equal(log_std, np.tile(weights["pi.log_std"], (len(OBS), 1)))


def test_log_standard_deviations_that_do_not_fit_the_actions_are_refused(tmp_path: Path) -> None:
    path = str(tmp_path / "policy.npz")
    save_weights(state(shared=False), path)
    with pytest.raises(ModuleError, match=r"have 0 log .* need 2; .*free_log_std=True for a Box"):
        build(BOX, weights=path)
    save_weights(state(shared=False) | {"pi.log_std": np.zeros(2, np.float32)}, path)
    with pytest.raises(ModuleError, match=r"have 2 log .* need 0; "):
        build(SPACES, weights=path)


def test_a_policy_of_another_kind_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "policy.npz"
    with pytest.raises(ModuleError, match="cannot be read"):
        build(SPACES, weights=str(path))
    save_weights(state(shared=True) | {"encoder.encoder.net.cnn.0.weight": np.zeros(3)}, path)
    with pytest.raises(ModuleError, match=r"it has encoder\.encoder\.net\.cnn\.0\.weight"):
        build(SPACES, weights=str(path))
    save_weights({name: array for name, array in state(shared=True).items() if name != "vf.net.mlp.0.bias"}, path)
    with pytest.raises(ModuleError, match=r"layer vf\.net\.mlp\.0 lacks its weight or its bias"):
        build(SPACES, weights=str(path))
    save_weights(state(shared=False), path)
    three_actions = Spaces(observation=SPACES.observation, action=Discrete(n=3))
    with pytest.raises(ModuleError, match=r"\(3, 8\)"):
        build(three_actions, weights=str(path))


def test_a_file_that_could_run_code_is_refused(tmp_path: Path) -> None:
    np.savez(tmp_path / "policy.npz", **{"pi.net.mlp.0.weight": np.array([object()], dtype=object)})
    with pytest.raises(ModuleError, match="cannot be read"):
        build(SPACES, weights=str(tmp_path / "policy.npz"))
