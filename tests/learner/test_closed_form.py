"""Gradients in closed form compared with autograd: for each kind of policy, and for whole updates."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from headrace.learner_stub.reference.ppo import PPO
from headrace.learner_stub.rollouts.module import TrainableModule, build_module
from headrace.schemas.chunks.batch import ChunkBatch
from headrace.schemas.chunks.chunk import ChunkEnd
from headrace.schemas.chunks.spaces import Box, Dict, Discrete, MultiDiscrete, Space, Spaces
from headrace.schemas.settings.config import LearnerSection, ModuleSection
from headrace.workers.modules.actor_critic import ActorCritic, actor_critic

MakeBatch = Callable[..., ChunkBatch]
ByAutograd = Callable[[TrainableModule], TrainableModule]

ROWS = 37
OBSERVATION = Box(shape=(3,), dtype="<f4")
THREE, FROM_FIVE, PLANE = Discrete(n=3), Discrete(n=4, start=5), Box(shape=(2,), dtype="<f4")


class Derived(ActorCritic):
    """An actor-critic with another loss of its own."""


@pytest.mark.parametrize("hidden", [(), (8,), (16, 8)])
@pytest.mark.parametrize("activation", ["tanh", "relu"])
@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("action", [THREE, FROM_FIVE, PLANE], ids=["discrete", "discrete from 5", "box"])
def test_gradients_equal_those_of_autograd(action: Any, shared: bool, activation: str, hidden: tuple[int, ...]) -> None:
    settings = {"hidden": hidden, "activation": activation, "vf_share_layers": shared, "log_std": -0.3}
    module = actor_critic(Spaces(observation=OBSERVATION, action=action), **settings)  # type: ignore[arg-type]
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter += 0.5 * torch.randn(parameter.shape)
    obs, actions, by_logp, by_values = _rows(action)
    expected = _by_autograd(module, obs, actions, by_logp, by_values)
    form = module.make_closed_form()
    assert form is not None
    logp, entropy, values = form.forward(*form.rows(obs, actions))
    form.backward(by_logp, 0.25, by_values)
    answer = module.forward_train({"obs": obs})
    torch.testing.assert_close(values, answer["values"], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(logp, module.logp(answer["action_dist_inputs"], actions), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(entropy, module.entropy(answer["action_dist_inputs"]), rtol=1e-5, atol=1e-5)
    for name, parameter in module.named_parameters():
        if parameter.numel():
            torch.testing.assert_close(parameter.grad, expected[name], rtol=1e-4, atol=1e-5, msg=name)


def test_observations_of_any_dtype_and_shape_are_cast_once() -> None:
    observation = Box(shape=(2, 3), dtype="<f8")
    module = actor_critic(Spaces(observation=observation, action=THREE), hidden=(8,))
    obs = torch.randn(ROWS, 2, 3, dtype=torch.float64)
    form = module.make_closed_form()
    assert form is not None
    _, _, values = form.forward(*form.rows(obs, torch.zeros(ROWS, dtype=torch.int64)))
    torch.testing.assert_close(values, module.forward_train({"obs": obs})["values"], rtol=1e-5, atol=1e-6)


def _rows(action: Discrete | Box) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(obs, actions, by_logp, by_values) of so many rows."""
    if isinstance(action, Discrete):
        actions = torch.arange(ROWS) % action.n + action.start
    else:
        actions = torch.randn(ROWS, *action.shape)
    return torch.randn(ROWS, 3), actions, torch.randn(ROWS), torch.randn(ROWS)


def _by_autograd(
    module: ActorCritic, obs: Tensor, actions: Tensor, by_logp: Tensor, by_values: Tensor
) -> dict[str, Tensor]:
    answer = module.forward_train({"obs": obs})
    inputs = answer["action_dist_inputs"]
    loss = module.logp(inputs, actions) @ by_logp + answer["values"] @ by_values + 0.25 * module.entropy(inputs).sum()
    loss.backward()  # type: ignore[no-untyped-call]
    found = {
        name: parameter.grad.clone() for name, parameter in module.named_parameters() if parameter.grad is not None
    }
    module.zero_grad()
    return found


@pytest.mark.parametrize("entropy_coefficient", [0.0, 0.05])
@pytest.mark.parametrize("max_grad_norm", [0.05, 10.0])
@pytest.mark.parametrize("shared", [True, False])
def test_updates_equal_those_with_autograd(
    make_batch: MakeBatch,
    by_autograd: ByAutograd,
    shared: bool,
    max_grad_norm: float,
    entropy_coefficient: float,
) -> None:
    """The clips hold some steps back here, and the last minibatch is smaller than the others."""
    settings = LearnerSection(
        epochs=3,
        minibatch_size=24,
        learning_rate=0.01,
        max_grad_norm=max_grad_norm,
        entropy_coefficient=entropy_coefficient,
        clip=0.05,
        target_kl=1e9,
    )
    section = ModuleSection(config={"hidden": (16,), "vf_share_layers": shared})
    spaces = Spaces(observation=OBSERVATION, action=THREE)
    fast, plain = (
        PPO(build_module(section, spaces), settings),
        PPO(by_autograd(build_module(section, spaces)), settings),
    )
    for seed in range(3):
        batch = make_batch([20, 5, 39], [ChunkEnd.TERMINATED, ChunkEnd.TRUNCATED, ChunkEnd.ONGOING], seed=seed)
        found, expected = fast.update([batch]), plain.update([batch])
        assert found == pytest.approx(expected, rel=1e-3, abs=1e-4)
        assert found["clip_fraction"] > 0.1
    for name, array in plain.get_state()[1].items():
        np.testing.assert_allclose(fast.get_state()[1][name], array, rtol=1e-3, atol=1e-5, err_msg=name)


def test_closed_form_resumes_from_a_checkpoint_of_autograd(make_batch: MakeBatch, by_autograd: ByAutograd) -> None:
    """The same arrays by the same names, so that older checkpoints fit."""
    spaces, settings = Spaces(observation=OBSERVATION, action=THREE), LearnerSection(epochs=2, minibatch_size=16)
    section = ModuleSection()
    fast, plain = (
        PPO(build_module(section, spaces), settings),
        PPO(by_autograd(build_module(section, spaces)), settings),
    )
    batches = [make_batch([20, 44], [ChunkEnd.TERMINATED, ChunkEnd.ONGOING], seed=seed) for seed in range(3)]
    plain.update([batches[0]])
    state, arrays = plain.get_state()
    fast.set_state(state, {name: array.copy() for name, array in arrays.items()})
    assert fast.get_state()[1].keys() == arrays.keys()
    for batch in batches[1:]:
        fast.update([batch])
        plain.update([batch])
    for name, array in plain.get_state()[1].items():
        np.testing.assert_allclose(fast.get_state()[1][name], array, rtol=1e-3, atol=1e-5, err_msg=name)


def test_the_learner_moves_all_parameters_of_the_default_policy_as_one_vector(make_batch: MakeBatch) -> None:
    """Large parameters are part of the vector; parameters that share no vector move one by one."""
    section = ModuleSection(config={"hidden": (256, 256)})
    ppo = PPO(build_module(section, Spaces(observation=OBSERVATION, action=THREE)), LearnerSection(epochs=1))
    ppo.update([make_batch([8], [ChunkEnd.TERMINATED])])
    numbers = sum(parameter.numel() for parameter in ppo.module.parameters())
    assert [group.mean.numel() for group in ppo.optimizer._groups] == [numbers]
    assert ppo._closed_form is not None
    assert ppo._closed_form.values.numel() == numbers


def _derived(spaces: Spaces) -> ActorCritic:
    return Derived(spaces, (8,), "tanh", True, 0.0, 0)


def _with_dropout(spaces: Spaces) -> ActorCritic:
    module = actor_critic(spaces, hidden=(8,))
    module.trunk.append(nn.Dropout())
    return module


def _with_other_activation(spaces: Spaces) -> ActorCritic:
    module = actor_critic(spaces, hidden=(8,))
    module.trunk[1] = nn.GELU()
    return module


def _with_own_loss(spaces: Spaces) -> ActorCritic:
    module = actor_critic(spaces)
    module.entropy = lambda dist_inputs: dist_inputs.sum(-1)  # type: ignore[method-assign]
    return module


def _with_own_encoder(spaces: Spaces) -> ActorCritic:
    module = actor_critic(spaces)
    module.encoder = nn.Tanh()  # type: ignore[assignment]
    return module


def _half_frozen(spaces: Spaces) -> ActorCritic:
    module = actor_critic(spaces)
    module.trunk.requires_grad_(False)
    return module


def _with_hook(spaces: Spaces) -> ActorCritic:
    module = actor_critic(spaces)
    module.head.register_forward_hook(lambda layer, inputs, output: 2 * output)
    return module


def _with_one_trunk(spaces: Spaces) -> ActorCritic:
    module = actor_critic(spaces, vf_share_layers=False)
    module.vf_trunk = module.trunk
    return module


def _with_more_parameters(spaces: Spaces) -> ActorCritic:
    module = actor_critic(spaces)
    module.scale = nn.Parameter(torch.ones(1))
    return module


@pytest.mark.parametrize(
    "build",
    [
        _derived,
        _with_dropout,
        _with_other_activation,
        _with_own_loss,
        _with_own_encoder,
        _half_frozen,
        _with_hook,
        _with_one_trunk,
        _with_more_parameters,
        lambda spaces: actor_critic(spaces).double(),
    ],
)
def test_a_module_that_was_changed_is_left_to_autograd(build: Callable[[Spaces], ActorCritic]) -> None:
    assert build(Spaces(observation=OBSERVATION, action=THREE)).make_closed_form() is None


MASKED = Dict(spaces={"observation": OBSERVATION, "action_mask": Box(shape=(3,), dtype="|i1", low=0, high=1)})


@pytest.mark.parametrize(
    ("observation", "action"),
    [
        (OBSERVATION, MultiDiscrete(nvec=(2, 3), start=(0, 0), shape=(2,))),
        (Box(shape=(8, 8, 3), dtype="|u1"), THREE),
        (Dict(spaces={"near": OBSERVATION}), THREE),
        (MASKED, THREE),
    ],
    ids=["several choices", "image", "nested", "masked"],
)
def test_other_spaces_are_left_to_autograd(observation: Space, action: Space) -> None:
    assert actor_critic(Spaces(observation=observation, action=action)).make_closed_form() is None
