"""The PPO of the guide learns on a fleet."""

from __future__ import annotations

import pytest

from bench.own_ppo import of_fleet


@pytest.mark.slow
@pytest.mark.thorough
def test_the_ppo_of_the_guide_learns_cartpole() -> None:
    run = of_fleet("fleet", "CartPole-v1", seed=1, steps=80_000)
    assert run.best > 100, run  # an untrained policy has about 22
