"""Users with least rights in a shared Redis: how they are made, and a real fleet that needs no other right."""

from __future__ import annotations

import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from io import StringIO
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import orjson
import pytest
import redis

from headrace.broker.redis.client import connect
from headrace.broker.redis.commands import USERS
from headrace.deploy.annexes.chaos.deep_audit import audit_deeply
from headrace.deploy.annexes.watch.state.ps import reported
from headrace.deploy.fleet.checkpoint_copy import copies_in
from headrace.deploy.report.audit import audit_run
from headrace.deploy.run.fleet_file import read_fleet_file
from headrace.deploy.run.redis_server import check_url
from headrace.deploy.run.redis_users import make_users
from headrace.deploy.run.redis_view import FleetView
from headrace.deploy.trained.saved_policy import find_policy
from headrace.schemas.accounts.redis_keys import TOTALS, WORKERS, key_name
from headrace.schemas.errors import ConfigError, KeysError, RedisUnavailableError
from headrace.schemas.settings.config import RedisSection
from headrace.schemas.settings.redis_url import current_url
from support.fleets.running_fleet import RunningFleet
from support.secured_redis import SecuredRedis
from support.waiting import TIMEOUT_S

FLEET = "shared"
SMALL = ("--workers", "1", "--num-envs", "8", "--set", "learner.epochs=1", "--set", f"fleet.fleet_id={FLEET}")

MakeServer = Callable[..., Any]


def keys_redis(folder: Path, *words: str) -> str:
    command = [sys.executable, "-m", "headrace.deploy", "keys", "redis", "--fleet-id", FLEET, "--dir", str(folder)]
    made = subprocess.run([*command, *words], capture_output=True, text=True, check=False, timeout=TIMEOUT_S)
    assert made.returncode == 0, made.stderr
    return made.stdout


def private_file(path: Path, text: str) -> Path:
    path.touch(mode=0o600)
    path.write_text(text)
    return path


def make_users_in(admin: Any, keys: Path, address: str, *, force: bool = False) -> None:
    """Make the users as the guide says: run the commands, and put the address of the server into the files."""
    for command in make_users(keys, FLEET, force=force):
        admin.execute_command(*command.split())
    for path in keys.glob("*.url"):
        path.write_text(path.read_text().replace("redis://", f"{address.partition('://')[0]}://"))
        path.write_text(path.read_text().replace("127.0.0.1:6379/0", address.rpartition("@")[2]))


def url_in(path: Path) -> str:
    return current_url(RedisSection(url=str(path)).url)


@pytest.fixture
def admin(secured: SecuredRedis) -> Iterator[Any]:
    with redis.Redis.from_url(secured.plain_url, protocol=2) as client:
        yield client


@pytest.mark.thorough
@pytest.mark.chaos
def test_a_fleet_works_with_its_writers_rights_and_the_reader_cannot_write(
    secured: SecuredRedis, admin: Any, tmp_path: Path
) -> None:
    keys, run = tmp_path / "keys", tmp_path / "run"
    make_users_in(admin, keys, secured.url())
    writer, reader = keys / "redis-writer.url", keys / "redis-reader.url"
    options = (*SMALL, "--redis-url", str(writer))

    def none_was_refused() -> bool:
        assert admin.execute_command("ACL", "LOG") == []
        return True

    with RunningFleet(run, *options) as fleet:
        fleet.wait_until(lambda: none_was_refused() and fleet.steps() > 3_000, "training has begun")
        fleet.send(signal.SIGKILL, "learner")
        fleet.send(signal.SIGKILL, "worker", slot=0)
        with connect(url_in(reader), 30.0) as client:
            shelf = copies_in(client, FLEET)
            fleet.wait_until(
                lambda: none_was_refused() and (shelf.version() or (0, 0))[0] == 2, "the next checkpoint is copied"
            )
            fleet.wait_until(lambda: client.hgetall(key_name(FLEET, WORKERS)), "the next worker is reported")
        assert reported(read_fleet_file(run / "fleet.json"), run)[0].reported_unix_s, "ps may read what it shows"
        fleet.kill_everything()
    shutil.rmtree(run)
    with RunningFleet(run, *options, "--until-steps", "1000") as fleet:
        result = fleet.finish()
    assert (result["returncode"], result["balanced"]) == (0, True), result["stderr"]
    assert "going on from the one in Redis, save" in result["stderr"]
    assert audit_run(run, as_json=False, stream=StringIO()) == []
    said_deeply = StringIO()
    audit_deeply(run, as_json=False, stream=said_deeply)
    assert "✓ the sources agree" in said_deeply.getvalue()
    assert none_was_refused()

    page = orjson.loads((run / "fleet.json").read_bytes())
    assert page["redis_url"] == f"file:{writer}"
    (run / "fleet.json").write_bytes(orjson.dumps(page | {"redis_url": url_in(reader)}))
    with FleetView(url_in(reader), FLEET) as view:
        assert view.learner_rows()
        assert view.read().reported_unix_s
    assert audit_run(run, as_json=False, stream=StringIO()) == []
    audit_deeply(run, as_json=False, stream=StringIO())
    assert find_policy(str(reader), FLEET).arrays
    assert none_was_refused()
    with connect(url_in(reader), 30.0) as client:
        key = key_name(FLEET, TOTALS)
        for command in (("SET", key, "1"), ("HSET", key, "a", "1"), ("DEL", key), ("EVAL", "return 1", "0"), ("INFO",)):
            with pytest.raises(redis.exceptions.NoPermissionError):
                client.execute_command(*command)
        with pytest.raises(redis.exceptions.NoPermissionError):
            client.get("headrace:{another}:totals")


@pytest.mark.processes
def test_the_printed_acl_lines_create_the_users_and_show_no_password(make_server: MakeServer, tmp_path: Path) -> None:
    server, keys = make_server().start(), tmp_path / "keys"
    said = keys_redis(keys)
    lines = re.findall(r"^  (ACL SETUSER .*)$", said, re.MULTILINE)
    assert [line.split()[2] for line in lines] == ["headrace-shared-writer", "headrace-shared-reader"]
    urls = {user: url_in(keys / f"redis-{user}.url") for user in USERS}
    assert all(urlsplit(url).password not in said for url in urls.values())
    assert {path.stat().st_mode & 0o777 for path in (keys, *keys.iterdir())} == {0o700, 0o600}
    with server.client() as client:
        for line in lines:
            client.execute_command(*line.split())
    address = server.url.rpartition("@")[2]
    for user, url in urls.items():
        private_file(keys / f"redis-{user}.url", url.replace("127.0.0.1:6379/0", address))
    assert keys_redis(keys) == said
    assert urls != {user: url_in(keys / f"redis-{user}.url") for user in USERS}, "the address stays as edited"
    check_url(url_in(keys / "redis-writer.url"), FLEET)
    with pytest.raises(RedisUnavailableError, match=r"no permissions to run the 'set' .*--fleet-id shared$"):
        check_url(url_in(keys / "redis-reader.url"), FLEET)


@pytest.mark.processes
def test_passwords_stay_unless_forced(make_server: MakeServer, tmp_path: Path) -> None:
    server, keys = make_server().start(), tmp_path / "keys"
    writer = keys / "redis-writer.url"
    with server.client() as admin:
        make_users_in(admin, keys, server.url)
        first = url_in(writer)
        check_url(first, FLEET)
        make_users_in(admin, keys, server.url)
        assert url_in(writer) == first
        make_users_in(admin, keys, server.url, force=True)
    check_url(url_in(writer), FLEET)
    with pytest.raises(RedisUnavailableError, match=r"(?i)invalid username-password"):
        check_url(first, FLEET)


def test_url_files_of_another_fleet_and_open_folders_are_refused(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    make_users(keys, FLEET)
    with pytest.raises(
        KeysError, match="it is not of headrace-other-writer; name another --dir, or replace it by --force"
    ):
        make_users(keys, "other")
    make_users(keys, "other", force=True)
    assert url_in(keys / "redis-writer.url").startswith("redis://headrace-other-writer:")
    with pytest.raises(ConfigError, match="--fleet-id: name the fleet"):
        make_users(keys, "all*")
    keys.chmod(0o755)
    with pytest.raises(KeysError, match=r"others may look into it .*chmod 700"):
        make_users(keys, "other")


@pytest.mark.processes
def test_errors_name_a_command_that_a_user_lacks_and_the_missing_fleet_id(make_server: MakeServer) -> None:
    server = make_server().start()
    rules = ["reset", "on", ">word", "~headrace:{mine}:*", "+@all", "-@admin", "-eval"]
    with server.client() as client:
        client.execute_command("ACL", "SETUSER", "nearly", *rules)
    url = re.sub(r"//[^@]*@", "//nearly:word@", server.url)
    with pytest.raises(RedisUnavailableError, match=r"no permissions to run the 'eval' command; make users"):
        check_url(url, "mine")
    with pytest.raises(RedisUnavailableError, match=r"; name the fleet whose keys .* fleet\.fleet_id=ID"):
        check_url(url)
