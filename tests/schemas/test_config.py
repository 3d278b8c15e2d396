"""Configuration: precedence, origins, and mistakes answered with the nearest key or the two values that clash."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import orjson
import pytest

from headrace.schemas.errors import ConfigError, ExitCode
from headrace.schemas.settings import config_loading
from headrace.schemas.settings.config import FleetConfig
from headrace.schemas.settings.config_loading import build_config, known_keys, load_config
from headrace.schemas.settings.plugins import load_object

FILE = """
[sampling]
num_envs = 2
seed = 5
env = "FromFile-v0"
[sampling.env_config]
size = 3
"""


def _file(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "fleet.toml"
    path.write_text(text)
    return path


def test_flags_beat_environment_beats_file_beats_defaults(tmp_path: Path) -> None:
    path = _file(tmp_path, FILE)
    environ = {
        "HEADRACE_SAMPLING__NUM_ENVS": "4",
        "HEADRACE_SAMPLING__SEED": "6",
        "OTHER__THING": "1",
        "HEADRACE_DEBUG": "1",
    }
    config, origins = load_config(path, {"sampling.num_envs": 16}, environ)
    s = config.sampling
    assert (s.num_envs, s.seed, s.env, s.env_config, s.explore) == (16, 6, "FromFile-v0", {"size": 3}, True)
    assert config.fleet == FleetConfig().fleet
    assert origins == {
        "sampling.num_envs": "flag",
        "sampling.seed": "environment HEADRACE_SAMPLING__SEED",
        "sampling.env": str(path),
        "sampling.env_config": str(path),
    }


def test_a_config_without_settings_has_the_defaults() -> None:
    config, origins = load_config(environ={})
    assert config == FleetConfig()
    assert origins == {}
    assert known_keys()["sampling.num_envs"] == 8


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("fleet__until_return", "475", 475.0),
        ("fleet__until_return", "null", None),
        ("fleet__fleet_id", "2024", "2024"),
        ("sampling__explore", "false", False),
        ("sampling__env_config", '{"size": 3}', {"size": 3}),
        ("sampling__env", "[odd]Name-v0", "[odd]Name-v0"),
        ("redis__url", "redis://localhost:1", "redis://localhost:1"),
        ("learner__learning_rate", "1e-4", 1e-4),
    ],
)
def test_environment_variables_are_parsed_by_the_type_of_their_field(name: str, text: str, value: Any) -> None:
    config, _ = load_config(environ={f"HEADRACE_{name.upper()}": text})
    section, key = name.split("__")
    assert getattr(getattr(config, section), key) == value


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "[sampling]\nnun_envs = 2",
            r"sampling.nun_envs: unknown key; did you mean sampling.num_envs\? \(from .*fleet.toml\)",
        ),
        ("[sampling]\nnum_envs_per_env_runner = 2", r"unknown key; did you mean sampling.num_envs\?"),
        ("[learner]\nlr = 0.1", r"learner.lr: unknown key; did you mean learner.learning_rate\?"),
        ("[sampling]\ngamma = 0.9", r"sampling.gamma: unknown key; did you mean learner.gamma\?"),
        ("[samplng]\nnum_envs = 2", r"samplng: unknown key; did you mean sampling\?"),
        ("[samplng]", r"samplng: unknown key; did you mean sampling\?"),
        ("[zzz]\nqqq = 1", "zzz: unknown key; `headrace up --print-config` lists all keys"),
        ("broker = 3", r"broker: stands outside any \[section\]"),
        ("[sampling]\nnum_envs = 0", "sampling.num_envs: should be greater than or equal to 1, got 0"),
        ("[sampling]\nnum_envs = 'x'", "sampling.num_envs: .*, got 'x'"),
        ("[fleet]\nuntil_return = nan", "fleet.until_return: should be a finite number"),
        ("[fleet]\nfleet_id = 'a}b'", "fleet.fleet_id"),
        ("[broker]\nworker_port = 5701", r"broker.worker_port: unknown key; did you mean broker.port\?"),
        ("[logging]\nwandb = true", r"logging.wandb: unknown key; did you mean logging.loggers\?"),
        ("[worker]\nwindow_bytes = 5", r"worker.window_bytes: unknown key; did you mean broker.max_held_bytes\?"),
        ("[learner]\nenabled = false\nevaluate_every_steps = 9", "evaluate_every_steps = 9 evaluates checkpoints of"),
        ("[serving]\nenabled = true\n[learner]\nevaluate_every_steps = 9", "clients drive the episodes"),
        ("[learner]\npolicies_to_train = ['tall']", r"policies_to_train names \['tall'\]; the policies are \['default"),
        ("[learner]\nenabled = false\npolicies_to_train = []", r"policies_to_train = \[\] leaves your learner no step"),
        ("[broker]\nmax_held_bytes = 1048576", "max_batch_bytes = 134217728 exceeds max_held_bytes = 1048576"),
        ("[broker]\nmax_held_batches = 4", r"max_held_batches = 4, .* which is 4 batches .* give 5 or more"),
        ("[ray]\nworkers = 4095", "ray.workers = 4095 are more than the 4096 connections of broker.count = 1"),
        (
            "[sampling]\nnum_envs = 1\nrollout_fragment_length = 1",
            r"window_batches = 1023 keeps too little .* raise sampling.num_envs = 1 or .* keeps the 1024 that it takes",
        ),
        ("[worker]\nwindow_batches = 1", r"window_batches = 1 keeps too little .* give 2 or more"),
        (
            "[worker]\nwindow_batches = 2\n[fleet]\nworkers = 0",
            r"from one worker \(with fleet.workers = 0 .* 4 or more,",
        ),
        ("[broker]\nhost = '0.0.0.0'", r"broker.host = '0.0.0.0' serves by TCP: it needs keys\.dir"),
        ("[broker]\nhost = '127.0.0.1'", r"broker.host = '127.0.0.1' serves by TCP: it needs keys\.dir"),
        ("[broker]\nhost = 'example.org'", "allow_insecure = true"),
        ("[serving]\nenabled = true\nhost = '::1'", "serving.host = '::1' serves by TCP: it needs keys"),
        (
            "[broker]\nport = 5701",
            r"broker.port = 5701 is for TCP, and broker.host is empty, .*; give broker.host and keys\.dir",
        ),
        ("[broker]\nadvertise = 'head'", "broker.advertise = 'head' is for TCP, and broker.host is empty"),
        ("[serving]\nport = 5900", "serving: port = 5900 is for TCP, and host is empty"),
        ("[sampling]\nenv_hosts_port = 5800", "sampling.env_hosts_port = 5800 is for TCP, and broker.host is empty"),
        ("[broker]\nallow_insecure = true", "allow_insecure = true .* Unix sockets serve this user alone; give broker"),
        ("[broker]\ntransport = 'tcp'", r"broker.transport: unknown key; did you mean broker.host\?"),
        ("[broker", "is not TOML"),
        pytest.param(f"[broker]\nlease_s = {'9' * 5000}", "is not TOML", id="an int of 5,000 digits"),
        (
            "[sampling]\nsynchronous = true\npolicies = {a = {}, b = {}}\npolicy_mapping_fn = {x = 'b', y = 'b'}\n"
            "[learner]\nenabled = false\npolicies_to_train = ['a']",
            r"maps no agent to a module of learner.policies_to_train = \['a'\], so no round of sampling.synchronous",
        ),
    ],
)
def test_a_wrong_setting_gives_an_error_that_names_it(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        load_config(_file(tmp_path, text), environ={})
    assert caught.value.exit_code is ExitCode.CONFIG


@pytest.mark.parametrize(
    "sections",
    [
        {"broker": {"max_held_batches": 5}},
        {"broker": {"max_held_batches": 4}, "sampling": {"policies": {"one": {}, "other": {}}}},
        {"sampling": {"num_envs": 1, "rollout_fragment_length": 1, "policies": {"one": {}, "other": {}}}},
        {"ray": {"workers": 4094}},
        {"fleet": {"workers": 0}, "ray": {"workers": 8}, "worker": {"window_batches": 1}},
        {"sampling": {"num_envs": 1, "rollout_fragment_length": 2}},
        {"broker": {"max_held_batches": 2}, "learner": {"steps_per_update": 1024}},
        {"broker": {"max_held_batches": 1}, "fleet": {"workers": 4}},
        {"broker": {"max_held_batches": 1, "overflow": "drop_oldest"}},
        {"broker": {"max_held_batches": 1}, "learner": {"enabled": False}},
        {"broker": {"max_held_batches": 1}, "sampling": {"batch_mode": "complete_episodes"}},
    ],
)
def test_a_limit_may_be_as_small_as_the_fleet_and_an_update_allow(sections: dict[str, Any]) -> None:
    build_config(sections)


@pytest.mark.parametrize(
    ("broker", "bound"),
    [
        ({}, None),
        ({"max_staleness": 3}, 3),
        ({"overflow": "drop_stale"}, 8),
        ({"overflow": "drop_stale", "max_staleness": 3}, 3),
        ({"overflow": "drop_oldest"}, None),
    ],
)
def test_batches_have_a_bound_of_staleness_only_where_a_setting_gives_them_one(
    broker: dict[str, Any], bound: int | None
) -> None:
    assert build_config({"broker": broker}).broker.staleness_bound() == bound


@pytest.mark.parametrize(
    ("host", "env_hosts_host"),
    [
        ("", ""),
        ("localhost", "127.0.0.1"),
        ("127.8.0.1", "127.0.0.1"),
        ("[::1]", "127.0.0.1"),
        ("192.0.2.1", "0.0.0.0"),
        ("2001:db8::1", "::"),
    ],
)
def test_workers_listen_for_env_hosts_as_the_broker_does(host: str, env_hosts_host: str) -> None:
    config = build_config({"broker": {"host": host, "allow_insecure": bool(host)}})
    assert config.env_hosts_host == env_hosts_host


def test_keys_permit_tcp_and_their_folder_becomes_absolute(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("HOME", "/home/somebody")
    config = build_config({"broker": {"host": "0.0.0.0"}, "keys": {"dir": "some/keys"}})
    assert config.keys.dir == str(Path.cwd() / "some/keys")
    assert build_config(config.model_dump(mode="json")).keys.dir == config.keys.dir
    assert build_config({"keys": {"dir": "~/keys"}}).keys.dir == "/home/somebody/keys"
    assert load_config(environ={"HEADRACE_KEYS__DIR": "/keys"})[0].keys.dir == "/keys"
    assert build_config({}).keys.dir == ""


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot be read: No such file or directory \(from .*none.toml\)"):
        load_config(tmp_path / "none.toml", environ={})


def test_a_crafted_file_is_refused_without_a_wait_and_without_much_memory(tmp_path: Path) -> None:
    names = ("pipe.json", "huge.json", "wide.json", "deep.json", "tables.toml")
    pipe, huge, wide, deep, tables = (tmp_path / name for name in names)
    os.mkfifo(pipe)
    huge.touch()
    os.truncate(huge, 1 << 40)
    wide.write_bytes(orjson.dumps({"sampling": {"callbacks": [1] * 8193}}))
    deep.write_text('{"sampling": {"env_config": ' + '{"a":' * 63 + "1" + "}" * 65)
    tables.write_text("[sampling]\nenv_config = " + "[" * 5000)
    for path, seen in (
        (pipe, "cannot be read"),
        (huge, "more than 16 MiB"),
        (wide, r"sampling\.callbacks: has 8,193 entries, and at most 8,192"),
        (deep, r"sampling\.env_config: is nested deeper than 61 levels"),
        (tables, "is nested too deeply"),
    ):
        with pytest.raises(ConfigError, match=rf"{seen}.*\(from {path}\)"):
            load_config(path, environ={})
    with pytest.raises(ConfigError, match=r"module\.config: is nested deeper than 61 levels \(from flag\)"):
        load_config(flags={"module.config": orjson.loads('{"a":' * 900 + "1" + "}" * 900)}, environ={})


def test_a_pipe_that_gives_more_than_a_file_may_have_is_refused_and_not_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    text = b"[sampling]\nnum_envs = 3\n#"
    monkeypatch.setattr(config_loading, "_LARGEST_FILE", len(text))
    monkeypatch.setattr(config_loading, "_STREAMS", {})
    for more, is_refused in ((b"", False), (b"#", True), (b"#" * 1000, True)):
        ours, theirs = os.pipe()
        os.write(theirs, text + more)
        os.close(theirs)
        path = Path(f"/proc/self/fd/{ours}")
        config_loading._STREAMS.clear()
        config_loading.take_stream(path)
        os.close(ours)
        if is_refused:
            with pytest.raises(ConfigError, match="the file has more than"):
                load_config(path, environ={})
        else:
            assert load_config(path, environ={})[0].sampling.num_envs == 3


def test_a_run_of_another_version_is_resumed_without_the_settings_that_are_unknown(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    settings = tmp_path / "settings.json"
    settings.write_text('{"broker": {"log": true, "log_when_full": "stop", "lease_s": 7.0}, "spool": {"bytes": 1}}')
    config, _ = load_config(settings, environ={})
    assert config.broker.lease_s == 7.0
    assert [record.getMessage() for record in caplog.records] == [
        f"{settings}: settings of another version have no effect: broker.log, broker.log_when_full, spool.bytes"
    ]
    with pytest.raises(ConfigError, match=r"broker.log: unknown key"):
        load_config(settings.rename(tmp_path / "mine.json"), environ={})


def test_unknown_keys_of_flags_and_environment_are_named_with_their_origin() -> None:
    with pytest.raises(ConfigError, match=r"worker.window_batch: .* worker.window_batches\? \(from flag\)"):
        load_config(flags={"worker.window_batch": 3}, environ={})
    with pytest.raises(ConfigError, match=r"worker.window: .*\(from environment HEADRACE_WORKER__WINDOW\)"):
        load_config(environ={"HEADRACE_WORKER__WINDOW": "3"})


def test_text_in_place_of_a_table_or_a_list_is_refused_with_a_hint_at_json() -> None:
    with pytest.raises(
        ConfigError, match=r"module.config: should be a table, as JSON .*got '{hidden = 16}' \(from flag"
    ):
        load_config(flags={"module.config": "{hidden = 16}"}, environ={})
    with pytest.raises(ConfigError, match=r"sampling.callbacks: should be a list, as JSON .*got 'goals:Goals'"):
        load_config(environ={"HEADRACE_SAMPLING__CALLBACKS": "goals:Goals"})


@pytest.mark.parametrize(
    ("sections", "said"),
    [
        pytest.param({"sampling": {"seed": 10**5000}}, "sampling.seed: .* integer of at most 64 bits", id="seed"),
        pytest.param({"module": {"config": {"x": [10**5000]}}}, "integer of at most 64 bits", id="in a table"),
        pytest.param({"fleet": {"run_dir": 10**5000}}, "fleet.run_dir: should be a valid string, got a int", id="text"),
    ],
)
def test_an_int_with_more_digits_than_python_prints_is_refused(sections: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        build_config(sections)


def test_sections_cannot_be_changed_once_built() -> None:
    with pytest.raises(Exception, match="frozen"):
        FleetConfig().broker.host = "x"  # type: ignore[misc]


def test_a_name_is_looked_up_as_package_module_name() -> None:
    assert load_object("pathlib:Path.cwd", "sampling.env") == Path.cwd
    for path, message in {
        "pathlib": "not of the form",
        ":x": "not of the form",
        ".relative:x": "not of the form",
        "no_such_module_x:y": "module 'no_such_module_x' cannot be imported .*; check PYTHONPATH",
        "pathlib:Nothing": "module 'pathlib' has no 'Nothing'",
    }.items():
        with pytest.raises(ConfigError, match=f"module.build: .*{message}"):
            load_object(path, "module.build")
