"""The golden cases by name: which envs, which policy, which settings, and what is asked of the runner."""

from __future__ import annotations

from functools import partial
from importlib import import_module
from typing import Any

import golden_envs as envs
import gymnasium as gym
import numpy as np
from golden_dm_env import OfDeepMind
from golden_modules import Exact, ExactNumpy, ExactRecurrent
from golden_play import Case, Play, Settings

from headrace.schemas.accounts.ledger import Discard
from headrace.workers import PolicySpec, register_env
from headrace.workers.connectors import (
    AgentOneHot,
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
FORGIVING: Settings = {"env_restart_attempts": 100}

# -- scripts ----------------------------------------------------------------------------------------------------------


def tour(run: Play) -> None:
    """Sample in each way, with other weights and modes between."""
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
    """Sample fragments only, as a worker ships them, with other weights between."""
    for seq in range(1, 4):
        run.fragment()
        run.fragment()
        run.weights(seq=seq)
    run.fragment(random_actions=True)
    run.fragment()
    run.discard_open(Discard.SHUTDOWN)
    run.metrics()


def faults(run: Play) -> None:
    """Sample for as long as the faults of several lives of an env need."""
    for _ in range(5):
        run.fragment()
    run.sample(num_episodes=3)
    run.sample(num_timesteps=20)
    run.discard_open(Discard.FENCED)
    run.fragment()
    run.metrics()


def move(run: Play) -> None:
    """Go on in another runner, twice."""
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


def move_once(run: Play) -> None:
    """Go on in another runner."""
    run.sample(num_timesteps=10)
    run.weights(seq=3)
    run.fragment()
    run.move()
    run.sample(num_episodes=2)
    run.fragment()
    run.metrics()


def rebuild(run: Play) -> None:
    """Build all envs again, and the module too."""
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


def errors(run: Play) -> None:
    """Go on after each error of a call."""
    for _ in range(6):
        run.attempt(run.fragment)
    run.attempt(lambda: run.sample(num_episodes=2))
    run.attempt(run.fragment)
    run.discard_open(Discard.SHUTDOWN)
    run.metrics()


class EnoughError(Exception):
    """Breaks a fragment off."""


def broken_off(run: Play) -> None:
    """Break fragments off after some polls. The next call goes on with one, or cuts it as it stands.

    `on_wait` is apart: a wait for a slow process is no poll.
    """
    polls = 0

    def count() -> None:
        nonlocal polls
        polls += 1
        if polls % 5 == 0:
            raise EnoughError

    for _ in range(4):
        run.attempt(lambda: run.fragment(on_poll=count, on_wait=lambda: None))
    run.cut_fragment()
    run.attempt(lambda: run.fragment(on_poll=count, on_wait=lambda: None))
    run.fragment()
    run.metrics()


def learn(run: Play) -> None:
    """Merge what connectors learn, and set it beside other weights."""
    runner, state = run.runner, {}
    for seq in range(1, 4):
        run.sample(num_timesteps=8)
        state = runner.merge_connector_updates(state, [runner.take_connector_update()])
        run.note("learnt", state)
        run.weights(seq=seq, more=state)
        run.fragment()


def long(run: Play) -> None:
    """Sample until blocks of random numbers are used up and windows of metrics are full."""
    for seq in range(1, 7):
        run.fragment()
        run.fragment()
        run.metrics()
        run.weights(seq=seq)


def at_random(run: Play) -> None:
    """Take random actions only, in a runner without a policy."""
    run.fragment(random_actions=True)
    run.sample(num_timesteps=9, random_actions=True)
    run.sample(num_episodes=2, random_actions=True)
    run.metrics()


def no_policy(spaces: Any) -> Any:
    """Build no policy."""
    raise NotImplementedError


def driven(run: Play) -> None:
    """Drive external episodes, two at a time."""
    episodes = envs.Idle.newest[0].episodes
    answers: list[Any] = []

    def say(episode: str, t: int, action: int | None = None) -> None:
        observation = np.array([t, 2 * t, len(episode)], np.float32)
        if action is None:
            episodes.ask(episode, observation, answers.append)
        else:
            episodes.log_action(episode, observation, np.int64(action), answers.append)
        run.fragment()

    episodes.start("one")
    for t in range(5):
        say("one", t, action=2 if t == 2 else None)
        episodes.log_returns("one", t / 2, {"t": t} if t % 2 else None)
        run.weights(seq=t + 1)
    episodes.start("two", training_enabled=False)
    say("two", 0)
    say("one", 5)
    episodes.end("one", np.zeros(3, np.float32), answers.append, truncated=True)
    run.fragment()
    episodes.start("three")
    say("three", 0)
    say("two", 1)
    episodes.abort("two", "the client left")
    run.fragment()
    run.weights(seq=1, learner_epoch=1)
    say("three", 1)
    run.discard_open(Discard.SHUTDOWN)
    run.note("answers", [[answer.action, answer.weights] for answer in answers])
    run.metrics()


def threaded(run: Play) -> None:
    """Compare episodes that an external env plays in its own thread."""
    run.weights(seq=2)
    run.lives(episodes=7)


def lives(run: Play) -> None:
    """Compare episodes, which are the same wherever they are cut."""
    run.weights(seq=1)
    run.lives(episodes=4)


def lives_with_faults(run: Play) -> None:
    """Compare episodes, and the first failure of each env, which comes early."""
    lives(run)
    run.first_failures()


# -- one agent --------------------------------------------------------------------------------------------------------

CASES: dict[str, Case] = {}


def single(name: str, script: Any, env: Any = envs.Walk, module: Any = Exact, **settings: Any) -> None:
    """Add a case of one agent."""
    own = {key: settings.pop(key) for key in ("exact", "events", "host", "runner") if key in settings}
    CASES[f"single/{name}"] = Case(script, {"env": env, "module": module, **settings}, **own)


def fault(steps: dict[str, str] | None = None, resets: dict[str, str] | None = None, lane: int = 1) -> Settings:
    """Return the settings for an env whose first life has these faults."""
    return {"env_config": {"faults": {str(lane): {"step": steps or {}, "reset": resets or {}}}}, **FORGIVING}


OFTEN: Settings = {
    "env_config": {
        "faults": {"1": {"step": {"3": "any"}}, "2": {"reset": {"1": "any"}}},
        "again": {"1": {"step": {"4": "any"}, "reset": {"3": "any"}}, "2": {"step": {"9": "any"}}},
    },
    **FORGIVING,
}
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
single("inline/walk/normal noise", fragments, module_config={"noise_kind": "normal"}, exact=False)
single("inline/walk/reads t", fragments, module_config={"reads_t": True}, num_workers=3)
single("inline/walk/recurrent", tour, module=ExactRecurrent)
single("inline/walk/lookback", tour, episode_lookback_horizon=3)
single("inline/walk/no infos", fragments, infos="none", explore=False)
single("inline/walk/whole episodes", tour, batch_mode="complete_episodes")
single("inline/walk/state", move, module=ExactRecurrent)
single("inline/walk/rebuilt", rebuild)
single("inline/walk/other worker", fragments, runner={"worker_index": 3, "incarnation": 2}, num_workers=5)
register_env("golden walk", envs.Walk)
single("inline/registered", rebuild, env="golden walk", module=ExactNumpy)
single("inline/told", fragments, env=envs.Told, runner={"worker_index": 2}, num_workers=4, max_env_seed=99)
single("inline/picture", tour, env=envs.Picture)
single("inline/nested", tour, env=envs.Nested, episode_lookback_horizon=2)
single("inline/push", tour, env=envs.Push)
single("inline/choices/recurrent", fragments, env=envs.Choices, module=ExactRecurrent, num_envs=2)
single("inline/walk/storm", faults, **STORM)
single("inline/walk/storm/events", faults, events=True, **STORM)
single("inline/walk/storm/lookback", faults, module=ExactRecurrent, episode_lookback_horizon=4, **STORM)
single("inline/walk/often", faults, **OFTEN)
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

UNFORGIVING: Settings = {**fault({"5": "raise", "30": "nan reward"}), "restart_failed_sub_environments": False}
GIVES_UP: Settings = {**STORM, "env_restart_attempts": 1}
OUTSIDE = fault({"9": "outside, finite"})

LONG: Settings = {"rollout_fragment_length": 24, "metrics_num_episodes_for_smoothing": 10, "num_workers": 3}
single("inline/walk/long", long, env_config={"odds": 2}, **LONG)
single("inline/walk/long/recurrent", long, env_config={"odds": 3}, module=ExactRecurrent, num_envs=1, **LONG)


class Touchy:
    """Callbacks that raise now and then."""

    def __init__(self) -> None:
        self._steps = 0

    def on_episode_step(self) -> None:
        self._steps += 1
        if self._steps % 31 == 0:
            raise RuntimeError("enough")


single("inline/walk/unforgiving", errors, **UNFORGIVING)
single("inline/walk/gives up", errors, module=ExactRecurrent, **GIVES_UP)
single("inline/walk/callback raises", errors, callbacks=[Touchy])
single("inline/walk/broken off", broken_off)
single("inline/walk/broken off/whole episodes", broken_off, batch_mode="complete_episodes", module=ExactRecurrent)
single("inline/walk/outside", faults, strict_bounds=True, **OUTSIDE)
single("inline/walk/outside unchecked", faults, **OUTSIDE)
single("inline/nested/no policy", at_random, env=envs.Nested, module=no_policy)
single("inline/push/learn", learn, env=envs.Push, env_to_module=[MeanStd], exact=False)

# Envs that gymnasium steps as one vector, and those that are one already.
single("sync", tour, gym_env_vectorize_mode="sync")
single("sync/storm", faults, gym_env_vectorize_mode="sync", **STORM)
single("async", fragments, gym_env_vectorize_mode="async")
single("async/fault", faults, gym_env_vectorize_mode="async", **fault({"11": "raise"}), module=ExactRecurrent)
single("sync vector/next step", tour, env=envs.vector_of(envs.Walk, "sync", "NextStep"))
single("sync vector/same step", tour, env=envs.vector_of(envs.Nested, "sync", "SameStep"), module=ExactRecurrent)
single("async vector/next step", fragments, env=envs.vector_of(envs.Push, "async", "NextStep"), **CONNECTORS)
single("async vector/same step", fragments, env=envs.vector_of(envs.Walk, "async", "SameStep"), num_envs=2)
gym.register("golden/Rows-v0", vector_entry_point=envs.Rows)
ROWS: Settings = {"env": "golden/Rows-v0", "gym_env_vectorize_mode": "vector_entry_point"}
single("vector entry point", tour, **ROWS)
single("vector entry point/recurrent", fragments, module=ExactRecurrent, events=True, **ROWS)
single(
    "vector entry point/cartpole",
    fragments,
    env="CartPole-v1",
    module=DEFAULT,
    exact=False,
    gym_env_vectorize_mode="vector_entry_point",
)
single("pool", tour, env=envs.Pool)
single("pool/recurrent", fragments, env=envs.Pool, module=ExactRecurrent, episode_lookback_horizon=2)
single("pool/in part", tour, env=envs.Pool, env_config={"batch_size": 2})
single("pool/in part/recurrent", fragments, env=envs.Pool, env_config={"batch_size": 1}, module=ExactRecurrent)
single("pool/in part/fails", faults, env=envs.Pool, env_config={"batch_size": 2, "fails": 17}, **FORGIVING)
single("own vector", tour, env=envs.OwnVector)
single("own vector/storm", faults, env=envs.OwnVector, module=ExactRecurrent, **STORM)
single("own vector/all fail", faults, env=envs.OwnVector, env_config={"all": 21}, events=True, **FORGIVING)
single("wrapped vector", fragments, env=envs.wrapped)
single("wrapped vector/storm", faults, env=envs.wrapped, **STORM)
single("dm_env", tour, env=OfDeepMind)
single("dm_env/fault", faults, env=OfDeepMind, module=ExactRecurrent, **fault({"11": "raise"}))

# Envs that live elsewhere.
PROCESS: Settings = {"env_placement": "process", "envs_per_process": 2, "num_envs": 4}
ONE: Settings = {**PROCESS, "num_envs": 1, **FORGIVING}
WALK = "golden_envs:Walk"
single("process", tour, env=WALK, **PROCESS)
single("process/nested", fragments, env="golden_envs:Nested", module=ExactRecurrent, **PROCESS)
single("process/told/lookback", fragments, env="golden_envs:Told", episode_lookback_horizon=2, num_workers=2, **PROCESS)
single("process/whole episodes", tour, env=WALK, batch_mode="complete_episodes", **CONNECTORS, **PROCESS)
single("process/state", move_once, env="golden_envs:Push", module_to_env=[UnsquashActions], **PROCESS)
single("process/rebuilt", rebuild, env=WALK, **PROCESS)
single("process/raises", faults, env=WALK, **ONE, env_config={"faults": {"0": {"step": {"10": "raise"}}}})
single("process/killed", faults, env=WALK, **ONE, env_config={"faults": {"0": {"step": {"10": "kill"}}}})
single("process/exits", faults, env=WALK, **ONE, env_config={"faults": {"0": {"step": {"17": "exit"}}}}, events=True)
single("process/bad data", faults, env=WALK, **ONE, env_config={"faults": {"0": {"step": {"12": "nan reward"}}}})
single(
    "process/hangs",
    faults,
    env=WALK,
    **ONE,
    env_config={"faults": {"0": {"step": {"12": "hang"}}}},
    env_step_timeout_s=0.5,
)
single(
    "process/neighbour",
    lives_with_faults,
    events=True,
    env=WALK,
    **{**PROCESS, "num_envs": 2},
    env_config={"faults": {"0": {"step": {"10": "kill"}}}},
)
single("process/long", long, env=WALK, env_config={"odds": 2}, **LONG, **PROCESS)
single("process/replaced", faults, env=WALK, env_process_max_episodes=5, **ONE)
single("process/broken off", broken_off, env=WALK, **PROCESS)
READY: Settings = {**PROCESS, "remote_env_batch_wait_ms": 0}
single("process/ready", lives, env="golden_envs:Jittery", **READY)
single("process/ready/recurrent", lives, env="golden_envs:Jittery", module=ExactRecurrent, **CONNECTORS, **READY)
single("process/ready/lstm", lives, env="golden_envs:Jittery", module=LSTM, exact=False, **READY)
READY_ONE: Settings = {**READY, "num_envs": 1}
single("process/ready/one env", tour, env="golden_envs:Jittery", episode_lookback_horizon=2, **READY_ONE)
single("process/ready/one env/state", move_once, env="golden_envs:Nested", module=ExactRecurrent, **READY_ONE)
single("process/ready/storm", lives_with_faults, events=True, env="golden_envs:Jittery", **READY, **STORM)
single("process/halves", lives, env="golden_envs:Jittery", module=ExactRecurrent, double_buffering=True, **PROCESS)
single(
    "process/halves/whole episodes",
    lives,
    env="golden_envs:Nested",
    double_buffering=True,
    **PROCESS,
    batch_mode="complete_episodes",
)
HOST = {"env": "golden_envs:Told", "num_envs": 4}
BAD_HOST = {"env": "golden_envs:Walk", "num_envs": 1, "env_config": {"faults": {"0": {"step": {"10": "raise"}}}}}
single("remote", tour, env="golden_envs:Told", num_envs=4, host=HOST)
single(
    "remote/recurrent",
    fragments,
    env="golden_envs:Told",
    num_envs=4,
    host=HOST,
    module=ExactRecurrent,
    runner={"worker_index": 1},
    num_workers=2,
)
single("remote/state", move_once, env="golden_envs:Told", num_envs=4, host=HOST)
single("remote/ready", lives, env="golden_envs:Told", num_envs=4, host=HOST, remote_env_batch_wait_ms=0)
single(
    "remote/halves", lives, env="golden_envs:Told", num_envs=4, host=HOST, double_buffering=True, module=ExactRecurrent
)
single("remote/fault", faults, env=WALK, num_envs=1, host=BAD_HOST, **FORGIVING)
single("remote/ready/fault", faults, env=WALK, num_envs=1, host=BAD_HOST, remote_env_batch_wait_ms=0, **FORGIVING)

# Envs that drive themselves.
EXTERNAL: Settings = {"num_envs": 1, "external_fragment_max_age_s": 100.0}
single("external", threaded, env=envs.Serving, **EXTERNAL)
single("external/logged", threaded, env=envs.Serving, module=ExactRecurrent, env_config={"logged": 3}, **EXTERNAL)
single("external/no exploration", threaded, env=envs.Serving, explore=False, **EXTERNAL)
single("external/untrained", threaded, env=envs.Serving, env_config={"untrained": True}, **CONNECTORS, **EXTERNAL)
single("external/run raises", threaded, env=envs.Serving, env_config={"fails": 4}, **EXTERNAL)
single("external/driven", driven, env=envs.Idle, num_envs=2, external_fragment_max_age_s=0.05)
single(
    "external/driven/recurrent",
    driven,
    env=envs.Idle,
    num_envs=2,
    external_fragment_max_age_s=0.05,
    events=True,
    module=ExactRecurrent,
    episode_lookback_horizon=2,
)

# -- several agents ---------------------------------------------------------------------------------------------------

SHARED: Settings = {"policies": ["shared"]}
BY_AGENT: Settings = {"policies": {"x": None, "y": PolicySpec(module_config={"reads_t": True}), "z": ExactRecurrent}}
CHANGING: Settings = {
    "policies": {"left": None, "right": ExactRecurrent},
    "policy_mapping_fn": "golden_envs:changing_policy_of",
}
CROWD: Settings = {
    "env": "golden_envs:Crowd",
    "policies": {"masked": None, "shoves": None},
    "policy_mapping_fn": envs.policy_of,
    "missing_final_observation": "repeat",
}
OWN_PIECES: Settings = {
    "policies": {
        "masked": PolicySpec(env_to_module=[TimeOneHot(4)]),
        "shoves": PolicySpec(
            ExactRecurrent,
            {"bare": True},
            env_to_module=[PreviousActionReward, AgentOneHot(4), FlattenObservations, partial(FrameStack, 2)],
            module_to_env=[UnsquashActions, ClipActions],
        ),
    }
}


def multi(name: str, script: Any, env: Any = envs.Together, module: Any = Exact, **settings: Any) -> None:
    """Add a case of several agents."""
    own = {key: settings.pop(key) for key in ("exact", "events", "host", "runner") if key in settings}
    CASES[f"multi/{name}"] = Case(script, {"env": env, "module": module, **settings}, several=True, **own)


multi("inline/shared", tour, **SHARED)
multi("inline/shared/events", tour, events=True, **SHARED)
multi("inline/shared/recurrent", tour, module=ExactRecurrent, **SHARED)
multi("inline/shared/lookback", tour, episode_lookback_horizon=3, **SHARED)
multi("inline/shared/state", move, module=ExactRecurrent, **SHARED)
multi("inline/shared/rebuilt", rebuild, **SHARED)
register_env("golden agents", lambda context: envs.Together(context))
multi("inline/registered", rebuild, env="golden agents", module=ExactRecurrent, **SHARED)
multi("inline/shared/default", fragments, module=DEFAULT, exact=False, **SHARED)
multi("inline/shared/other worker", fragments, runner={"worker_index": 2, "incarnation": 4}, num_workers=4, **SHARED)
multi("inline/shared/no infos", fragments, infos="none", explore=False, **SHARED)
multi("inline/by agent", tour, **BY_AGENT)
multi("inline/by agent/agent steps", tour, count_steps_by="agent_steps", **BY_AGENT)
multi("inline/changing", tour, **CHANGING)
multi("inline/changing/whole episodes", tour, batch_mode="complete_episodes", **CHANGING)
multi("inline/changing/storm", faults, **CHANGING, **STORM)
multi("inline/shared/storm/events", faults, events=True, **SHARED, **STORM)
multi("inline/shared/often", faults, **SHARED, **OFTEN, episode_lookback_horizon=2)
multi("inline/crowd/often", faults, module=ExactRecurrent, **CROWD, **OFTEN)
multi("inline/shared/reset fails", faults, **SHARED, **fault(resets={"0": "raise", "1": "recreate"}, lane=0))
multi("inline/crowd", tour, **CROWD)
multi("inline/crowd/events", tour, events=True, **CROWD)
multi("inline/crowd/recurrent/agent steps", tour, module=ExactRecurrent, count_steps_by="agent_steps", **CROWD)
multi(
    "inline/crowd/lookback/dropped", tour, **{**CROWD, "missing_final_observation": "drop"}, episode_lookback_horizon=3
)
multi("inline/crowd/missing is an error", faults, **{**CROWD, "missing_final_observation": "error"}, **FORGIVING)
multi("inline/crowd/storm", faults, **CROWD, **STORM)
multi("inline/crowd/whole episodes", fragments, batch_mode="complete_episodes", **CROWD)
multi("inline/crowd/connectors", tour, **{**CROWD, **OWN_PIECES})
multi("inline/crowd/connectors/storm", faults, **{**CROWD, **OWN_PIECES}, **STORM)
multi("inline/crowd/connectors/state", move, **{**CROWD, **OWN_PIECES})
multi("inline/crowd/mean std", move, **CROWD, env_to_module=[FlattenObservations, MeanStd], exact=False, module=LSTM)
multi("inline/crowd/lstm", fragments, **CROWD, module=LSTM, exact=False)

multi("inline/crowd/long", long, **CROWD, **LONG)
multi("inline/by agent/long", long, **BY_AGENT, **LONG, env_config={"limit": 2})
multi("inline/crowd/learn", learn, **CROWD, env_to_module=[FlattenObservations, MeanStd], exact=False)
multi("inline/shared/unforgiving", errors, **SHARED, **UNFORGIVING)
multi("inline/shared/gives up", errors, module=ExactRecurrent, **SHARED, **GIVES_UP)
multi("inline/shared/callback raises", errors, callbacks=[Touchy], **SHARED)
multi("inline/crowd/broken off", broken_off, **CROWD)
multi("inline/crowd/no policy", at_random, **{**CROWD, "module": no_policy})
GIVEN = PolicySpec(ExactRecurrent, observation_space=envs.PLAIN, action_space=envs.CHOICE)
multi("inline/given spaces", tour, **{**CHANGING, "policies": {"left": GIVEN, "right": None, "unused": GIVEN}})

AGENTS: Settings = {"env": "golden_envs:Together", **SHARED}
multi("process", tour, **AGENTS, **PROCESS)
multi("process/crowd", tour, **CROWD, **PROCESS)
multi("process/crowd/connectors", fragments, **{**CROWD, **OWN_PIECES}, **PROCESS)
multi("process/crowd/agent steps", fragments, count_steps_by="agent_steps", module=ExactRecurrent, **CROWD, **PROCESS)
multi("process/crowd/long", long, **CROWD, **LONG, **PROCESS)
multi("process/state", move_once, module=ExactRecurrent, **AGENTS, **PROCESS)
multi("process/raises", faults, **CROWD, **ONE, env_config={"faults": {"0": {"step": {"10": "raise"}}}})
multi("process/killed", faults, **AGENTS, **ONE, env_config={"faults": {"0": {"step": {"10": "kill"}}}}, events=True)
multi(
    "process/hangs",
    faults,
    **AGENTS,
    **ONE,
    env_config={"faults": {"0": {"step": {"12": "hang"}}}},
    env_step_timeout_s=0.5,
)
JITTERY_AGENTS: Settings = {"env": "golden_envs:JitteryTogether", **SHARED}
multi("process/ready", lives, **JITTERY_AGENTS, **READY)
multi("process/ready/crowd", lives, module=ExactRecurrent, **CROWD, **READY)
multi("process/ready/crowd/connectors", lives, **{**CROWD, **OWN_PIECES}, **READY)
multi("process/ready/one env", tour, **{**CROWD, **OWN_PIECES}, **READY_ONE)
multi("process/ready/one env/state", move_once, **JITTERY_AGENTS, **READY_ONE)
# Whole episodes only: an aborted one of which all agents that were cut are done could not be told from a whole one.
multi("process/ready/storm", lives_with_faults, events=True, batch_mode="complete_episodes", **CROWD, **READY, **STORM)
multi("process/halves", lives, module=ExactRecurrent, **JITTERY_AGENTS, **PROCESS, double_buffering=True)
multi("process/halves/lstm", lives, module=LSTM, exact=False, **JITTERY_AGENTS, **PROCESS, double_buffering=True)
CROWD_HOST = {"env": "golden_envs:Crowd", "num_envs": 4}
multi("remote/crowd", tour, host=CROWD_HOST, **{**CROWD, "num_envs": 4})
multi("remote/crowd/connectors", fragments, host=CROWD_HOST, **{**CROWD, **OWN_PIECES, "num_envs": 4})
multi("remote/crowd/ready", lives, host=CROWD_HOST, **CROWD, num_envs=4, remote_env_batch_wait_ms=0)
BAD_CROWD_HOST = {**BAD_HOST, "env": "golden_envs:Crowd"}
multi("remote/fault", faults, host=BAD_CROWD_HOST, **{**CROWD, **FORGIVING, "num_envs": 1})

multi("external", threaded, **{**CROWD, "env": envs.ServingAgents}, **EXTERNAL)
SEES_MORE: Settings = {"env_to_module": [TimeOneHot(4)], "module": ExactRecurrent}
multi(
    "external/logged",
    threaded,
    **{**CROWD, **SEES_MORE, "env": envs.ServingAgents},
    **EXTERNAL,
    env_config={"logged": 3},
)

GAME: Settings = {"policies": ["player"], "max_env_seed": 2**31 - 1, "num_envs": 2}


def game(name: str, kind: str) -> Any:
    """Return a creator of a PettingZoo env."""
    return lambda context: getattr(import_module(name), kind)(**context)


multi("pettingzoo/turns", tour, env=game("pettingzoo.classic.tictactoe_v3", "env"), **GAME)
multi(
    "pettingzoo/turns/recurrent",
    fragments,
    env=game("pettingzoo.classic.connect_four_v3", "env"),
    **GAME,
    module=ExactRecurrent,
    count_steps_by="agent_steps",
)
multi(
    "pettingzoo/turns/lstm",
    fragments,
    env=game("pettingzoo.classic.leduc_holdem_v4", "env"),
    **GAME,
    module=LSTM,
    exact=False,
)
multi("pettingzoo/parallel", tour, env=game("pettingzoo.classic.rps_v2", "parallel_env"), **GAME)
multi("pettingzoo/process", fragments, env="pettingzoo.classic.rps_v2:parallel_env", **{**PROCESS, **GAME})
multi(
    "pettingzoo/parallel/spread",
    tour,
    env=game("mpe2.simple_spread_v3", "parallel_env"),
    **GAME,
    module=DEFAULT,
    exact=False,
    env_config={"max_cycles": 10},
)
