"""Action masks: every module, connector and random action of ours obeys one, or an error says why not."""

from __future__ import annotations

from functools import partial
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium.vector import AutoresetMode

from headrace.schemas.chunks.spaces import Dict, Discrete, MultiBinary, Space, Spaces
from headrace.schemas.errors import ConfigError, EnvContractError, EnvRestartBudgetError, ModuleError
from headrace.workers import EnvContext
from headrace.workers.agents.env import MultiAgentEnv
from headrace.workers.connectors import Connector, FlattenObservations, FrameStack, MeanStd, PreviousActionReward, Rows
from headrace.workers.envs import restarts
from headrace.workers.envs.action_masks import ActionMask
from headrace.workers.envs.spaces import convert
from headrace.workers.modules import actor_critic
from support.envs.native_vectors import vector_of
from support.envs.toy import check_books, runner
from support.envs.toy_agents import multi_runner

gyms = gym.spaces
FOUR, VECTOR = gyms.Discrete(4), gyms.Box(-1, 1, (3,))


def legal_of(action: Any, value: Any, choices: Any) -> list[bool]:
    """Return for each choice that an action made whether `choices`, a list of legal numbers for each, has it."""
    if isinstance(action, gyms.Dict):
        parts = [np.ravel(value[key]) for key, sub in action.items() if not isinstance(sub, gyms.Box)]
        picked = np.concatenate(parts)
    else:
        picked = np.ravel(value)
    return [int(number) in legal for number, legal in zip(picked, choices, strict=True)]


class Masked(gym.Env[Any, Any]):
    """Asserts that each action is among `legal`: for each choice the legal numbers. `mask` is what it shows."""

    def __init__(self, leaf: Any, action: Any, mask: Any, legal: Any, nested: bool = False) -> None:
        inner = gyms.Dict(action_mask=leaf, at=VECTOR)
        self.observation_space = gyms.Dict(state=inner, more=gyms.Discrete(2)) if nested else inner
        self.action_space = action
        self.mask, self.legal, self.nested, self.seen = mask, legal, nested, 0

    def see(self) -> Any:
        inner = {"action_mask": self.mask, "at": self.np_random.uniform(-1, 1, 3).astype(np.float32)}
        return {"state": inner, "more": 1} if self.nested else inner

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.t = 0
        return self.see(), {}

    def step(self, action: Any) -> Any:
        assert all(legal_of(self.action_space, action, self.legal)), f"{action} is illegal"
        self.t += 1
        return self.see(), 0.0, self.t >= 7, False, {}


def flags(numbers: Any, dtype: Any = np.int8) -> Any:
    return np.array(numbers, dtype)


PART = gyms.Dict(amount=gyms.Box(-1, 1, (2,)), kind=gyms.Discrete(3, start=5), on=gyms.MultiBinary(2))
FORMS: dict[str, tuple[Any, ...]] = {
    "int8": (gyms.Box(0, 1, (4,), np.int8), FOUR, flags([0, 1, 0, 1]), [{1, 3}]),
    "uint8": (gyms.Box(0, 255, (4,), np.uint8), FOUR, flags([0, 0, 0, 1], np.uint8), [{3}]),
    "bool": (gyms.Box(0, 1, (4,), np.bool_), FOUR, flags([0, 1, 0, 0], np.bool_), [{1}]),
    "float": (gyms.Box(-np.inf, np.inf, (4,)), FOUR, flags([0, 0, 1, 0], np.float32), [{2}]),
    "binary": (gyms.MultiBinary(4), FOUR, flags([0, 1, 1, 0]), [{1, 2}]),
    "numbers of two": (gyms.MultiDiscrete([2] * 4), FOUR, flags([0, 1, 1, 0], np.int64), [{1, 2}]),
    "a later start": (gyms.MultiBinary(3), gyms.Discrete(3, start=-1), flags([0, 0, 1]), [{1}]),
    "nested": (gyms.MultiBinary(4), FOUR, flags([0, 0, 1, 0]), [{2}], True),
    "several": (gyms.MultiBinary(7), gyms.MultiDiscrete([4, 3]), flags([0, 0, 0, 1, 1, 0, 0]), [{3}, {0}]),
    "rows": (gyms.MultiBinary((2, 3)), gyms.MultiDiscrete([3, 3]), flags([[0, 0, 1], [0, 1, 0]]), [{2}, {1}]),
    "a tuple": (
        gyms.Tuple([gyms.MultiBinary(4), gyms.MultiBinary(3)]),
        gyms.MultiDiscrete([4, 3]),
        (flags([0, 1, 0, 0]), flags([0, 0, 1])),
        [{1}, {2}],
    ),
    "switches": (gyms.MultiBinary(4), gyms.MultiBinary(2), flags([1, 0, 0, 1]), [{0}, {1}]),
    "parts": (
        gyms.Dict(kind=gyms.MultiBinary(3)),
        PART,
        {"kind": flags([0, 1, 0])},
        [{6}, {0, 1}, {0, 1}],
    ),
    "parts side by side": (gyms.MultiBinary(7), PART, flags([0, 0, 1, 1, 0, 0, 1]), [{7}, {0}, {1}]),
}
SPECS = ["actor_critic", "lstm_actor_critic"]
PIECES = [PreviousActionReward, FlattenObservations, MeanStd, partial(FrameStack, 2)]


@pytest.mark.parametrize("pieces", [[], [MeanStd], PIECES], ids=["plain", "scaled", "all"])
@pytest.mark.parametrize("name", FORMS)
def test_every_form_of_a_mask_binds_every_module_and_random_actions(name: str, pieces: list[Any]) -> None:
    settings: dict[str, Any] = {"num_envs": 2, "env_to_module": pieces, "restart_failed_sub_environments": False}
    for module in SPECS:
        named = f"headrace.workers.modules:{module}"
        with runner(lambda context: Masked(*FORMS[name]), module=named, **settings) as sampler:
            for how in ({"explore": True}, {"explore": False}, {"random_actions": True}):
                assert sum(map(len, sampler.sample(num_timesteps=60, **how))) >= 60


def test_masks_keep_values_dtype_and_place_through_all_pieces() -> None:
    with runner(lambda context: Masked(*FORMS["nested"]), env_to_module=PIECES) as sampler:
        (chunk,) = sampler.sample(num_timesteps=5)
        assert sampler.spaces.observation == Dict(
            spaces={"action_mask": MultiBinary(shape=(4,)), "obs": sampler.spaces.observation.spaces["obs"]}
        )
    assert chunk.obs["action_mask"].dtype == np.int8
    assert chunk.obs["action_mask"].tolist() == [[0, 0, 1, 0]] * 6


@pytest.mark.parametrize("name", ["several", "parts"])
@pytest.mark.parametrize("module", SPECS)
def test_a_learner_computes_log_probabilities_over_the_same_choices(module: str, name: str) -> None:
    with runner(lambda context: Masked(*FORMS[name]), module=f"headrace.workers.modules:{module}") as sampler:
        (chunk,) = sampler.sample(num_timesteps=6)
        trained: Any = sampler.module
    obs = nested_tensors(chunk.obs)
    states = {part: torch.from_numpy(row[None]) for part, row in chunk.state_in.items()}
    answer = trained.forward_train({"obs": obs, "lengths": torch.tensor([7]), "state_in": states})
    logp = trained.logp(answer["action_dist_inputs"][:-1], nested_tensors(chunk.actions))
    np.testing.assert_allclose(logp.detach().numpy(), chunk.columns["logp"], atol=1e-5)


def nested_tensors(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: nested_tensors(part) for key, part in value.items()}
    return torch.from_numpy(np.array(value))


# -- masks that cannot be obeyed ---------------------------------------------------------------------------------------

BAD = {
    "length": (gyms.MultiBinary(5), FOUR, r"it is 5 flags of shape \(5,\), and \(4,\) is due"),
    "shape": (gyms.MultiBinary((2, 2)), FOUR, r"shape \(2, 2\)"),
    "kind": (gyms.Discrete(2), FOUR, "it is Discrete"),
    "numbers": (gyms.MultiDiscrete([3] * 4), FOUR, "not those of flags"),
    "logits": (gyms.Box(-np.inf, 0, (4,)), FOUR, "its numbers are from -inf to 0.0"),
    "no choices": (gyms.MultiBinary(4), gyms.Box(-1, 1, (4,)), "for an action without choices"),
    "bits": (gyms.MultiBinary(3), gyms.MultiBinary(3), r"\(6,\) or \(3, 2\) is due"),
    "nesting": (gyms.Dict(left=gyms.MultiBinary(4)), FOUR, "not nested as the action is"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_mask_that_cannot_be_obeyed_is_refused_at_the_start(name: str) -> None:
    leaf, action, match = BAD[name]
    env = lambda context: Masked(leaf, action, leaf.sample(), [])  # noqa: E731
    with pytest.raises(ConfigError, match=match) as caught:
        runner(env)
    assert "'obs/action_mask'" in str(caught.value)
    with runner(env, module=Own) as sampler, pytest.raises(ConfigError, match=match):  # it may know what to do
        sampler.sample(num_timesteps=1, random_actions=True)


class Own(torch.nn.Module):
    """A module of a user's own, which takes the mask itself."""

    noise_size, noise_kind = 1, "uniform"

    def __init__(self, spaces: Spaces) -> None:
        super().__init__()
        self.spaces = spaces

    def forward_exploration(self, batch: dict[str, Any]) -> dict[str, Any]:
        return {"actions": torch.zeros(len(batch["noise"]), dtype=torch.int64), "mask": batch["obs"]["action_mask"]}

    forward_inference = forward_exploration


def test_a_module_of_ones_own_gets_the_mask_as_it_is() -> None:
    leaf, mask = gyms.Box(-np.inf, 1, (4,)), flags([0.5, 0, -3, 0], np.float32)
    with runner(lambda context: Masked(leaf, FOUR, mask, [{0}]), module=Own, env_to_module=[MeanStd]) as sampler:
        (chunk,) = sampler.sample(num_timesteps=5)
        assert sampler.totals.env_failures == 0
    assert chunk.columns["mask"].tolist() == [mask.tolist()] * 5


def test_two_masks_are_refused_by_name() -> None:
    mask = MultiBinary(shape=(2,))
    space: Space = Dict(spaces={side: Dict(spaces={"action_mask": mask}) for side in ("left", "right")})
    with pytest.raises(ConfigError, match="2 masks: obs/left/action_mask, obs/right/action_mask"):
        actor_critic(Spaces(observation=space, action=Discrete(n=2)))


class Breaks(Masked):
    """Shows `bad` in place of its mask from the third step of its second life on."""

    def __init__(self, bad: Any, context: Any) -> None:
        super().__init__(gyms.Box(-1, 2, (4,)), FOUR, flags([0, 1, 0, 0], np.float32), [{1}])
        self.bad = bad if context.vector_index == 1 else self.mask

    def step(self, action: Any) -> Any:
        seen, *others = super().step(action)
        return {**seen, "action_mask": self.bad if self.t == 3 else self.mask}, *others


@pytest.mark.parametrize("how", [{}, {"random_actions": True}], ids=["policy", "random"])
@pytest.mark.parametrize(
    ("bad", "match"),
    [
        ([0, 0, 0, 0], "should be 1 for at least one action, got all flags 0"),
        ([0, 0.5, 1, 0], "should be flags of 0 and 1, got 0.5 at flag 1"),
        ([0, 2, 1, 0], "got 2.0 at flag 1"),
    ],
)
def test_an_unsound_mask_is_that_envs_failure_at_that_step(bad: Any, match: str, how: dict[str, Any]) -> None:
    with runner(partial(Breaks, flags(bad, np.float32)), num_envs=2, env_restart_attempts=1000) as sampler:
        chunks = sampler.sample(num_timesteps=100, **how)
        assert {(c.t_start, len(c)) for c in chunks if c.env_index == 1} <= {(0, 1), (0, 2), (0, 3)}
        assert sampler.totals.discarded["env_bad_data"] % 3 == 0
        assert sampler.totals.discarded["env_bad_data"] > 30
        check_books(sampler)
    settings: dict[str, Any] = {"num_envs": 2, "restart_failed_sub_environments": False}
    broken = runner(partial(Breaks, flags(bad, np.float32)), **settings)
    with broken as sampler, pytest.raises(EnvContractError, match=match) as caught:
        sampler.sample(num_timesteps=100, **how)
    assert caught.value.what == "observation['action_mask']"


def test_a_first_observation_without_a_legal_action_uses_up_the_attempts() -> None:
    env = lambda context: Masked(gyms.MultiBinary(4), FOUR, flags([0] * 4), [])  # noqa: E731
    with runner(env, env_restart_attempts=3) as sampler, pytest.raises(EnvRestartBudgetError, match="got all flags 0"):
        sampler.sample(num_timesteps=1)


def test_a_last_observation_may_have_no_legal_action() -> None:
    class Over(Masked):
        def see(self) -> Any:
            return {**super().see(), "action_mask": self.mask * (self.t < 7)}

    with runner(lambda context: Over(*FORMS["binary"]), restart_failed_sub_environments=False) as sampler:
        assert sum(map(len, sampler.sample(num_timesteps=50))) == 50


def test_a_connector_that_scales_the_mask_is_named_in_the_error() -> None:
    class Halves(Connector):
        def connect(self, spaces: Spaces, width: int) -> Spaces:
            return spaces

        def process(self, rows: Rows) -> Any:
            return {**rows.columns, "obs/action_mask": rows.columns["obs/action_mask"] / np.float32(2)}

    settings: dict[str, Any] = {"env_to_module": [Halves], "restart_failed_sub_environments": False}
    match = r"\['action_mask'\] after env_to_module should be flags"
    halved = runner(lambda context: Masked(*FORMS["float"]), **settings)
    with halved as sampler, pytest.raises(EnvContractError, match=match):
        sampler.sample(num_timesteps=1)


# -- rows that do not act ----------------------------------------------------------------------------------------------


class Strict(torch.nn.Module):
    """Masks as the guide to modules shows, and refuses a row without a legal action."""

    noise_size, noise_kind, obeys_action_mask = 1, "uniform", True

    def __init__(self, *_: Any, **__: Any) -> None:
        super().__init__()

    def forward_exploration(self, batch: dict[str, Any]) -> dict[str, Any]:
        mask = batch["obs"]["action_mask"]
        legal = torch.distributions.Categorical(logits=torch.zeros(mask.shape).masked_fill(mask == 0, -torch.inf))
        actions = legal.logits.argmax(1)
        return {"actions": actions, "logp": legal.log_prob(actions)}

    forward_inference = forward_exploration


class Closing(Masked):
    """Has no legal action in its last observation. With `fails` it raises in its fourth step."""

    def __init__(self, context: Any, fails: Any = ()) -> None:
        super().__init__(*FORMS["binary"])
        self.fails, self.length = context.vector_index in fails, 7 - 2 * context.vector_index

    def see(self) -> Any:
        return {**super().see(), "action_mask": self.mask * (self.t < self.length)}

    def step(self, action: Any) -> Any:
        if self.fails and self.t == 3:
            raise RuntimeError("env trouble")
        seen, reward, *_ = super().step(action)
        return seen, reward, self.t >= self.length, False, {}


def check_masks(chunks: Any) -> None:
    """Check that chunks have the masks as the env gave them."""
    for chunk in chunks:
        last = int(chunk.is_done)
        masks = chunk.obs["action_mask"]
        assert (masks[: len(masks) - last] == FORMS["binary"][2]).all()
        assert not masks[len(masks) - last :].any()


@pytest.mark.parametrize("how", [{}, {"random_actions": True}], ids=["policy", "random"])
@pytest.mark.parametrize(
    ("env", "discards"),
    [
        (partial(Closing, fails={1}), {"env_exception"}),
        (vector_of(Closing, "sync", AutoresetMode.NEXT_STEP), set()),
    ],
    ids=["failed", "resetting"],
)
def test_a_module_gets_a_legal_action_in_rows_of_envs_that_do_not_act(
    env: Any, discards: Any, how: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(restarts, "BACKOFF_S", 0.004)
    with runner(env, num_envs=2, module=Strict, env_restart_attempts=1000) as sampler:
        for _ in range(5):
            check_masks(sampler.sample(num_timesteps=20, **how))
        assert sampler.totals.discarded.keys() == discards


class Turns(MultiAgentEnv):
    """Two agents act by turns, and see no legal action at the end. In odd envs the second begins."""

    possible_agents = ("a", "b")

    def __init__(self, context: EnvContext) -> None:
        self.first = context.vector_index
        self.whole = Closing(context)
        self.observation_spaces = dict.fromkeys("ab", self.whole.observation_space)
        self.action_spaces = dict.fromkeys("ab", FOUR)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        seen, _ = self.whole.reset(seed=seed)
        return {"ab"[self.first % 2]: seen}, {}

    def step(self, actions: Any) -> Any:
        (action,) = actions.values()
        seen, _, over, *_ = self.whole.step(action)
        agents = "ab" if over else "ab"[(self.whole.t + self.first) % 2]
        return dict.fromkeys(agents, seen), dict.fromkeys(agents, 0.0), {"__all__": over}, {"__all__": False}, {}


@pytest.mark.parametrize("how", [{}, {"random_actions": True}], ids=["policy", "random"])
def test_a_module_gets_a_legal_action_in_rows_of_agents_that_do_not_act(how: dict[str, Any]) -> None:
    with multi_runner(Turns, num_envs=2, module=Strict) as sampler:
        for _ in range(5):
            check_masks(sampler.sample(num_timesteps=20, **how))


# -- masks in infos ----------------------------------------------------------------------------------------------------


class Told(Masked):
    """Its mask changes with each step, and is in the info, as in Taxi-v3."""

    def __init__(self, bad_at: int = 99) -> None:
        self.observation_space, self.action_space, self.bad_at = VECTOR, FOUR, bad_at

    def told(self) -> Any:
        return {"action_mask": [0, 0, 2, 0] if self.t == self.bad_at else np.arange(4) == self.t % 4}

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        gym.Env.reset(self, seed=seed)
        self.t = 0
        return VECTOR.sample(), self.told()

    def step(self, action: Any) -> Any:
        self.followed = getattr(self, "followed", True) and action == self.t % 4
        self.t += 1
        return VECTOR.sample(), float(self.followed), self.t >= 7, False, self.told()


def test_a_mask_in_the_info_binds_random_actions_and_the_log_says_that_no_policy_sees_it(caplog: Any) -> None:
    with runner(lambda context: Told(), num_envs=2) as sampler:
        for _ in range(3):
            chunks = sampler.sample(num_timesteps=30, random_actions=True)
            assert all(chunk.rewards.all() for chunk in chunks)
        assert caplog.text.count("binds random actions alone, because policies do not see infos") == 1
    with runner(lambda context: Told(), num_envs=2) as sampler:
        assert not all(chunk.rewards.all() for chunk in sampler.sample(num_timesteps=90))


@pytest.mark.parametrize("mode", AutoresetMode)
def test_a_mask_in_the_info_of_a_native_vector_binds_random_actions_without_infos_in_chunks(mode: Any) -> None:
    class Says(Told):
        def told(self) -> Any:
            return {**super().told(), "unread": float("nan")}

    env = vector_of(lambda context: Says(), "sync", mode)
    with runner(env, num_envs=2, infos="none") as sampler:
        for _ in range(3):
            chunks = sampler.sample(num_timesteps=30, random_actions=True)
            assert all(chunk.rewards.all() and not chunk.infos for chunk in chunks)
        assert sampler.totals.env_failures == 0


def test_an_unsound_mask_in_an_info_is_that_envs_failure() -> None:
    with runner(lambda context: Told(bad_at=2), restart_failed_sub_environments=False) as sampler:
        assert len(sampler.sample(num_timesteps=2)) == 1, "no policy sees it"
        with pytest.raises(EnvContractError, match=r"info\['action_mask'\] should be 4 flags of 0 and 1"):
            sampler.sample(num_timesteps=5, random_actions=True)


# -- where masks bind --------------------------------------------------------------------------------------------------


def test_a_mask_of_some_parts_leaves_the_others_free() -> None:
    leaf, action, mask, _ = FORMS["parts"]
    inner = gyms.Dict(action_mask=leaf, at=VECTOR)
    spaces = Spaces(observation=convert(inner, ""), action=convert(action, ""))
    found = ActionMask.of(spaces)
    assert found is not None
    columns = {"obs/action_mask/kind": mask["kind"][None]}
    due = [[False, True, False, True, True, True, True]]
    assert found.legal(columns).tolist() == due
    tensors = {"action_mask": {"kind": torch.from_numpy(mask["kind"][None])}, "at": torch.zeros(1, 3)}
    assert (~found.illegal(tensors)).tolist() == due


def test_policies_of_sb3_refuse_a_mask() -> None:
    sb3 = pytest.importorskip("headrace.workers.modules.sb3")
    env = lambda context: Masked(*FORMS["binary"])  # noqa: E731
    with pytest.raises(ModuleError, match="obey no action mask"):
        runner(env, module=sb3.build, module_config={"policy": "MultiInputPolicy"})
