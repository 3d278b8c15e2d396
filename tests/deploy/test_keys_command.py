"""`headrace keys init`: files that nobody else can read at any moment, and a fleet that runs with them."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from pathlib import Path

import orjson
import pytest

from headrace.deploy import key_pairs
from headrace.deploy.doctor import examine
from headrace.deploy.key_pairs import make_keys, sound_roles
from headrace.schemas.config import BrokerSection, FleetConfig, KeysSection
from headrace.schemas.errors import ExitCode, KeysError
from headrace.schemas.keys import ROLES, read_broker_keys, read_client_keys, read_key_file
from support.waiting import wait_until

pytestmark = pytest.mark.processes


def headrace(*arguments: str, cwd: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "headrace.deploy", *arguments]
    return subprocess.run(
        command, cwd=cwd, env={**os.environ, **environment}, capture_output=True, text=True, check=False, timeout=200
    )


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_init_makes_keys_for_all_roles_and_says_what_to_copy_where(tmp_path: Path) -> None:
    result = headrace("keys", "init", cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    keys = tmp_path / "keys"
    assert mode(keys) == 0o700
    assert {path.name for path in keys.iterdir()} == {
        *(f"{role}.{half}" for role in ROLES for half in ("secret", "public")),
        "http.token",
    }
    assert mode(keys / "http.token") == 0o600
    assert {mode(path) for path in keys.glob("*.secret")} == {0o600}
    for words in (f"keys.dir={keys}", "worker's machine: worker.secret broker.public", "learner.secret broker.public"):
        assert words in result.stdout
    assert all(read_key_file(path)["secret"] not in result.stdout for path in keys.glob("*.secret"))
    assert sound_roles(keys) == sorted(ROLES)


def test_keys_that_are_there_are_replaced_only_by_force(tmp_path: Path) -> None:
    folder = tmp_path / "mine"
    make_keys(folder)
    before = read_client_keys(folder, "worker")
    (folder / "worker.public").unlink()
    result = headrace("keys", "init", "--dir", str(folder), cwd=tmp_path)
    assert result.returncode == ExitCode.KEYS
    assert "broker.secret cannot be used: it is there already; --force replaces it and all others" in result.stderr
    assert read_client_keys(folder, "worker") == before
    assert headrace("keys", "init", "--dir", str(folder), "--force", cwd=tmp_path).returncode == 0
    assert read_client_keys(folder, "worker") != before
    assert len(read_broker_keys(folder).roles) == len(ROLES) - 1


def test_a_secret_is_never_readable_by_others_not_even_while_it_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Looked at before its first byte, whatever the umask, and also where somebody has laid a link beforehand."""
    seen: list[tuple[str, int]] = []
    fdopen = os.fdopen

    def look(descriptor: int, how: str) -> object:
        status = os.fstat(descriptor)
        seen.append((str(Path(f"/proc/self/fd/{descriptor}").readlink()), stat.S_IMODE(status.st_mode)))
        assert status.st_size == 0
        return fdopen(descriptor, how)

    (tmp_path / "worker.secret").symlink_to(tmp_path / "elsewhere")
    monkeypatch.setattr(key_pairs.os, "fdopen", look)
    old = os.umask(0)
    try:
        make_keys(tmp_path)
    finally:
        os.umask(old)
    assert {name for name, _ in seen} == {
        *(str(tmp_path / f"{role}.{half}") for role in ROLES for half in ("secret", "public")),
        str(tmp_path / "http.token"),
    }
    assert {bits for name, bits in seen if not name.endswith(".public")} == {0o600}
    assert not (tmp_path / "elsewhere").exists()


@pytest.mark.parametrize("bits", [0o755, 0o710, 0o770])
def test_a_folder_that_others_may_look_into_gets_no_keys(tmp_path: Path, bits: int) -> None:
    folder = tmp_path / "open"
    folder.mkdir()
    folder.chmod(bits)
    with pytest.raises(KeysError, match=rf"others may look into it \(mode 0{bits:o}\); chmod 700 {folder}"):
        make_keys(folder)
    assert not list(folder.iterdir())


def test_a_folder_that_cannot_be_made_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    result = headrace("keys", "init", "--dir", "file/keys", cwd=tmp_path)
    assert result.returncode == ExitCode.KEYS
    assert result.stderr.startswith("error: keys: file/keys cannot be used: it cannot be written: Not a directory")


def test_help_ends_with_examples_that_can_be_pasted(tmp_path: Path) -> None:
    result = headrace("keys", "init", "--help", cwd=tmp_path)
    assert result.returncode == 0
    assert "    headrace keys init" in result.stdout.rpartition("Examples:")[2].split("\n")


def test_doctor_says_whether_the_keys_are_there_and_sound(tmp_path: Path) -> None:
    folder = tmp_path / "keys"

    def verdict(**broker: object) -> tuple[str, str]:
        config = FleetConfig(keys=KeysSection(dir=str(folder)), broker=BrokerSection(**broker))
        check = next(check for check in examine(config) if check.name == "keys")
        return check.verdict, check.seen

    assert verdict() == (
        "fail",
        f"keys: {folder} cannot be used: there is no such folder; headrace keys init --dir {folder}",
    )
    make_keys(folder)
    assert verdict() == ("ok", f"{folder}: broker, client, env-host, learner, supervisor, worker")
    for path in folder.iterdir():  # what a machine of workers has
        if path.name not in ("worker.secret", "broker.public"):
            path.unlink()
    assert verdict() == ("ok", f"{folder}: worker")
    (folder / "worker.secret").chmod(0o604)
    assert verdict()[0] == "fail"
    (folder / "worker.secret").unlink()
    assert "it has no .secret file" in verdict()[1]
    none = FleetConfig(broker=BrokerSection(host="0.0.0.0", allow_insecure=True))
    assert next(check for check in examine(none) if check.name == "keys").verdict == "warn"


@pytest.mark.slow
def test_a_fleet_with_keys_trains_and_its_books_balance(tmp_path: Path) -> None:
    make_keys(tmp_path / "keys")
    run = ("--run-dir", "run", "--num-envs", "2", "--workers", "2", "--until-steps", "5000", "--timeout-s", "180")
    result = headrace("up", *run, "--json", "--set", "keys.dir=keys", cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    found = orjson.loads(result.stdout)
    assert found["balanced"] is True
    assert found["weights_seq"] > 1
    assert not list((tmp_path / "run" / "recorders").iterdir()), "the supervisor's obituaries were heard"
    assert "with keys" in (tmp_path / "run" / "logs" / "broker.log").read_text()
    assert "refused" not in (tmp_path / "run" / "logs" / "broker.log").read_text()


def test_up_without_its_keys_starts_nothing(tmp_path: Path) -> None:
    result = headrace("up", "--run-dir", "run", "--set", "keys.dir=keys", cwd=tmp_path)
    assert result.returncode == ExitCode.KEYS
    assert f"{tmp_path / 'keys' / 'supervisor.secret'} cannot be used: there is no such file" in result.stderr
    assert not (tmp_path / "run" / "fleet.json").exists()


def test_a_worker_without_keys_ends_with_a_code_that_no_restart_cures(tmp_path: Path) -> None:
    make_keys(tmp_path / "keys")
    arguments = ("broker", "--run-dir", "b", "--fleet-id", "f", "--set", "keys.dir=keys")
    command = [sys.executable, "-m", "headrace.deploy", *arguments]
    with subprocess.Popen(command, cwd=tmp_path, stderr=subprocess.DEVNULL) as broker:
        wait_until((tmp_path / "b" / "broker.json").exists, what="the broker's start")
        endpoint = orjson.loads((tmp_path / "b" / "broker.json").read_bytes())["endpoints"]["worker"]
        where = ("--endpoint", endpoint, "--fleet-id", "f", "--run-dir", "w", "--set", "worker.connect_timeout_s=2")
        bare = headrace("worker", *where, cwd=tmp_path)
        make_keys(tmp_path / "others")
        (tmp_path / "others" / "broker.public").write_text((tmp_path / "keys" / "broker.public").read_text())
        stranger = headrace("worker", *where, cwd=tmp_path, HEADRACE_KEYS__DIR="others")
        broker.terminate()
    assert (bare.returncode, stranger.returncode) == (ExitCode.KEYS, ExitCode.KEYS)
    assert "name their folder in keys.dir" in " ".join(bare.stderr.split())
    assert "does not let in the worker key" in " ".join(stranger.stderr.split())
