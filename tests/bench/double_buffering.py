"""Envs that take time and a policy that takes time: one after the other, by halves, and what would be ideal, in turns.

Of processes with two envs each one env steps while the policy acts for the other; a pass for half the envs takes half
as long as one for all. In steps of all envs:

    lock-step     10 ms of envs, two a process, and then 5 ms of policy: 15 ms
    by halves     10 ms of envs, and both halves of the policy meanwhile: 10 ms, which is 1.5 times as fast and no more

Nothing here computes, so that cores do not count; sleepers do wake late on a busy machine, though, which is why the
ideal is measured too: the slower of the envs by halves with a policy that takes no time, and the policy without envs.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch

from bench.sampler import Headrace
from bench.sleepers import STEP_S, WIDTH
from bench.table import Row, rows_of
from bench.turns import Turn

PASS_S = 0.005
"""Seconds for a forward pass of all envs."""
IN_PROCESS = 2
MARKS = {"by halves": 1.5}
"""The target: the least ratio to lock-step. Above the arithmetic's ratio, halves hide some of our own time."""


def measure(seconds: float, rounds: int) -> list[Row]:
    """Return rows of lock-step, halves and the ideal: the rate of two loops that run on their own."""
    torch.set_num_threads(1)
    shared: dict[str, Any] = {
        "env": "bench.sleepers:Sleeper",
        "env_placement": "process",
        "envs_per_process": IN_PROCESS,
    }
    slow = {**shared, "module": SleepingPolicy}
    loops = {"lock-step": Headrace(WIDTH, **slow), "by halves": Headrace(WIDTH, double_buffering=True, **slow)}
    envs = Headrace(WIDTH, module=IdlePolicy, double_buffering=True, **shared)
    turns = []
    for _ in range(rounds):
        round_ = {name: _turn(loop.run, seconds) for name, loop in loops.items()}
        alone = [_turn(envs.run, seconds / 2), _turn(_policy_alone, seconds / 2)]
        turns.append({**round_, "ideal": min(alone, key=lambda turn: turn.rate)})
    for loop in (*loops.values(), envs):
        loop.stop()
    case = f"{WIDTH} envs of {STEP_S * 1000:g} ms, a policy of {PASS_S * 1000:g} ms"
    return rows_of("halves", case, "env steps/s", turns, "lock-step", MARKS)


def _turn(run: Callable[[float], float], seconds: float) -> Turn:
    start, before = time.perf_counter(), time.process_time()
    rate = run(seconds)
    return Turn(rate, rate * (time.perf_counter() - start) / (time.process_time() - before))


def _policy_alone(seconds: float) -> float:
    """Return lanes per second, half of them at a time."""
    passes, start = 0, time.perf_counter()
    while (elapsed := time.perf_counter() - start) < seconds:
        time.sleep(PASS_S / 2)
        passes += 1
    return passes * WIDTH / 2 / elapsed


class SleepingPolicy(torch.nn.Module):
    """Only sleeps at each pass, half as long for half the rows, like a large network."""

    noise_size, noise_kind = 1, "uniform"
    pass_s = PASS_S

    def __init__(self, spaces: Any) -> None:
        super().__init__()

    def forward_inference(self, batch: dict[str, Any]) -> dict[str, Any]:
        time.sleep(self.pass_s * len(batch["obs"]) / WIDTH)
        return {"actions": torch.zeros(len(batch["obs"]), dtype=torch.int64)}

    forward_exploration = forward_train = forward_inference


class IdlePolicy(SleepingPolicy):
    """Returns at once."""

    pass_s = 0.0
