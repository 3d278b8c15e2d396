"""Private files: files that only their owner may use, and credentials that systemd gives to a service."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from headrace.deploy.run.key_pairs import make_keys
from headrace.schemas.basics.run_files import mode_for_others
from headrace.schemas.credentials.key_files import read_key_file
from headrace.schemas.credentials.keys import client_keys
from headrace.schemas.errors import KeysError


def mode_seen(path: Path) -> int:
    with path.open() as file:
        return mode_for_others(file.fileno(), path)


@pytest.fixture
def secret(tmp_path: Path) -> Path:
    make_keys(tmp_path / "keys")
    return tmp_path / "keys" / "worker.secret"


@pytest.mark.parametrize(("mode", "others"), [(0o600, 0), (0o400, 0), (0o640, 0o640), (0o604, 0o604), (0o620, 0o620)])
def test_a_file_that_others_may_use_is_not_private(secret: Path, mode: int, others: int) -> None:
    secret.chmod(mode)
    assert mode_seen(secret) == others


def test_a_pipe_in_place_of_a_key_is_not_waited_for(secret: Path) -> None:
    secret.unlink()
    os.mkfifo(secret, 0o600)
    with pytest.raises(KeysError, match="it is damaged"):
        read_key_file(secret)


@pytest.mark.skipif(os.geteuid() != 0, reason="needs files of root")
def test_a_systemd_credential_is_read_although_its_mode_has_a_group_right(
    secret: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    secret.chmod(0o440)
    with pytest.raises(KeysError, match="others may read it"):
        read_key_file(secret)
    monkeypatch.setenv("CREDENTIALS_DIRECTORY", str(secret.parent))
    assert read_key_file(secret)["role"] == "worker"
    for mode in (0o444, 0o460, 0o441):
        secret.chmod(mode)
        with pytest.raises(KeysError, match="others may read it"):
            read_key_file(secret)
    secret.chmod(0o440)
    os.chown(secret, 0, 12345)
    with pytest.raises(KeysError, match="others may read it"):
        read_key_file(secret)
    os.chown(secret, 0, 0)
    secret.parent.chmod(0o770)
    with pytest.raises(KeysError, match="others may read it"):
        read_key_file(secret)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be another user")
def test_a_folder_of_keys_of_another_user_is_a_named_error(secret: Path) -> None:
    os.seteuid(10001)
    try:
        with pytest.raises(KeysError, match=r"user 10001 cannot read it: Permission denied; .*chown -R USER"):
            client_keys(str(secret.parent), "worker")
    finally:
        os.seteuid(0)


ME, MY_GROUP = 10001, 10001


def seen_in_a_pod(monkeypatch: pytest.MonkeyPatch, mode: int, *, owner: int, group: int) -> int:
    """The mode for others of a file, seen by a user who is not root."""
    about = os.stat_result((stat.S_IFREG | mode, 0, 0, 1, owner, group, 0, 0, 0, 0))
    for name, value in {"geteuid": ME, "getegid": MY_GROUP, "getgroups": [MY_GROUP, 42]}.items():
        monkeypatch.setattr(os, name, lambda value=value: value)
    monkeypatch.setattr(os, "fstat", lambda descriptor: about)
    return mode_for_others(0, Path("worker.secret"))


@pytest.mark.parametrize(("mode", "group"), [(0o440, 42), (0o440, MY_GROUP), (0o640, MY_GROUP)])
def test_a_file_of_root_for_the_group_of_the_pod_is_private(
    mode: int, group: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As with `fsGroup` in a pod: kubelet gives root's file of mode 0400 to the group, with mode 0440."""
    assert seen_in_a_pod(monkeypatch, mode, owner=0, group=group) == 0


@pytest.mark.parametrize(
    ("mode", "owner", "group"),
    [(0o440, ME, MY_GROUP), (0o440, 0, 7), (0o444, 0, 42), (0o460, 0, 42), (0o644, 0, 42), (0o440, 0, 0)],
)
def test_any_other_file_with_group_or_world_rights_is_not_private(
    mode: int, owner: int, group: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert seen_in_a_pod(monkeypatch, mode, owner=owner, group=group) == mode
