"""The learner's own Adam: the same steps as torch's Adam, and a start without torch's compiler."""

from __future__ import annotations

import copy
import subprocess
import sys

import pytest
import torch
from torch import nn

from headrace.learner_stub.reference import adam
from headrace.learner_stub.reference.adam import Adam

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
        if isinstance(optimizer, Adam):
            optimizer.lr *= 0.9
        else:
            optimizer.param_groups[0]["lr"] *= 0.9
        optimizer.step()


@pytest.mark.parametrize("large", [0, 8, 1 << 15])
@pytest.mark.parametrize("lr", [0.1, 3e-4])
def test_steps_equal_those_of_torchs_adam_to_the_bit(lr: float, large: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same steps come out when all parameters move alone, when some do, and when none does."""
    monkeypatch.setattr(adam, "_LARGE", large)
    ours, theirs = _net(), _net()
    _learn(ours, Adam(ours.parameters(), lr=lr, eps=1e-5), 0, 40)
    _learn(theirs, torch.optim.Adam(theirs.parameters(), lr=lr, eps=1e-5), 0, 40)
    for found, expected in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert torch.equal(found, expected)


@pytest.mark.parametrize("begun_by", [Adam, torch.optim.Adam])
def test_a_loaded_state_continues_to_the_bit(begun_by: type[Adam]) -> None:
    """The state may be one of torch's Adam, as in older checkpoints."""
    whole, half = _net(), _net()
    _learn(whole, Adam(whole.parameters(), lr=0.1, eps=1e-5), 0, 20)
    before = begun_by(half.parameters(), lr=0.1, eps=1e-5)
    _learn(half, before, 0, 11)
    after = Adam(half.parameters(), lr=0.1 * 0.9**11, eps=1e-5)
    after.load_state_dict(copy.deepcopy(before.state_dict()))
    _learn(half, after, 11, 20)
    for found, expected in zip(half.parameters(), whole.parameters(), strict=True):
        assert torch.equal(found, expected)


def test_a_learner_starts_and_learns_without_torchs_compiler() -> None:
    script = """
import sys, torch
from headrace.learner_stub.reference.adam import Adam
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
