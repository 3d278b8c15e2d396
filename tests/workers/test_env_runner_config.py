"""The settings that a runner's config refuses, and the ways to name an env."""

from __future__ import annotations

import copy
import pydoc
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import gymnasium as gym
import pytest

from headrace.schemas.chunks.spaces import Spaces
from headrace.schemas.errors import (
    ConfigError,
    EnvContractError,
    EnvError,
    ModuleError,
    UnknownEnvError,
)
from headrace.schemas.settings.config_section import ConfigSection, meaning_of
from headrace.workers import EnvContext, EnvRunnerConfig, MultiAgentEnvRunner, SingleAgentEnvRunner, register_env
from headrace.workers.connectors import Connector, Rows
from support.envs.toy import Counting, runner
from support.runners.kinds import KINDS, Kind


def test_unknown_setting_names_the_nearest_known_one() -> None:
    with pytest.raises(ConfigError, match="'num_envs'"):
        EnvRunnerConfig(env="CartPole-v1", num_env=3)


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        ("num_envs_per_env_runner", "num_envs"),
        ("num_env_runners", "num_workers"),
        ("n_steps", "rollout_fragment_length"),
        ("env_construct_timeout_s", "env_reset_timeout_s"),
    ],
)
def test_a_setting_named_as_in_another_library_or_version_raises_with_our_name(theirs: str, ours: str) -> None:
    with pytest.raises(ConfigError, match=f"{theirs}: no such setting .* nearest is '{ours}'"):
        EnvRunnerConfig(env="CartPole-v1", **{theirs: 3})


@pytest.mark.parametrize(
    ("env", "advice"),
    [
        (Counting(), "got a Counting that is already built; give what builds one, as env=Counting or env=lambda"),
        (
            gym.make("CartPole-v1"),
            "got a CartPoleEnv that is already built; give what builds one, as env='CartPole-v1'",
        ),
    ],
)
def test_an_env_that_is_already_built_is_refused_with_advice(env: Any, advice: str) -> None:
    with pytest.raises(ConfigError, match=f"^env: {advice}"):
        EnvRunnerConfig(env=env)


@pytest.mark.parametrize(
    ("setting", "value"),
    [("num_envs", 0), ("seed", -1), ("batch_mode", "both"), ("rollout_fragment_length", 0), ("env_step_timeout_s", 0)],
)
def test_bad_values_name_the_setting(setting: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=setting):
        EnvRunnerConfig(env="CartPole-v1", **{setting: value})


def _sections(base: type[ConfigSection]) -> Iterator[type[ConfigSection]]:
    for section in base.__subclasses__():
        yield section
        yield from _sections(section)


@pytest.mark.parametrize("section", list(_sections(ConfigSection)), ids=lambda section: section.__name__)
def test_every_setting_has_a_meaning_that_help_shows(section: type[ConfigSection]) -> None:
    shown = pydoc.render_doc(section, renderer=pydoc.plaintext)
    for name in section.model_fields:
        meaning = meaning_of(section, name)
        assert len(meaning.split()) > 1, f"{name} has no description"
        assert re.search(rf"^ \|  +{name}: .*\n \|  +{re.escape(meaning)}$", shown, re.MULTILINE), name


def test_clashing_values_are_both_named() -> None:
    with pytest.raises(ConfigError, match=r"remote_env_batch_wait_ms = 2 .*double_buffering = true"):
        EnvRunnerConfig(env_placement="process", double_buffering=True, remote_env_batch_wait_ms=2)


def test_a_port_for_env_hosts_needs_a_host() -> None:
    advice = "is for TCP; give env_hosts_host and env_hosts_keys, or leave it out for a Unix socket"
    with pytest.raises(ConfigError, match=f"^env_hosts_port: 5800 {advice}"):
        EnvRunnerConfig(env_placement="remote", env_hosts_port=5800)


def test_runner_config_is_a_copy() -> None:
    given = {"length": 4}
    with runner(env_config=given) as sampler:
        sampler.config.env_config["length"] = 9
        assert given == {"length": 4}
        sampler.make_env()
        chunks = sampler.sample(num_episodes=1)
        assert len(chunks[0]) == 9


class Passing(Connector):
    """Lets rows pass."""

    def connect(self, spaces: Spaces, width: int) -> Spaces:
        return spaces

    def process(self, rows: Rows) -> Any:
        return dict(rows.columns)


@KINDS
def test_later_changes_to_the_given_settings_do_not_reach_the_runner(kind: Kind) -> None:
    given: dict[str, Any] = {
        "env_config": {"length": 4, "lengths": [4, 4][: 2 * (kind.agents > 1)] or {}},
        "module_config": {"hidden": [8]},
        "env_to_module": [Passing],
        "module_to_env": [Passing],
    }
    with kind.make(**given) as sampler:
        own = {name: copy.deepcopy(getattr(sampler.config, name)) for name in given}
        given["env_config"]["lengths"] = "spoilt"
        given["module_config"]["hidden"].append(9)
        given["env_to_module"].clear()
        given["module_to_env"].clear()
        assert {name: getattr(sampler.config, name) for name in given} == own


@pytest.mark.parametrize("kind", [SingleAgentEnvRunner, MultiAgentEnvRunner])
def test_keyword_arguments_that_a_runner_does_not_know_are_accepted(kind: Any) -> None:
    """As RLlib's runners take `spaces=`, `tune_trial_id=` and whatever its next version passes."""
    config = EnvRunnerConfig(policies=["shared"] if kind is MultiAgentEnvRunner else None)
    with kind(config, 3, run_uid="test", tune_trial_id="x", spaces=None) as sampler:
        assert sampler.worker_index == 3


@pytest.mark.parametrize("kind", [SingleAgentEnvRunner, MultiAgentEnvRunner])
def test_runner_without_env_says_how_to_give_one(kind: Any) -> None:
    config = EnvRunnerConfig(policies=["shared"] if kind is MultiAgentEnvRunner else None)
    with kind(config) as sampler:
        assert sampler.env is None
        assert sampler.running_episodes() == []
        for needs_an_env in (
            lambda: sampler.sample(num_timesteps=1),
            sampler.sample_fragment,
            sampler.make_module,
            sampler.get_spaces,
            lambda: sampler.spaces,
        ):
            with pytest.raises(ConfigError, match="gymnasium id"):
                needs_an_env()
        with pytest.raises(ConfigError, match="no environment is configured"):
            sampler.make_env()


def test_gymnasium_ids_are_made_without_gymnasiums_checker() -> None:
    with runner("CartPole-v1") as sampler:
        env, kinds = sampler.env, list[type]()
        while isinstance(env, gym.Wrapper):
            kinds.append(type(env))
            env = env.env
        assert kinds  # a limit of time, say
        assert gym.wrappers.PassiveEnvChecker not in kinds


@pytest.mark.parametrize("mode", [None, "sync", "vector_entry_point"])
@pytest.mark.parametrize("env", ["CartPole-v1", "CartPole", "gymnasium:CartPole", "gymnasium:CartPole-v1"])
def test_an_id_is_taken_as_gymnasium_takes_it_also_without_a_version(env: str, mode: Any) -> None:
    with runner(env, gym_env_vectorize_mode=mode) as sampler:
        assert sampler.spaces.action.model_dump()["n"] == 2
    with pytest.raises(UnknownEnvError, match="CartPole"):
        runner(f"{env.removesuffix('-v1')}-v99", gym_env_vectorize_mode=mode)


def test_env_by_import_path() -> None:
    with runner("gymnasium.envs.classic_control.cartpole:CartPoleEnv") as sampler:
        assert sampler.spaces.action.model_dump()["n"] == 2


def test_env_by_class_callable_registered_name_and_import_path() -> None:
    register_env("counting", lambda context: Counting(context))
    for env in (Counting, lambda context: Counting(context), "counting", "support.envs.toy:make_counting"):
        with runner(env, env_config={"length": 2}) as sampler:
            assert len(sampler.sample(num_episodes=1)[0]) == 2


def test_class_that_takes_keywords_gets_the_config_items() -> None:
    class Keywords(Counting):
        def __init__(self, size: int = 1, render_mode: str | None = None) -> None:
            super().__init__({"length": size})

    with runner(Keywords, env_config={"size": 6}) as sampler:
        assert len(sampler.sample(num_episodes=1)[0]) == 6


class Needs(Counting):
    """An env that needs a value of env_config by its name."""

    def __init__(self, length: int, wide: int = 1) -> None:
        super().__init__({"length": length})


@dataclass(eq=False)
class Fields(Counting):
    length: int  # type: ignore[misc]

    def __post_init__(self) -> None:
        super().__init__({"length": self.length})


class Factory:
    def __call__(self, length: int) -> Counting:
        return Needs(length)


def _optional(wide: int = 1, length: int = 1) -> Counting:
    return Needs(length, wide)


@pytest.mark.parametrize("given", [{}, {"num_envs": 2, "gym_env_vectorize_mode": "sync"}], ids=["inline", "vector"])
@pytest.mark.parametrize(
    "env",
    [
        Needs,
        Fields,
        Factory(),
        _optional,
        lambda length: Needs(length),
        partial(Needs, wide=2),
        f"{__name__}:Needs",
        "needs a length",
    ],
)
def test_arguments_that_bear_names_of_env_config_get_its_values(env: Any, given: dict[str, Any]) -> None:
    register_env("needs a length", Needs)
    with runner(env, env_config={"length": 3}, **given) as sampler:
        assert {len(chunk) for chunk in sampler.sample(num_episodes=2) if not chunk.t_start} == {3}


@pytest.mark.parametrize("mode", [None, "sync"])
def test_each_env_has_its_own_deep_copy_of_env_config(mode: Any) -> None:
    sizes: list[int] = []
    given: dict[str, Any] = {"maps": [], "deep": {"maps": []}}

    def create(context: EnvContext) -> Counting:
        for maps in (context["maps"], context["deep"]["maps"]):
            maps.append("own")
            sizes.append(len(maps))
        return Counting({})

    with runner(create, env_config=given, num_envs=2, gym_env_vectorize_mode=mode) as sampler:
        sampler.make_env()
    assert {*sizes} == {1}
    assert given["maps"] == []


@pytest.mark.parametrize("env", ["NoSuchEnv-v0", "nowhere:NoSuchEnv-v0", "nowhere:make_env", "support.envs.toy:absent"])
def test_an_unknown_env_raises_with_the_accepted_form(env: str) -> None:
    with pytest.raises(UnknownEnvError, match=r"package\.module:make_env") as caught:
        runner(env)
    assert ("check PYTHONPATH" in str(caught.value)) == env.startswith("nowhere")


def test_a_file_name_in_an_import_path_raises_with_the_module_name() -> None:
    with pytest.raises(UnknownEnvError, match="write 'nowhere:make_env'"):
        runner("nowhere.py:make_env")


def test_an_env_that_is_already_built_is_no_import_path() -> None:
    with pytest.raises(UnknownEnvError, match="BUILT, a Counting, is an env that is already built"):
        runner(f"{__name__}:BUILT")


BUILT = Counting()


@pytest.mark.parametrize(("start", "package"), [("ALE/Breakout-v5", "ale_py"), ("MiniGrid-Empty-5x5-v0", "minigrid")])
def test_an_id_of_another_package_says_how_to_write_it_and_to_install_it(
    start: str, package: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for env_id in [env_id for env_id in gym.registry if env_id.startswith(start[:4])]:
        monkeypatch.delitem(gym.registry, env_id)
    with pytest.raises(UnknownEnvError, match=f"so write '{package}:{start}'") as caught:
        runner(start)
    assert "pip install" not in str(caught.value)
    monkeypatch.setitem(sys.modules, package, None)
    for env in (start, f"{package}:{start}"):
        with pytest.raises(UnknownEnvError, match=rf"`pip install 'headrace\[envs\]'` installs {package}"):
            runner(env)


def test_the_error_about_minigrids_mission_space_names_a_wrapper() -> None:
    with pytest.raises(EnvContractError, match=r"minigrid\.wrappers\.ImgObsWrapper.*MissionSpace"):
        runner("minigrid:MiniGrid-Empty-5x5-v0")


def test_the_error_about_a_multi_agent_env_names_the_runner_and_the_setting() -> None:
    with pytest.raises(EnvContractError, match=r"MultiAgentEnvRunner, or in a fleet set sampling\.policies"):
        runner("headrace.workers.agents.examples:two_carts")


def test_the_env_context_has_worker_index_env_index_and_config() -> None:
    seen: list[EnvContext] = []

    def create(context: EnvContext) -> Counting:
        seen.append(context)
        return Counting(context)

    with runner(create, worker_index=3, num_envs=2, num_workers=5, env_config={"port": 9}):
        pass
    assert [(c.worker_index, c.num_workers, c.vector_index, c.recreated) for c in seen] == [
        (3, 5, 0, False),
        (3, 5, 1, False),
    ]
    assert seen[0]["port"] == 9


def test_a_function_without_an_argument_for_the_context_gets_the_configs_items() -> None:
    def create(**items: Any) -> Counting:
        assert items == {"length": 5}
        return Counting(EnvContext(items))

    for creator in (create, lambda *, length: create(length=length)):
        with runner(creator, env_config={"length": 5}):
            pass
    with runner(lambda: Counting(EnvContext({}))):
        pass


def test_constructor_that_fails_at_once_is_an_env_error() -> None:
    def create(context: EnvContext) -> Counting:
        raise RuntimeError

    with pytest.raises(EnvError, match="could not be built: RuntimeError") as caught:
        runner(create)
    assert isinstance(caught.value.__cause__, RuntimeError)


def test_a_creator_that_returns_no_env_is_refused() -> None:
    with pytest.raises(EnvContractError, match=r"gymnasium\.Env"):
        runner(lambda context: object())


def test_space_without_a_column_is_refused_with_advice() -> None:
    class Text(Counting):
        observation_space = gym.spaces.Text(5)

    with pytest.raises(EnvContractError, match="wrap the env"):
        runner(Text)


@pytest.mark.parametrize(
    ("space", "words"),
    [
        (gym.spaces.Dict({}), "observation space should be of one space or more"),
        (gym.spaces.Dict({"a": gym.spaces.Discrete(2), "b": gym.spaces.Tuple(())}), "got an empty Tuple"),
        (gym.spaces.Box(0, 1, (3, 0)), r"shape of observation space should be of one element .* got \(3, 0\)"),
    ],
)
def test_an_empty_space_is_refused(space: gym.Space[Any], words: str) -> None:
    class Void(Counting):
        observation_space = space

    with pytest.raises(EnvContractError, match=words):
        runner(Void)


@pytest.mark.parametrize("setting", ["env_step_timeout_s", "env_reset_timeout_s"])
def test_a_wait_longer_than_the_kernel_can_sleep_is_refused(setting: str) -> None:
    with pytest.raises(ConfigError, match="less than or equal to 1000000"):
        EnvRunnerConfig(env="CartPole-v1", **{setting: 1e7})


def test_envs_of_one_vector_must_share_their_spaces() -> None:
    class Uneven(Counting):
        def __init__(self, config: EnvContext) -> None:
            super().__init__(config)
            self.action_space = gym.spaces.Discrete(2 + config.vector_index)

    with pytest.raises(EnvContractError, match="spaces of env 1"):
        runner(Uneven, num_envs=2)


@pytest.mark.parametrize(
    ("module", "error", "words"),
    [
        ("nowhere", ConfigError, "package.module:build"),
        ("nowhere:build", ModuleError, "cannot be found"),
        ("headrace.workers.modules:absent", ModuleError, "cannot be found"),
        (lambda spaces: object(), ModuleError, r"torch\.nn\.Module"),
        (lambda spaces: 1 / 0, ModuleError, "ZeroDivisionError"),
    ],
)
def test_a_bad_module_raises_an_error_that_names_the_problem(module: Any, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        runner(module=module)
