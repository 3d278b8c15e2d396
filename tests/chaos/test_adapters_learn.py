"""Each adapter of the documentation's page learns its envs, by the page's own blocks, while a process is killed."""

from __future__ import annotations

import importlib.util

import pytest

from bench.adapters import Arm, arms, measured

ARMS = {f"{arm.name} {arm.env}": arm for arm in arms() if not arm.name.endswith(" alone")}


@pytest.mark.chaos
@pytest.mark.slow
@pytest.mark.thorough
@pytest.mark.parametrize("arm", ARMS.values(), ids=ARMS)
def test_an_env_is_learned_and_the_books_balance_though_a_process_is_killed(arm: Arm) -> None:
    if importlib.util.find_spec(arm.needs) is None:
        pytest.skip(f"{arm.needs} is not installed")
    run = measured(arm, seed=1)
    assert run.mean_return >= arm.mark, run
    assert run.killed == 1
