"""Run directories as a learner leaves them, made by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import orjson
import torch

from headrace.learner_stub.checkpoints.checkpoint import Checkpoint, save_checkpoint
from headrace.learner_stub.reference.ppo import training_arrays
from headrace.schemas.messages.weights import CONNECTORS, join_modules
from headrace.workers.connectors import MeanStd
from headrace.workers.modules import ActorCritic, actor_critic
from support.fleets.serving_process import cart_spaces

MEAN_STD = "headrace.workers.connectors:MeanStd"
MEAN = np.array([0.2, -0.2, 0.1, 0.2])
TWO_CARTS = "headrace.workers.agents.examples:two_carts"


def cart_module(seed: int) -> ActorCritic:
    """A policy of CartPole's observations after a MeanStd, whose actions are not nearly alike."""
    module = actor_critic(MeanStd().connect(cart_spaces(), 1), seed=seed)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.mul_(3)
    return module.eval()


def best_action(module: ActorCritic, observation: Any) -> int:
    """The best action by hand."""
    scaled = torch.from_numpy(((observation - MEAN) / 0.1).astype(np.float32))[None]
    with torch.inference_mode():
        return int(module.forward_train({"obs": scaled})["action_dist_inputs"].argmax())


def arrays_of(module: ActorCritic) -> dict[str, Any]:
    """What a learner saves of the module and its MeanStd."""
    moments = {"count": np.full(1, 101.0), "mean": MEAN, "m2": np.full(4, 1.0)}
    learnt = {f"{CONNECTORS}env_to_module/0.MeanStd/obs/{name}": part for name, part in moments.items()}
    return {**training_arrays(module.state_dict(), {"state": {}}), **learnt}


def save_run(folder: Path, name: str = "learner.checkpoint", updates: int = 9, seed: int = 7) -> ActorCritic:
    """Write a run of CartPole; return its module."""
    module = cart_module(seed)
    state = {"updates": updates, "steps": 2048 * updates, "recent_returns": [10.0 * updates, 10.0 * updates + 5]}
    save_checkpoint(folder / name, Checkpoint(2, [], state, arrays_of(module)))
    sampling = {"env": "CartPole-v1", "num_envs": 4, "env_to_module": [MEAN_STD]}
    (folder / "config.json").write_bytes(orjson.dumps({"sampling": sampling}))
    return module


def save_run_of_two(folder: Path) -> dict[str, ActorCritic]:
    """Write a run of two carts with a policy each; return the modules."""
    modules = {"short": cart_module(1), "long": cart_module(2)}
    state = {"modules": {name: {"updates": 7, "steps": 100} for name in modules}}
    arrays = join_modules({name: arrays_of(module) for name, module in modules.items()})
    save_checkpoint(folder / "learner.checkpoint", Checkpoint(2, [], state, arrays))
    policies = {name: {"env_to_module": [MEAN_STD]} for name in modules}
    (folder / "config.json").write_bytes(orjson.dumps({"sampling": {"env": TWO_CARTS, "policies": policies}}))
    return modules
