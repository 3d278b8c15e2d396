"""fleet.toml, --print-config, --set, and the errors for bad input."""

from __future__ import annotations

import ast
import re
import tomllib
from importlib.resources import files
from pathlib import Path

import orjson
import pytest

from headrace.deploy.process.child_environment import child_environment
from headrace.deploy.process.exit_record import exit_record_path
from headrace.deploy.process.liveness_file import LivenessFile
from headrace.deploy.run.options import Asked, as_toml, parse_sets, to_toml
from headrace.schemas.errors import ConfigError
from headrace.schemas.settings.config import FleetConfig
from headrace.schemas.settings.config_loading import known_keys, load_config

SAMPLE = Path(str(files("headrace.deploy").joinpath("fleet.toml")))


def test_the_sample_file_is_the_defaults() -> None:
    config, _ = load_config(SAMPLE, environ={})
    assert config == FleetConfig()


def test_the_sample_file_shows_every_option_with_a_comment() -> None:
    shown, section = set(), ""
    for line in SAMPLE.read_text().splitlines():
        if match := re.fullmatch(r"\[(\w+)\]", line):
            section = match[1]
        elif match := re.match(r"(?:# )?(\w+) = \S.*? +# \S", line):
            shown.add(f"{section}.{match[1]}")
    assert shown == set(known_keys())


def test_print_config_prints_a_file_that_gives_the_same_config(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HEADRACE_BROKER__LEASE_S", "7.5")
    monkeypatch.delenv("HEADRACE_DASHBOARD__ENABLED")  # which is set for all tests
    path = tmp_path / "mine.toml"
    path.write_text('[sampling]\nenv_config = {size = 3, "odd key" = [1, "a\\"b"]}\n')
    asked = Asked(path, ["learner.gamma=0.9", "fleet.fleet_id=abc"], {"sampling.num_envs": 4})
    text = as_toml(asked)
    again = tmp_path / "again.toml"
    again.write_text(text)
    assert load_config(again, environ={})[0] == asked.settings
    assert re.search(r"^num_envs = 4 +# flag$", text, re.M)
    assert re.search(r"^gamma = 0.9 +# flag$", text, re.M)
    assert re.search(r"^lease_s = 7.5 +# environment HEADRACE_BROKER__LEASE_S$", text, re.M)
    assert re.search(rf"^env_config = .* +# {re.escape(str(path))}$", text, re.M)
    assert re.search(r"^epochs = 10 +# default$", text, re.M)
    assert asked.origin == f"{path} + 1 from the environment + 3 flags"


def test_null_takes_a_value_of_the_file_back(tmp_path: Path) -> None:
    (path := tmp_path / "fleet.toml").write_text("[fleet]\nuntil_steps = 5\n[sampling]\nseed = 3\n")
    settings = Asked(path, ["fleet.until_steps=null", "sampling.seed=null"]).settings
    assert (settings.fleet.until_steps, settings.sampling.seed) == (None, None)


def test_a_flag_reaches_into_a_table_of_the_file(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text('[module]\nconfig = {hidden = [8], activation = "relu"}\n')
    sets = ["module.config.hidden=[32]", "sampling.env_config.a.b=true", "sampling.env_config.a.c=x"]
    config, origins = Asked(path, sets).resolved
    assert config.module.config == {"hidden": [32], "activation": "relu"}
    assert config.sampling.env_config == {"a": {"b": True, "c": "x"}}
    assert origins["module.config"] == "flag"
    with pytest.raises(ConfigError, match=r"unknown key; did you mean learner\.gamma"):
        _ = Asked(path, ["learner.gamma.x=1"]).settings


def test_print_config_shows_no_password() -> None:
    text = as_toml(Asked(sets=["redis.url=redis://:secret@127.0.0.1:6379/0"]))
    assert "secret" not in text
    assert tomllib.loads(text)["redis"]["url"].endswith("@127.0.0.1:6379/0")


def test_flags_win_over_set_and_a_flag_of_none_is_ignored() -> None:
    config = Asked(
        None, ["sampling.num_envs=3", "sampling.seed=1"], {"sampling.num_envs": 5, "sampling.seed": None}
    ).settings
    assert (config.sampling.num_envs, config.sampling.seed) == (5, 1)


@pytest.mark.parametrize("text", ["4711", "true", "1e5"])
def test_set_takes_a_number_for_a_setting_that_is_text(text: str) -> None:
    config = Asked(sets=[f"keys.group={text}", "learner.gamma=1", "sampling.env_config.x=7"]).settings
    assert (config.keys.group, config.learner.gamma, config.sampling.env_config) == (text, 1.0, {"x": 7})


@pytest.mark.parametrize("text", ["sampling.num_envs", "num_envs=3", "=3"])
def test_set_wants_section_key_value(text: str) -> None:
    with pytest.raises(ConfigError, match=r"is not SECTION\.KEY=VALUE"):
        _ = Asked(sets=[text]).settings


def test_an_unknown_key_names_the_nearest() -> None:
    with pytest.raises(ConfigError, match=r"sampling.num_env: unknown key; did you mean sampling.num_envs"):
        _ = Asked(sets=["sampling.num_env=3"]).settings


@pytest.mark.parametrize(
    ("key", "remedy"),
    [
        ("broker.weights_port", r"did you mean broker\.port\?"),
        ("worker.drain_timeout_s", r"did you mean supervisor\.stop_timeout_s\?"),
        ("broker.ack", "an earlier version had it, and this one has no such setting; leave it out"),
        ("worker.rollout_length", "`headrace up --print-config` lists all keys"),
    ],
)
def test_a_key_of_an_earlier_version_names_its_successor_or_says_that_it_is_gone(key: str, remedy: str) -> None:
    with pytest.raises(ConfigError, match=f"{key}: unknown key; {remedy}"):
        _ = Asked(sets=[f"{key}=1"]).settings


def test_children_get_the_resolved_values_whatever_the_environment_says(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A flag beats HEADRACE_...; a child that read both from file and environment would see it the other way round."""
    monkeypatch.setenv("HEADRACE_SAMPLING__NUM_ENVS", "4")
    monkeypatch.setenv("HEADRACE_DEBUG", "1")
    config = Asked(sets=["fleet.until_return=null"], flags={"sampling.num_envs": 9}).settings
    path = tmp_path / "config.json"
    path.write_bytes(orjson.dumps(config.model_dump(mode="json")))
    environment = child_environment(1)
    assert environment["HEADRACE_DEBUG"] == "1"
    assert load_config(path, environ=environment)[0] == config


def test_blas_threads_are_pinned_unless_the_user_did(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    monkeypatch.delenv("OPENBLAS_NUM_THREADS", raising=False)
    environment = child_environment(1)
    assert (environment["OMP_NUM_THREADS"], environment["OPENBLAS_NUM_THREADS"]) == ("3", "1")


def test_an_early_fork_server_has_the_environment_of_later_children(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("HEADRACE_EXIT_RECORD", str(tmp_path / "end"))
    monkeypatch.setenv("HEADRACE_LIVENESS_FILE", str(tmp_path / "alive"))
    early = child_environment(1)
    assert (exit_record_path(), LivenessFile.from_environment().is_watched) == (tmp_path / "end", True)
    assert child_environment(1) == early


@pytest.mark.parametrize("value", [True, 1, 1.5, 'a "b" \\ c\n\x7f', [1, [2]], {"a": {"b\x7fc": 1}}, {}, [], 1e-9])
def test_values_survive_toml(value: object) -> None:
    assert tomllib.loads(f"x = {to_toml(value)}")["x"] == value


def test_a_setting_without_its_section_is_answered_with_its_whole_name() -> None:
    with pytest.raises(ConfigError, match=r"is not SECTION.KEY=VALUE; did you mean sampling.env_restart_attempts\?"):
        parse_sets(["env_restart_attempts=9"])
    with pytest.raises(ConfigError, match=r"is not SECTION.KEY=VALUE \(from --set\)"):
        parse_sets(["qqqq"])


def test_each_setting_that_an_error_names_exists() -> None:
    sections = "|".join(FleetConfig.model_fields)
    folders = [
        Path(str(files(f"headrace.{name}"))) for name in ("schemas", "workers", "broker", "learner_stub", "deploy")
    ]
    for file in (file for folder in folders for file in folder.rglob("*.py")):
        for call in (node for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.Call)):
            if ast.unparse(call.func).endswith(("Error", "_error", "refusal")):
                texts = [part.value for part in ast.walk(call) if isinstance(part, ast.Constant)]
                named = re.findall(rf"\b(?:{sections})\.[a-z_]+\b", " ".join(map(str, texts)))
                own = {one for one in named if not one.endswith((".json", ".toml", ".log", ".checkpoint", ".secret"))}
                assert own - {"broker.public"} <= set(known_keys()), f"{file}:{call.lineno}"
