"""The golden cases by name: which envs, which policy, which settings, and what is asked of the runner."""

from __future__ import annotations

from functools import partial
from typing import Any

import golden_envs as envs
from golden_modules import Exact, ExactNumpy, ExactRecurrent
from golden_play import Case, Play, Settings

from headrace.schemas.ledger import Discard
from headrace.workers.connectors import (
    ClipActions,
    FlattenObservations,
    FrameStack,
    MeanStd,
    PreviousActionReward,
    TimeOneHot,
    UnsquashActions,
)

LSTM = "headrace.workers.modules:lstm_actor_critic"
DEFAULT = "headrace.workers.modules:actor_critic"
FORGIVING: Settings = {"env_restart_attempts": 100, "max_env_restarts_per_window": 10_000}

# -- scripts ----------------------------------------------------------------------------------------------------------


def tour(run: Play) -> None:
    """Each way of sampling, with other weights and modes between."""
    run.fragment()
    run.sample(num_timesteps=10)
    run.weights(seq=3)
    run.fragment()
    run.sample(num_episodes=4)
    run.metrics()
    run.sample(num_timesteps=7, explore=False)
    run.sample(num_timesteps=9, random_actions=True)
    run.fragment()
    run.running()
    run.weights(seq=1, learner_epoch=1)
    run.sample(num_timesteps=6, force_reset=True)
    run.sample()
    run.discard_open(Discard.SHUTDOWN)
    run.fragment()
    run.metrics()


def fragments(run: Play) -> None:
    """Fragments only, as a worker ships them, with other weights between."""
    for seq in range(1, 4):
        run.fragment()
        run.fragment()
        run.weights(seq=seq)
    run.fragment(random_actions=True)
    run.fragment()
    run.discard_open(Discard.SHUTDOWN)
    run.metrics()


def faults(run: Play) -> None:
    """Long enough for the faults of an env's lives."""
    for _ in range(5):
        run.fragment()
    run.sample(num_episodes=3)
    run.sample(num_timesteps=20)
    run.discard_open(Discard.FENCED)
    run.fragment()
    run.metrics()


def move(run: Play) -> None:
    """A state goes into another runner, twice."""
    run.weights(seq=2)
    run.fragment()
    run.sample(num_timesteps=10)
    run.move()
    run.fragment()
    run.weights(seq=5, learner_epoch=2)
    run.sample(num_episodes=2)
    run.move()
    run.sample(num_timesteps=10, random_actions=True)
    run.fragment()
    run.metrics()


def rebuild(run: Play) -> None:
    """All envs are built again, and the module too."""
    run.fragment()
    run.make_env()
    run.fragment()
    run.sample(num_timesteps=7)
    run.runner.stop()
    run.make_env()
    run.runner.make_module()
    run.fragment()
    run.weights(seq=4)
    run.fragment()
    run.metrics()


def lives(run: Play) -> None:
    """Episodes that are the same wherever they are cut."""
    run.lives(episodes=3)
    run.weights(seq=1)
    run.lives(episodes=1, force_reset=True)


# -- one agent --------------------------------------------------------------------------------------------------------

CASES: dict[str, Case] = {}


def single(name: str, script: Any, env: Any = envs.Walk, module: Any = Exact, **settings: Any) -> None:
    """Add a case of one agent."""
    own = {key: settings.pop(key) for key in ("exact", "events", "host", "runner") if key in settings}
    CASES[f"single/{name}"] = Case(script, {"env": env, "module": module, **settings}, **own)


def fault(steps: dict[str, str] | None = None, resets: dict[str, str] | None = None, lane: int = 1) -> Settings:
    """Settings of an env whose first life does that."""
    return {"env_config": {"faults": {str(lane): {"step": steps or {}, "reset": resets or {}}}}, **FORGIVING}


OFTEN = {str(number): ("raise", "nan reward", "recreate", "wrong shape")[number // 6 % 4] for number in range(3, 90, 6)}
STORM: Settings = {
    "env_config": {
        "faults": {"0": {"step": {"4": "raise"}, "reset": {"2": "raise"}}, "2": {"step": {"9": "nan reward"}}},
        "again": {"0": {"step": {"6": "recreate"}, "reset": {"1": "raise"}}, "2": {"step": {"13": "wrong shape"}}},
    },
    **FORGIVING,
}

single("inline/walk", tour)
single("inline/walk/events", tour, events=True)
single("inline/walk/one env", tour, num_envs=1)
single("inline/walk/numpy", tour, module=ExactNumpy)
single("inline/walk/normal noise", fragments, module_config={"noise_kind": "normal"})
single("inline/walk/reads t", fragments, module_config={"reads_t": True}, num_workers=3)
single("inline/walk/recurrent", tour, module=ExactRecurrent)
single("inline/walk/lookback", tour, episode_lookback_horizon=3)
single("inline/walk/no infos", fragments, infos="none", explore=False)
single("inline/walk/whole episodes", tour, batch_mode="complete_episodes")
single("inline/walk/state", move, module=ExactRecurrent)
single("inline/walk/rebuilt", rebuild)
single("inline/walk/other worker", fragments, runner={"worker_index": 3, "incarnation": 2}, num_workers=5)
single("inline/told", fragments, env=envs.Told, runner={"worker_index": 2}, num_workers=4, max_env_seed=99)
single("inline/picture", tour, env=envs.Picture)
single("inline/nested", tour, env=envs.Nested, episode_lookback_horizon=2)
single("inline/push", tour, env=envs.Push)
single("inline/choices/recurrent", fragments, env=envs.Choices, module=ExactRecurrent, num_envs=2)
single("inline/walk/storm", faults, **STORM)
single("inline/walk/storm/events", faults, events=True, **STORM)
single("inline/walk/storm/lookback", faults, module=ExactRecurrent, episode_lookback_horizon=4, **STORM)
single("inline/walk/often", faults, **fault(OFTEN))
single("inline/walk/reset fails", faults, **fault(resets={"0": "raise", "1": "recreate"}, lane=0))

CONNECTORS: Settings = {
    "env_to_module": [partial(FrameStack, 3), PreviousActionReward, partial(TimeOneHot, 6), FlattenObservations],
}
single("inline/walk/connectors", tour, **CONNECTORS)
single("inline/walk/connectors/storm", faults, module=ExactRecurrent, **CONNECTORS, **STORM)
single("inline/nested/connectors", fragments, env=envs.Nested, env_to_module=[TimeOneHot(4), FlattenObservations])
BARE: Settings = {"env": envs.Push, "module_config": {"bare": True}}
single("inline/push/unsquash", tour, module_to_env=[UnsquashActions], **BARE)
single("inline/push/clip", fragments, module_to_env=[ClipActions], episode_lookback_horizon=1, **BARE)
single("inline/push/mean std", move, env_to_module=[MeanStd, FlattenObservations], exact=False, env=envs.Push)

single("inline/cartpole/default", tour, env="CartPole-v1", module=DEFAULT, exact=False)
single("inline/cartpole/lstm", fragments, env="CartPole-v1", module=LSTM, exact=False)
