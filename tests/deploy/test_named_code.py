"""Files beside a checkpoint: a crafted file runs no foreign code, and the user's own files are trusted."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import orjson
import pytest

from headrace.deploy import load_policy
from headrace.deploy.run.named_code import OWN, names_in, with_found
from headrace.deploy.run.options import Asked
from headrace.deploy.run.seal import is_sealed, seal_of, write_sealed
from headrace.schemas.errors import ConfigError, ExitCode
from headrace.schemas.settings.config import FleetConfig
from headrace.workers import connectors
from support.fleets.saved_runs import save_run, save_run_of_two
from support.waiting import TIMEOUT_S

EVIL = "from pathlib import Path\nPath(__file__).with_name('ran').touch()\n"
MINE = """
from subprocess import run

import gymnasium

from headrace.workers.modules import actor_critic


def make_env(context):
    return gymnasium.make("CartPole-v1")


def build(spaces, **config):
    return actor_critic(spaces, hidden=(8,))
"""


def headrace(cwd: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "headrace.deploy", *arguments]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=False, timeout=TIMEOUT_S)


def craft(run: Path, sampling: dict[str, Any], name: str = "config.json") -> None:
    save_run(run)
    (run / name).write_bytes(orjson.dumps({"sampling": {"env": "CartPole-v1", "num_envs": 1, **sampling}}))


@pytest.mark.long
@pytest.mark.parametrize(
    ("command", "name"),
    [
        (("evaluate", "."), "config.json"),
        (("serve", "--checkpoint", "."), "config.json"),
        (("export", "learner.checkpoint", "--to", "policy.pt"), "config.json"),
        (("evaluate", ".", "--watch", "--set", "learner.evaluate_every_steps=9"), "config.json"),
        (("worker", "--run-dir", ".", "--endpoint", "tcp://127.0.0.1:9", "--fleet-id", "a"), "config.json"),
        (("learner", "--run-dir", ".", "--endpoint", "tcp://127.0.0.1:9"), "config.json"),
        (("up", "--resume", "."), "settings.json"),
    ],
)
def test_no_command_runs_the_code_that_a_crafted_file_names(
    tmp_path: Path, command: tuple[str, ...], name: str
) -> None:
    shell = {"build": "subprocess:run", "config": {"args": ["touch", "ran"]}}
    craft(tmp_path, {"env_to_module": [shell], "callbacks": ["evil:Callbacks"]}, name)
    (tmp_path / "evil.py").write_text(EVIL)
    result = headrace(tmp_path, *command)
    assert not (tmp_path / "ran").exists()
    assert result.returncode == ExitCode.CONFIG, result.stderr
    (sentence,) = [line for line in result.stderr.splitlines() if line.startswith("error: ")]
    assert f"{name} names code that is not Headrace's own: sampling.env_to_module = 'subprocess:run'" in sentence
    assert "--allow subprocess:run --allow evil:Callbacks" in sentence
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize(
    "sampling",
    [
        {"env": "evil:Env-v0"},
        {"env": "evil:make_env"},
        {"env": "GymV26Environment-v0", "env_config": {"env_id": "evil:Env-v0"}},
        {"env": "mine:GymV26Environment-v0", "env_config": {"env_id": "evil:Env-v0"}},
        {"env_to_module": ["headrace.deploy.process.child:subprocess.run"]},
        {"env_to_module": ["headrace.schemas.settings.plugins:load_object"]},
        {"module_to_env": [{"build": "evil-pkg:x", "config": {}}]},
        {"env_to_module": ["headrace.workers.connectors.evil:x"]},
        {"policies": {"a": {"build": "evil:build"}}},
        {"policies": {"a": {"module_to_env": ["evil:Piece"]}}},
        {"policies": {"a": {}}, "policy_mapping_fn": "evil:mapping"},
        {"callbacks": ["mine:run"]},
        {"callbacks": ["os:system"]},
    ],
)
def test_load_policy_refuses_each_way_to_name_foreign_code(
    tmp_path: Path, sampling: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    craft(tmp_path, sampling)
    (tmp_path / "evil.py").write_text(EVIL)
    (tmp_path / "mine.py").write_text(MINE)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ConfigError) as caught:
        load_policy(tmp_path, allow=["mine:make_env", "evil:other", "os:path"])
    assert not (tmp_path / "ran").exists()
    assert str(tmp_path / "config.json") in str(caught.value)


def test_an_error_offers_no_allow_option_for_unsafe_names(tmp_path: Path) -> None:
    craft(tmp_path, {"callbacks": ["x; touch ran:y\x1b[2J"], "env": "a\nb:c"})
    with pytest.raises(ConfigError) as caught:
        load_policy(tmp_path)
    assert "--allow" not in str(caught.value)
    assert str(caught.value).isprintable()
    with pytest.raises(ConfigError, match=r"allow: should be PACKAGE:NAME, such as my_envs:make_env, got 'my_pkg:'"):
        load_policy(tmp_path, allow=["my_pkg:"])


def test_an_error_stays_short_whatever_a_file_names(tmp_path: Path) -> None:
    craft(tmp_path, {"callbacks": [f"m:f{number}" for number in range(5000)], "env": f"m:{'f' * 5000}"})
    with pytest.raises(ConfigError, match="--allow m:f19 and 4981 more") as caught:
        load_policy(tmp_path)
    assert len(str(caught.value)) < 2000


def test_headraces_own_code_needs_no_allow_option(tmp_path: Path) -> None:
    save_run(tmp_path)
    assert load_policy(tmp_path).version == (2, 9)
    (tmp_path / "learner.checkpoint").unlink()
    save_run_of_two(tmp_path)
    assert load_policy(tmp_path).agents == ["short", "long"]
    public = {f"headrace.workers.connectors:{name}" for name in connectors.__all__} - {
        "headrace.workers.connectors:Connector",
        "headrace.workers.connectors:Rows",
    }
    assert {name for name in OWN if name.startswith("headrace.workers.connectors:")} == public


def test_code_that_the_user_names_or_allows_is_accepted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    craft(tmp_path, {"env": "mine_too:make_env"})
    file = tmp_path / "config.json"
    (tmp_path / "mine_too.py").write_text(MINE)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ConfigError, match=r"--allow mine_too:make_env \(in a program allow=\[\"mine_too:make_env\""):
        with_found(Asked(), file)
    assert with_found(Asked(allow=["mine_too:make_env"]), file).settings.sampling.env == "mine_too:make_env"
    assert with_found(Asked(sets=["sampling.env=mine_too:make_env"]), file)
    monkeypatch.setenv("HEADRACE_SAMPLING__ENV", "mine_too:make_env")
    assert with_found(Asked(), file)


def test_every_setting_that_names_code_is_checked() -> None:
    """A new setting that takes a "package.module:name" is found by its description."""
    full = FleetConfig.model_validate(
        {
            "sampling": {
                "env": "a:b",
                "env_to_module": ["a:c"],
                "module_to_env": [{"build": "a:d"}],
                "policies": {"p": {"build": "a:e", "env_to_module": ["a:f"], "module_to_env": ["a:g"]}},
                "policy_mapping_fn": "a:h",
                "callbacks": ["a:i"],
            },
            "module": {"build": "a:j"},
            "logging": {"loggers": ["a:k"]},
        }
    )
    assert sorted(name for _, name in names_in(full)) == [f"a:{letter}" for letter in "bcdefghijk"]
    judged = {".".join(key.split(".")[:2]) for key, _ in names_in(full)}
    naming = {
        f"{section}.{key}"
        for section, field in FleetConfig.model_fields.items()
        for key, own in field.annotation.model_fields.items()  # type: ignore[union-attr]
        if "package.module:" in (own.description or "")
    }
    assert naming <= judged | {"sampling.module_to_env"}


@pytest.mark.thorough
@pytest.mark.slow
def test_the_users_own_run_is_trusted_until_its_config_is_edited(tmp_path: Path) -> None:
    """The seal of the config proves it. After an edit, the option that the error names allows the code again."""
    (tmp_path / "mine.py").write_text(MINE)
    own = ("--env", "mine:make_env", "--set", "module.build=mine:build")
    up = headrace(
        tmp_path,
        "up",
        *own,
        "--workers",
        "1",
        "--until-steps",
        "3000",
        "--run-dir",
        "r",
        "--set",
        "fleet.timeout_s=150",
    )
    assert up.returncode == 0, up.stderr
    resumed = headrace(tmp_path, "up", "--resume", "r", "--until-steps", "1000")
    assert resumed.returncode == 0, resumed.stderr
    assert headrace(tmp_path, "evaluate", "r", "--episodes", "1").returncode == 0

    config = tmp_path / "r" / "config.json"
    assert is_sealed(config)
    config.write_bytes(config.read_bytes() + b"\n")
    refused = headrace(tmp_path, "evaluate", "r", "--episodes", "1")
    assert refused.returncode == ExitCode.CONFIG
    paste = shlex.split(refused.stderr.split("trust the code, add ")[1].split(" (in a program")[0])
    assert paste == ["--allow", "mine:make_env", "--allow", "mine:build"]
    assert headrace(tmp_path, "evaluate", "r", "--episodes", "1", *paste).returncode == 0


def test_a_seal_holds_for_one_user_and_one_content(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, state = tmp_path / "config.json", tmp_path / "state"
    monkeypatch.setenv("XDG_STATE_HOME", str(state))
    write_sealed(path, b"{}")
    key = state / "headrace" / "seal.key"
    assert is_sealed(path)
    assert key.stat().st_mode & 0o777 == 0o600
    path.write_bytes(b"{} ")
    assert not is_sealed(path)
    path.write_bytes(b"{}")
    key.chmod(0o644)  # others may have read it, and sealed with it
    assert not is_sealed(path)
    key.chmod(0o600)
    assert is_sealed(path)
    seal_of(path).unlink()
    os.mkfifo(seal_of(path))  # it would hold the reader
    assert not is_sealed(path)
    seal_of(path).unlink()
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "of another user"))
    assert not is_sealed(path)
    monkeypatch.setenv("XDG_STATE_HOME", "/proc/nowhere")
    write_sealed(path, b"{}")  # without a home that can be written it only has no seal
    assert not is_sealed(path)
