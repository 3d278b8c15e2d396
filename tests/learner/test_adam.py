"""The learner's own Adam: the same steps as torch's Adam, and a start without torch's compiler."""

from __future__ import annotations

import copy
import subprocess
import sys
from collections.abc import Callable

import pytest
import torch
from torch import nn

from headrace.learner_stub.reference.ppo import Adam

pytestmark = pytest.mark.long


def _net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2, bias=False))


def _learn(net: nn.Module, optimizer: Adam | torch.optim.Adam, first: int, last: int) -> None:
    for step in range(first, last):
        optimizer.zero_grad()
        # Every third step leaves the last layer without a gradient, which is not one of zero.
        loss = net(torch.sin(torch.arange(12.0) * step).reshape(4, 3)) if step % 3 else net[0](torch.ones(3))
        loss.square().sum().backward()
        optimizer.step()


def _torchs(net: nn.Module) -> torch.optim.Adam:
    return torch.optim.Adam(net.parameters(), lr=0.1, eps=1e-5, fused=True)


def _ours(net: nn.Module) -> Adam:
    return Adam(net.parameters(), lr=0.1, eps=1e-5)


def test_steps_equal_those_of_torchs_adam_to_the_bit() -> None:
    ours, theirs = _net(), _net()
    _learn(ours, _ours(ours), 0, 40)
    _learn(theirs, _torchs(theirs), 0, 40)
    for found, expected in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert torch.equal(found, expected)


@pytest.mark.parametrize("begun_by", [_ours, _torchs])
def test_a_loaded_state_continues_to_the_bit(begun_by: Callable[[nn.Module], Adam]) -> None:
    """The state may be one of torch's Adam, as in older checkpoints."""
    whole, half = _net(), _net()
    _learn(whole, _ours(whole), 0, 20)
    before, after = begun_by(half), _ours(half)
    _learn(half, before, 0, 11)
    after.load_state_dict(copy.deepcopy(before.state_dict()))
    _learn(half, after, 11, 20)
    for found, expected in zip(half.parameters(), whole.parameters(), strict=True):
        assert torch.equal(found, expected)


def test_a_loaded_state_lies_in_memory_as_its_parameter_does() -> None:
    """`fused` reads numbers in the order of memory, whatever the shape says."""
    kernel = torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last)
    found, expected = (nn.Parameter(kernel.clone()) for _ in range(2))
    optimizers = [Adam([parameter], lr=0.1, eps=1e-5) for parameter in (found, expected)]
    for step in range(3):
        for parameter, optimizer in zip((found, expected), optimizers, strict=True):
            optimizer.zero_grad()
            (parameter * torch.arange(120.0).reshape(2, 3, 4, 5)).sin().sum().backward()
            optimizer.step()
        if step == 1:
            (moments,) = optimizers[0].state_dict()["state"].values()
            saved = {name: torch.from_numpy(tensor.numpy().copy(order="C")) for name, tensor in moments.items()}
            optimizers[0].load_state_dict({"state": {0: saved}})
    assert torch.equal(found, expected)


def test_a_learner_starts_and_learns_without_torchs_compiler() -> None:
    script = """
import sys, torch
from headrace.learner_stub.reference.ppo import Adam
from headrace.learner_stub.reference.training import run_learner
net = torch.nn.Linear(2, 1)
optimizer = Adam(net.parameters(), lr=0.1, eps=1e-5)
net(torch.ones(2)).backward()
torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
optimizer.step()
print(sorted({"torch._dynamo", "sympy"} & sys.modules.keys()))
"""
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert (result.returncode, result.stdout) == (0, "[]\n"), result.stderr
