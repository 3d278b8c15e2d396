"""Bad input through the real command: one sentence that says what to do, and a named exit code.

What a peer notices is shown to a worker or learner of its own, beside a broker that serves all these tests: a whole
fleet is not needed for it.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import orjson
import pytest
import zmq

from headrace.deploy.run.options import Asked, config_file
from headrace.learner_stub import EpisodeStream
from headrace.schemas.errors import ConfigError, ExitCode, RunDirError
from headrace.schemas.frames.wire import PROTOCOL_MAJOR, PROTOCOL_MINOR, MessageKind, decode_header
from headrace.schemas.messages import Reject, SupervisorHello, read
from headrace.schemas.peers.handshakes import Handshakes
from headrace.schemas.peers.ports import ephemeral_range
from headrace.schemas.settings import config_loading
from support.pipeline.delivery import BrokerThread
from support.ports import by_tcp
from support.waiting import TIMEOUT_S, wait_until

pytestmark = pytest.mark.processes

FLEET = "here"

USER_MODULE = """
import sys
import gymnasium as gym

class Bare(gym.Env):
    pass

def without_spaces(context):
    return Bare()

def leaves(context):
    sys.exit(3)

def two_lines(context):
    raise RuntimeError("no licence\\nfor the simulator")

def build(spaces):
    return None
"""


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "headrace.deploy", *arguments]


def headrace(*arguments: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command(*arguments), cwd=cwd, capture_output=True, text=True, check=False, timeout=TIMEOUT_S)


def assert_one_sentence(result: subprocess.CompletedProcess[str], code: ExitCode, *parts: str) -> None:
    assert result.returncode == code, result.stderr
    assert "Traceback" not in result.stderr
    sentence = " ".join(result.stderr.rpartition("error: ")[2].split())
    for part in parts:
        assert part in sentence


@dataclass
class ServingBroker:
    """A `headrace broker` of fleet "here"."""

    run_dir: Path

    def endpoint(self, role: str) -> str:
        return str(self.page()["endpoints"][role])

    def page(self) -> dict[str, dict[str, str]]:
        found: dict[str, dict[str, str]] = orjson.loads((self.run_dir / "broker.json").read_bytes())
        return found

    def worker(self, cwd: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
        """A worker of this fleet, started in `cwd`."""
        where = ("--endpoint", self.endpoint("worker"), "--fleet-id", FLEET, "--run-dir", str(cwd / "run"))
        return headrace("worker", *where, "--num-envs", "1", *arguments, cwd=cwd)


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServingBroker]:
    run_dir = tmp_path_factory.mktemp("broker")
    arguments = command("broker", "--run-dir", str(run_dir), "--fleet-id", FLEET)
    with subprocess.Popen(arguments, stderr=subprocess.DEVNULL) as process:
        wait_until(lambda: (run_dir / "broker.json").exists(), "the broker serves")
        yield ServingBroker(run_dir)
        process.terminate()


@pytest.mark.parametrize(
    ("setting", "parts"),
    [
        ("fleet.workers=-1", ("fleet.workers", "greater than or equal to 0", "-1")),
        ("fleet.workers=1001", ("fleet.workers", "less than or equal to 1000")),
        ("sampling.num_envs=99999999999999999999", ("sampling.num_envs", "exceeded maximum size")),
        ("sampling.rollout_fragment_length=9999999999999999999", ("rollout_fragment_length", "64 bits")),
        ("fleet.until_return=nan", ("fleet.until_return", "finite")),
        ("broker.host=8.8.8.8", ("allow_insecure = true",)),
    ],
)
def test_a_value_out_of_range_is_refused(setting: str, parts: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError) as caught:
        _ = Asked(sets=[setting]).settings
    for part in parts:
        assert part in str(caught.value)


def test_the_command_reports_a_bad_value_in_one_sentence() -> None:
    assert_one_sentence(headrace("up", "--workers", "-1"), ExitCode.CONFIG, "fleet.workers", "got -1")


@pytest.mark.parametrize(
    ("content", "parts"),
    [
        ("[sampling]\nenv_config = {x = nan}", ("sampling.env_config", "finite", "bad.toml")),
        ("[sampling]\nenv_config = {day = 2026-01-01}", ("sampling.env_config", "got a date", "bad.toml")),
        ("[broker]\nport = 65534", ("broker.port", "65533")),
        ("[broker]\nworker_port = 5701", ("broker.worker_port", "did you mean broker.port?")),
        ("[broker]\nport = 5701", ("broker.port = 5701 is for TCP", "give broker.host and keys.dir")),
        ('[broker]\nadvertise = "box"', ("broker.advertise = 'box' is for TCP", "or leave broker.advertise out")),
        ('[broker]\nhost = "127.0.0.1"', ("serves by TCP: it needs keys.dir", "leave it out to serve this user's")),
        ("[broker]\nallow_insecure = true", ("lets everyone in, and Unix sockets serve this user alone",)),
        ("[serving]\nport = 5900", ("port = 5900 is for TCP", "give host and [keys], or leave port out")),
        ('[serving]\nenabled = true\nhost = "localhost"', ("serving.host = 'localhost' serves by TCP",)),
        ("[sampling]\nenv_hosts_port = 5800", ("sampling.env_hosts_port = 5800 is for TCP", "give broker.host")),
        ("[fleet", ("is not TOML", "bad.toml")),
    ],
)
def test_a_bad_config_file_is_refused(tmp_path: Path, content: str, parts: tuple[str, ...]) -> None:
    (tmp_path / "bad.toml").write_text(content)
    with pytest.raises(ConfigError) as caught:
        _ = Asked(tmp_path / "bad.toml").settings
    for part in parts:
        assert part in str(caught.value)


def test_a_file_with_a_byte_order_mark_is_read(tmp_path: Path) -> None:
    (tmp_path / "fleet.toml").write_bytes(b"\xef\xbb\xbf[fleet]\nworkers = 7\n")
    assert Asked(tmp_path / "fleet.toml").settings.fleet.workers == 7


def test_settings_may_come_from_a_pipe_that_the_user_names() -> None:
    reader, writer = os.pipe()
    os.write(writer, b"[fleet]\nworkers = 7\n")
    os.close(writer)
    named = config_file(Path(f"/dev/fd/{reader}"))
    os.close(reader)
    for _ in range(2):
        assert Asked(named).settings.fleet.workers == 7


def test_a_pipe_that_does_not_end_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(config_loading, "_STREAM_S", 0.02)
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ConfigError, match=r"came to no end within 0.02 s \(from .*/pipe\)"):
        config_file(tmp_path / "pipe")
    with pytest.raises(ConfigError, match="pipe is no regular file"):
        _ = Asked(tmp_path / "pipe").settings


def test_a_device_without_end_is_read_up_to_a_bound() -> None:
    with pytest.raises(ConfigError, match="more than 16 MiB"):
        _ = Asked(config_file(Path("/dev/zero"))).settings
    assert "/dev/null" not in Asked(config_file(Path("/dev/null"))).resolved[1].values()


@pytest.mark.parametrize("role", ["worker", "learner"])
def test_a_malformed_endpoint_is_refused(tmp_path: Path, role: str) -> None:
    result = headrace(role, "--endpoint", "127.0.0.1:5701", "--fleet-id", FLEET, "--run-dir", str(tmp_path))
    assert_one_sentence(result, ExitCode.CONFIG, "--endpoint", "tcp://HOST:PORT", "'127.0.0.1:5701'")


def test_a_negative_slot_is_a_usage_error() -> None:
    assert headrace("worker", "--slot", "-1").returncode == ExitCode.USAGE


@pytest.mark.one_in(2)
@pytest.mark.parametrize(("name", "commands"), [("fleet.json", ("ps", "audit", "up")), ("broker.json", ("broker",))])
def test_a_damaged_file_in_the_run_directory_is_named(tmp_path: Path, name: str, commands: tuple[str, ...]) -> None:
    (tmp_path / name).write_bytes(bytes(range(256)))
    for each in commands:
        result = headrace(each, "--run-dir", str(tmp_path))
        assert_one_sentence(result, ExitCode.RUN_DIR, name, "damaged", "choose another with --run-dir")


def test_a_broker_refuses_a_port_in_use(tmp_path: Path) -> None:
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        port = holder.getsockname()[1]
        result = headrace("broker", "--run-dir", str(tmp_path), *by_tcp(port))
    assert_one_sentence(result, ExitCode.PORT_IN_USE, str(port), "already in use", "choose another broker.port")


@pytest.mark.one_in(4)
@pytest.mark.parametrize(
    ("arguments", "code", "parts"),
    [
        (("--env", "NoSuchEnv-v0"), ExitCode.ENV, ("NoSuchEnv-v0", "cannot be found", "package.module:make_env")),
        (("--env", "no_such_module:make"), ExitCode.ENV, ("no_such_module", "check PYTHONPATH")),
        (
            ("--env", "user:without_spaces"),
            ExitCode.ENV,
            ("observation space", "got None, as if the env did not set it"),
        ),
        (("--env", "user:leaves"), ExitCode.ENV, ("it called sys.exit(3) instead of raising an exception",)),
        (("--env", "user:two_lines"), ExitCode.ENV, ("no licence for the simulator", "check env and env_config")),
        (
            ("--set", "module.build=nowhere:build"),
            ExitCode.MODULE,
            ("'nowhere:build' cannot be found", "check the path"),
        ),
        (("--set", "module.build=user:build"), ExitCode.MODULE, ("user:build", "torch.nn.Module")),
        (("--fleet-id", "other"), ExitCode.WRONG_FLEET, ("serves fleet 'here', not 'other'", "check the endpoint")),
    ],
)
def test_a_worker_refuses_a_bad_env_module_or_fleet(
    tmp_path: Path, broker: ServingBroker, arguments: tuple[str, ...], code: ExitCode, parts: tuple[str, ...]
) -> None:
    (tmp_path / "user.py").write_text(USER_MODULE)
    assert_one_sentence(broker.worker(tmp_path, *arguments), code, *parts)


@pytest.mark.thorough
def test_a_newer_learner_fences_the_older_learner(tmp_path: Path, broker: ServingBroker) -> None:
    def learner(name: str) -> subprocess.Popen[str]:
        arguments = ("--endpoint", broker.endpoint("learner"), "--run-dir", str(tmp_path / name))
        return subprocess.Popen(command("learner", *arguments), stderr=subprocess.PIPE, text=True)

    def epoch() -> int:
        return int(str(broker.page()["epoch"]))

    before = epoch()
    with learner("older") as older:
        wait_until(lambda: epoch() > before, "the first learner has the lease")
        with learner("newer") as newer:
            _, words = older.communicate(timeout=TIMEOUT_S)
            newer.send_signal(signal.SIGTERM)
            newer.communicate(timeout=TIMEOUT_S)
    assert older.returncode == ExitCode.FENCED, words
    assert "error: a newer learner" in words
    assert newer.returncode == ExitCode.OK


def of_another_major(frames: list[bytes]) -> list[bytes]:
    """The same message as another protocol would begin it."""
    head = bytearray(frames[0])
    assert head[4] == PROTOCOL_MAJOR
    head[4] += 1
    return [bytes(head), *frames[1:]]


def test_a_peer_of_another_protocol_version_is_refused_by_the_broker(broker: ServingBroker) -> None:
    with zmq.Context() as context, context.socket(zmq.DEALER) as peer:
        peer.linger = 0
        for name, value in Handshakes(broker.endpoint("worker"), "supervisor", None).options().items():
            peer.setsockopt(getattr(zmq, name), value)
        peer.connect(broker.endpoint("worker"))
        hello = SupervisorHello(fleet_id=FLEET, token="0" * 16)
        peer.send_multipart(of_another_major([bytes(frame) for frame in hello.frames()]))
        assert peer.poll(60_000), "no answer"
        kind, header = decode_header(peer.recv_multipart())
    assert kind is MessageKind.REJECT
    reject = read(Reject, header)
    assert (reject.code, reject.fatal) == ("version_mismatch", True)
    assert f"{PROTOCOL_MAJOR + 1}.{PROTOCOL_MINOR}" in reject.detail


@pytest.mark.one_in(2)
@pytest.mark.parametrize("role", ["worker", "learner"])
def test_a_broker_of_another_protocol_version_ends_a_peer(tmp_path: Path, role: str) -> None:
    answer = of_another_major([bytes(frame) for frame in Reject(code="x", detail="y", fatal=True).frames()])
    with zmq.Context() as context, context.socket(zmq.ROUTER) as old:
        old.linger = 0
        port = old.bind_to_random_port("tcp://127.0.0.1")
        where = ("--endpoint", f"tcp://127.0.0.1:{port}", "--fleet-id", FLEET, "--run-dir", str(tmp_path))
        with subprocess.Popen(command(role, *where), stderr=subprocess.PIPE, text=True) as process:
            assert old.poll(60_000), "it never said HELLO"
            old.send_multipart([old.recv_multipart()[0], *answer])
            _, words = process.communicate(timeout=TIMEOUT_S)
    result = subprocess.CompletedProcess(process.args, process.returncode, "", words)
    assert_one_sentence(
        result, ExitCode.VERSION_MISMATCH, f"{PROTOCOL_MAJOR + 1}.{PROTOCOL_MINOR}", f"{PROTOCOL_MAJOR}.x"
    )


def test_a_broker_chooses_ports_outside_the_ephemeral_range(tmp_path: Path) -> None:
    low, high = ephemeral_range()
    if low <= 10_000 and high >= 65_535:
        pytest.skip("this machine leaves no ports outside the ephemeral range")
    with BrokerThread(tmp_path, host="127.0.0.1", allow_insecure=True) as broker:
        endpoints = broker.endpoints.model_dump()
    assert all(not low <= int(endpoint.rpartition(":")[2]) <= high for endpoint in endpoints.values()), endpoints


_LEAVES_A_FILE_OPEN = """
import os, sys
class Finder:
    def find_spec(name, *_):
        if name == "orjson":  # as ctypes does with a new libffi
            os.open(os.__file__, os.O_RDONLY)
sys.meta_path.insert(0, Finder)
from headrace.deploy.command.entry import main
main()
"""


@pytest.mark.parametrize("closed", [0, 1, 2])
def test_a_command_runs_with_a_closed_standard_stream(closed: int) -> None:
    shell = f'exec "$@" {closed}{"<" if closed == 0 else ">"}&-'
    arguments = ["sh", "-c", shell, "sh", sys.executable, "-c", _LEAVES_A_FILE_OPEN, "up", "--print-config"]
    result = subprocess.run(arguments, capture_output=True, text=True, check=False, timeout=TIMEOUT_S)
    assert result.returncode == 0, result.stderr
    assert ("num_envs" in result.stdout) == (closed != 1)


UNREADABLE = """up --resume loop, up --run-dir loop/run, worker --run-dir loop/run, evaluate loop, keys list --dir loop,
 up --config loop/fleet.toml, chaos --run-dir loop, rerun loop, replay loop --render new.mp4,
 export new --to minari --out loop/new"""


@pytest.mark.parametrize("line", UNREADABLE.split(","))
def test_a_path_that_cannot_be_read_is_not_said_to_be_missing(line: str, tmp_path: Path) -> None:
    if "replay" in line:
        pytest.importorskip("pyarrow", exc_type=ImportError)
    (tmp_path / "loop").symlink_to("loop")
    result = headrace(*line.split(), cwd=tmp_path)
    code = ExitCode.CONFIG if "--config" in line else ExitCode.RUN_DIR
    assert_one_sentence(result, code, "cannot be read: Too many levels of symbolic links")


def test_a_stream_of_a_path_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    (tmp_path / "loop").symlink_to("loop")
    with pytest.raises(RunDirError, match="cannot be read: Too many levels of symbolic links"):
        EpisodeStream.of(tmp_path / "loop")


def test_a_command_runs_with_an_ascii_terminal_and_without_a_home(tmp_path: Path) -> None:
    bare = {"PATH": os.environ["PATH"], "LC_ALL": "C", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0"}
    for arguments in (("up", "--help"), ("up", "--print-config")):
        result = subprocess.run(
            command(*arguments), cwd=tmp_path, env=bare, capture_output=True, check=False, timeout=TIMEOUT_S
        )
        assert result.returncode == 0, result.stderr
