"""`headrace keys`: secret files that other users can read at no moment, and a fleet that runs with its keys."""

from __future__ import annotations

import errno
import os
import shutil
import stat
import subprocess
import sys
from pathlib import Path

import orjson
import pytest

from headrace.deploy.annexes.doctor.examination import examine, sound_roles
from headrace.deploy.annexes.watch.state.ps import table
from headrace.deploy.report.progress import ProgressView
from headrace.deploy.run import key_pairs
from headrace.deploy.run.fleet_file import FleetFile
from headrace.deploy.run.goal import Goal, RunNumbers
from headrace.deploy.run.key_pairs import add_key, listed_keys, make_keys, revoke_key, where_to_copy
from headrace.deploy.run.redis_view import Snapshot
from headrace.schemas.accounts.redis_keys import SESSIONS_REVOKED, labelled
from headrace.schemas.credentials.key_files import read_key_file
from headrace.schemas.credentials.keys import ROLES, read_broker_keys, read_client_keys
from headrace.schemas.errors import ExitCode, KeysError
from headrace.schemas.settings.config import BrokerSection, FleetConfig, KeysSection
from support.waiting import TIMEOUT_S, wait_until

pytestmark = pytest.mark.processes


def headrace(*arguments: str, cwd: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "headrace.deploy", *arguments]
    return subprocess.run(
        command,
        cwd=cwd,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
        timeout=TIMEOUT_S,
    )


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def umask() -> int:
    """The permissions that no new file gets; asking for it sets it."""
    mask = os.umask(0o077)
    os.umask(mask)
    return mask


def test_init_makes_keys_for_all_roles_and_lists_the_files_to_copy(tmp_path: Path) -> None:
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
    for words in (
        "The broker's machine keeps all of it. Start `headrace up` there, or `headrace broker`, with\n",
        f"  --set keys.dir={keys}\n",
        "a worker's machine: worker.secret broker.public\n    for `headrace worker --count` also: supervisor.secret\n",
        "    where env hosts of other machines connect to it also: env-host.public\n",
        "    where it serves clients also: client.public\n",
        "a learner's machine: learner.secret broker.public\n",
        "an env-host's machine: env-host.secret worker.public\n",
        "a client's machine: client.secret worker.public\n    by HTTP instead: the word in http.token\n",
        "--set keys.dir=keys, or HEADRACE_KEYS__DIR",
    ):
        assert words in result.stdout
    assert all(read_key_file(path)["secret"] not in result.stdout for path in keys.glob("*.secret"))
    assert sound_roles(keys) == sorted(ROLES)


def test_existing_keys_are_replaced_only_with_force(tmp_path: Path) -> None:
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
    """The mode is checked before the first byte is written, with umask 0, and where a link has the file's name."""
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


def test_a_keys_folder_that_cannot_be_made_gives_an_error_of_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    result = headrace("keys", "init", "--dir", "file/keys", cwd=tmp_path)
    assert result.returncode == ExitCode.KEYS
    assert result.stderr.startswith("error: keys: file/keys cannot be used: it cannot be written: Not a directory")


@pytest.mark.parametrize(
    ("role", "server"), [("learner", "broker"), ("supervisor", "broker"), ("env-host", "worker"), ("client", "worker")]
)
def test_a_new_key_names_the_machines_that_need_its_halves(tmp_path: Path, role: str, server: str) -> None:
    make_keys(tmp_path / "keys")
    said = where_to_copy(tmp_path / "keys", add_key(tmp_path / "keys", role, "lab"))
    assert f"A {server} that runs with this folder admits it within seconds" in said
    assert f"one with another folder needs {role}.lab.public there" in said
    assert f"{{{role}.lab.secret,{server}.public}} HOST:keys/" in said


def test_a_group_has_keys_of_its_own_which_are_listed_and_revoked(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    make_keys(keys)
    added = headrace("keys", "add", "worker", "--group", "gpu", cwd=tmp_path)
    assert added.returncode == 0, added.stderr
    for words in (
        "one with another folder needs worker.gpu.public there",
        "{worker.gpu.secret,broker.public} HOST:keys/",
        "for `headrace worker --count` also: supervisor.gpu.secret",
        "env hosts and clients of these workers also: worker.gpu.public",
    ):
        assert words in added.stdout
    assert (mode(keys / "worker.gpu.secret"), mode(keys / "worker.gpu.public")) == (0o600, 0o644 & ~umask())
    again = headrace("keys", "add", "worker", "--group", "gpu", cwd=tmp_path)
    assert again.returncode == ExitCode.KEYS
    assert "worker.gpu.secret cannot be used: it is there already" in again.stderr
    (key,) = (row for row in listed(tmp_path) if row["group"] == "gpu")
    assert (key["role"], key["state"], len(key["fingerprint"])) == ("worker", "valid", 16)
    assert read_broker_keys(keys).roles[key["public"].encode()] == "worker"
    assert sound_roles(keys) == sorted([*ROLES, "worker.gpu"])
    revoked = headrace("keys", "revoke", "worker", "--group", "gpu", cwd=tmp_path)
    assert revoked.returncode == 0, revoked.stderr
    assert [row for row in listed(tmp_path) if row["group"] == "gpu"] == [{**key, "state": "revoked"}]
    assert key["public"].encode() not in read_broker_keys(keys).roles
    assert not list(keys.glob("worker.gpu.[ps]*")), "nothing of it is left to be used"
    assert headrace("keys", "add", "worker", "--group", "gpu", cwd=tmp_path).returncode == 0
    assert [row["state"] for row in listed(tmp_path) if row["group"] == "gpu"] == ["revoked", "valid"]
    table = headrace("keys", "list", cwd=tmp_path).stdout
    assert table.count("gpu") == 2
    assert "revoked" in table


def listed(folder: Path) -> list[dict[str, str]]:
    result = headrace("keys", "list", "--json", cwd=folder)
    assert result.returncode == 0, result.stderr
    rows: list[dict[str, str]] = orjson.loads(result.stdout)["keys"]
    return rows


def test_keys_list_ends_with_an_error_that_names_the_unusable_files(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    make_keys(keys)
    secret = keys / "worker.secret"
    secret.write_text(secret.read_text()[:60])
    (keys / "learner.secret").chmod(0o644)
    result = headrace("keys", "list", cwd=tmp_path)
    assert result.returncode == ExitCode.KEYS
    assert "supervisor" in result.stdout, "all keys are shown before"
    assert "learner.secret cannot be used: others may read it" in result.stderr
    assert "nor can worker.secret" in result.stderr
    result = headrace("keys", "list", "--json", cwd=tmp_path)
    assert result.returncode == ExitCode.KEYS
    assert len(orjson.loads(result.stdout)["problems"]) == 2


def test_a_missing_or_revoked_key_cannot_be_revoked(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    make_keys(keys)
    add_key(keys, "worker", "gpu")
    result = headrace("keys", "revoke", "worker", "--group", "none", cwd=tmp_path)
    assert result.returncode == ExitCode.KEYS
    assert "there is no such key; the worker keys there are worker, worker.gpu; headrace keys list" in result.stderr
    revoke_key(keys, "worker", "gpu")
    with pytest.raises(KeysError, match=r"the worker\.gpu key is revoked already"):
        revoke_key(keys, "worker", "gpu")


@pytest.mark.parametrize("left", ["", "role = ", None], ids=["empty", "cut", "unreadable"])
def test_a_damaged_revocation_file_revokes_the_key_of_its_name(
    tmp_path: Path, left: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    """A crash or a full disk may leave such a file beside the public key."""
    make_keys(tmp_path)
    key = add_key(tmp_path, "worker", "gpu")
    known = read_broker_keys(tmp_path).known
    damaged = tmp_path / f"worker.gpu.{key.fingerprint}.revoked"
    damaged.write_bytes(b"\xff" if left is None else left.encode())
    known.look(0.0)
    for judged in (known, read_broker_keys(tmp_path).known):
        assert key.public not in judged.roles
        assert sorted(judged.roles.values()) == sorted(set(ROLES) - {"broker"}), "no other key is revoked"
    assert f"{damaged} cannot be used: it is damaged" in caplog.text
    assert "the key that its name says counts as revoked" in caplog.text
    (row,) = (row for row in listed_keys(tmp_path) if row["public"] == key.public.decode())
    assert row["state"] == "revoked"


def test_a_revocation_that_is_interrupted_leaves_no_part_of_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_keys(tmp_path)
    key = add_key(tmp_path, "worker", "gpu")

    def full(descriptor: int) -> None:
        assert not list(tmp_path.glob("[!.]*.revoked")), "its name stands before it is on the disk"
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(key_pairs.os, "fsync", full)
        with pytest.raises(KeysError, match="it cannot be written: No space left"):
            revoke_key(tmp_path, "worker", "gpu")
    assert not [path for path in tmp_path.iterdir() if ".revoked" in path.name]
    assert key.public in read_broker_keys(tmp_path).roles
    revoke_key(tmp_path, "worker", "gpu")
    assert key.public not in read_broker_keys(tmp_path).roles


def test_progress_and_ps_show_the_sessions_that_a_revoked_key_ended() -> None:
    ended = {"worker.gpu": 2.0, "learner": 1.0}
    snapshot = Snapshot(gauges={labelled(SESSIONS_REVOKED, "key", key): count for key, count in ended.items()})
    rows = dict(ProgressView(1.0, RunNumbers(), Goal(), snapshot=snapshot).rows())
    assert rows["revoked keys"] == "3 sessions ended (learner, worker.gpu)"
    assert "revoked keys" not in dict(ProgressView(1.0, RunNumbers(), Goal()).rows())
    fleet = FleetFile(fleet_id="f", state="running", supervisor_pid=0)
    assert "1 session ended (worker.gpu)" in table(fleet, [], "", {"worker.gpu": 1})


@pytest.mark.parametrize(
    ("role", "group", "words"),
    [
        ("broker", "gpu", "'broker' is no role with groups; they are client"),
        ("worker", "../gpu", "'../gpu' is no name of a group; give up to 32"),
        ("worker", "", r"worker\.secret cannot be used: it is there already"),
    ],
)
def test_a_key_of_a_bad_role_or_group_or_an_existing_name_is_refused(
    tmp_path: Path, role: str, group: str, words: str
) -> None:
    make_keys(tmp_path / "keys")
    with pytest.raises(KeysError, match=words):
        add_key(tmp_path / "keys", role, group)


def test_a_peer_takes_the_only_key_of_its_role_or_the_key_of_its_group(tmp_path: Path) -> None:
    keys, part = tmp_path / "keys", tmp_path / "part"
    make_keys(keys)
    for group in ("gpu", "cpu"):
        add_key(keys, "worker", group)
    assert read_client_keys(keys, "worker", "").group == ""
    assert read_client_keys(keys, "worker", "cpu").group == "cpu"
    part.mkdir()
    for name in ("worker.gpu.secret", "broker.public"):
        shutil.copy2(keys / name, part)
    assert read_client_keys(part, "worker", "").group == "gpu"
    with pytest.raises(KeysError, match=r"worker\.cpu\.secret cannot be used: there is no such file"):
        read_client_keys(part, "worker", "cpu")
    shutil.copy2(keys / "worker.cpu.secret", part)
    with pytest.raises(KeysError, match=r"worker\.cpu\.secret, worker\.gpu\.secret; say by keys\.group which"):
        read_client_keys(part, "worker", "")


def test_only_a_removed_key_file_ends_the_admission_of_its_key(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    make_keys(tmp_path)
    caplog.set_level("INFO")
    known = read_broker_keys(tmp_path).known
    before = known.roles
    whole = (tmp_path / "client.public").read_text()
    (tmp_path / "client.public").write_text(whole[:60])
    (tmp_path / "learner.gone.public").symlink_to(tmp_path / "nowhere")
    known.look(0.0)
    assert known.roles == before
    assert "client.public cannot be used: it is damaged" in caplog.text
    tmp_path.rename(tmp_path.with_suffix(".away"))
    known.look(0.0)
    assert (known.roles, known.changes) == (before, 0)
    tmp_path.with_suffix(".away").rename(tmp_path)
    add_key(tmp_path, "client", "lab")
    (tmp_path / "env-host.public").unlink()
    known.look(0.0)
    assert sorted(known.roles.values()) == ["client", "client", "learner", "supervisor", "worker"]
    assert "the client.lab key" in caplog.text
    assert "is admitted no more: its file is gone" in caplog.text


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

    def without_keys(**broker: object) -> tuple[str, str]:
        config = FleetConfig(broker=BrokerSection(**broker))
        check = next(check for check in examine(config) if check.name == "keys")
        return check.verdict, check.seen

    assert without_keys() == ("ok", "none; Unix sockets serve this user alone")
    for host, others in (("0.0.0.0", "other machines"), ("127.0.0.1", "all users of this machine")):
        assert without_keys(host=host, allow_insecure=True) == ("warn", f"none; {others} can connect and read along")


@pytest.mark.thorough
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


@pytest.mark.thorough
def test_up_without_its_keys_starts_nothing(tmp_path: Path) -> None:
    result = headrace("up", "--run-dir", "run", "--set", "keys.dir=keys", cwd=tmp_path)
    assert result.returncode == ExitCode.KEYS
    assert f"{tmp_path / 'keys' / 'supervisor.secret'} cannot be used: there is no such file" in result.stderr
    assert not (tmp_path / "run" / "fleet.json").exists()


@pytest.mark.thorough
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
