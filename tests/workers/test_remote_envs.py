"""Envs on other hosts give the chunks of inline envs, and survive the loss of a host or of its connection."""

from __future__ import annotations

import gc
import shutil
import signal
import socket
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import zmq

from headrace.deploy.run.key_pairs import make_keys
from headrace.schemas.chunks.chunk import EpisodeChunk
from headrace.schemas.errors import ConfigError, ExitCode, PortInUseError
from headrace.schemas.frames.wire import MessageKind, decode, encode
from headrace.workers import EnvRunnerConfig, SingleAgentEnvRunner
from headrace.workers.envs.remote import pool as remote_pool
from headrace.workers.envs.remote.env_messages import EnvHeartbeat, EnvHostHello
from support.envs.toy import check_books
from support.fleets.env_hosts import EnvHosts, cable_to
from support.ports import free_port
from support.waiting import wait_until

pytestmark = pytest.mark.processes


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[EnvHosts]:
    with EnvHosts(tmp_path) as started:
        yield started


@pytest.fixture
def by_tcp(tmp_path: Path) -> Iterator[EnvHosts]:
    with EnvHosts(tmp_path, free_port()) as started:
        yield started


def runner(
    hosts: EnvHosts, env: str = "CartPole-v1", placement: str = "remote", on_wait: Any = None, **settings: Any
) -> SingleAgentEnvRunner:
    defaults = {"num_envs": 3, "seed": 3, "rollout_fragment_length": 8, **hosts.at}
    config = EnvRunnerConfig(env=env, **{**defaults, "env_placement": placement, **settings})
    return SingleAgentEnvRunner(config, run_uid="test", on_wait=on_wait)


def brief(chunk: EpisodeChunk) -> tuple[Any, ...]:
    columns = {name: column.tobytes() for name, column in chunk.columns.items()}
    arrays = (chunk.obs.tobytes(), chunk.actions.tobytes(), chunk.rewards.tobytes())
    return (chunk.episode_id, chunk.chunk_index, chunk.t_start, chunk.end, chunk.seed, arrays, columns, chunk.infos)


def lives(chunks: list[EpisodeChunk]) -> dict[int, dict[tuple[str, int], bytes]]:
    """By env: what was seen at each time of each episode."""
    seen: dict[int, dict[tuple[str, int], bytes]] = {}
    for chunk in chunks:
        for t in range(len(chunk)):
            key = (chunk.episode_id, chunk.t_start + t)
            assert key not in seen.setdefault(chunk.env_index, {}), "delivered twice"
            seen[chunk.env_index][key] = chunk.obs[t].tobytes() + chunk.actions[t].tobytes()
    return seen


def who_acts(sampler: SingleAgentEnvRunner) -> set[int]:
    """The lanes that step now. Tests ask it until a host has started, which needs the processor too."""
    time.sleep(0.05)
    return {chunk.env_index for chunk in sampler.sample_fragment() if len(chunk)}


def test_remote_envs_give_chunks_that_are_bit_identical_to_inline_envs(hosts: EnvHosts) -> None:
    """These envs observe the context that their creators receive, so a difference would be seen."""
    hosts.start(env := "support.envs.telling:Telling", 3)
    found = []
    for placement in ("inline", "remote"):
        with runner(hosts, env, placement, rollout_fragment_length=40, num_workers=4) as sampler:
            chunks = [chunk for _ in range(3) for chunk in sampler.sample_fragment()]
            chunks += sampler.sample(num_episodes=3)
            chunks += sampler.sample(num_timesteps=20, force_reset=True, random_actions=True)
            found.append(([brief(chunk) for chunk in chunks], sampler.totals, sampler.get_spaces()))
            check_books(sampler)
    assert found[0] == found[1]


def test_connections_that_break_within_the_lease_lose_or_repeat_no_step(by_tcp: EnvHosts) -> None:
    with runner(by_tcp, placement="inline") as sampler:
        expected = [brief(chunk) for _ in range(16) for chunk in sampler.sample_fragment()]
    with cable_to(by_tcp.at["env_hosts_port"]) as cable:
        by_tcp.start("CartPole-v1", 3, to=f"tcp://127.0.0.1:{cable.port}")
        with runner(by_tcp, env_hosts_lease_s=20.0) as sampler:
            found = []
            for _ in range(16):
                if cable.pulled < 3:
                    cable.pull()
                found += [brief(chunk) for chunk in sampler.sample_fragment()]
            assert sampler.totals.discarded == {}
            check_books(sampler)
        assert cable.pulled == 3
    assert found == expected


@pytest.mark.one_in(2)
@pytest.mark.parametrize("how", [signal.SIGSTOP, signal.SIGKILL])
def test_a_lost_host_loses_only_its_own_episodes_and_other_hosts_go_on(how: signal.Signals, hosts: EnvHosts) -> None:
    with runner(hosts, placement="inline") as sampler:
        sound = lives([chunk for _ in range(60) for chunk in sampler.sample_fragment()])
    hosts.start("CartPole-v1", 2)
    with runner(hosts, env_hosts_lease_s=1.5) as sampler:
        chunks: list[EpisodeChunk] = []

        def acting() -> set[int]:
            time.sleep(0.05)
            chunks.extend(fragment := list(sampler.sample_fragment()))
            return {chunk.env_index for chunk in fragment if len(chunk)}

        assert acting() == {0, 1}, "two envs have a host, the third waits"
        lost = hosts.start("CartPole-v1", 1)
        wait_until(lambda: acting() == {0, 1, 2}, what="the host that came late")
        lost.send_signal(how)
        wait_until(lambda: acting() == {0, 1}, what="the other host's envs alone")
        assert set(sampler.totals.discarded) <= {"env_host_lost"}
        if how is signal.SIGSTOP:
            lost.send_signal(signal.SIGCONT)
        else:
            hosts.start("CartPole-v1", 1)
        wait_until(lambda: acting() == {0, 1, 2}, what="a host in the place of the lost one")
        check_books(sampler)
        assert sampler.totals.env_failures == 0
        assert sampler.totals.env_rebuilds >= 1
        found = lives(chunks)
    for lane in (0, 1):
        alike = sound[lane].keys() & found[lane].keys()
        assert len(alike) > 100
        assert all(sound[lane][key] == found[lane][key] for key in alike)


def test_a_spare_host_takes_over_the_envs_of_a_host_that_leaves(
    hosts: EnvHosts, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = hosts.start("CartPole-v1", 3)
    with runner(hosts, env_hosts_lease_s=1.5) as sampler:
        pool: Any = sampler._sampler.envs
        assert "runs headrace" not in caplog.text
        monkeypatch.setattr(remote_pool, "headrace_version", lambda: "9.9")
        hosts.start("CartPole-v1", 3)
        wait_until(lambda: who_acts(sampler) and len(pool._backend._places.hosts) == 2, what="the spare one")
        first.terminate()
        wait_until(
            lambda: who_acts(sampler) == {0, 1, 2} and len(pool._backend._places.hosts) == 1,
            what="the spare one's envs",
        )
        check_books(sampler)
    assert f"runs headrace {version('headrace')}, this worker 9.9" in caplog.text


@pytest.mark.one_in(2)
@pytest.mark.parametrize(("fault", "reason"), [("segfaults", "env_crash"), ("hangs with the lock", "env_hang")])
def test_a_fault_of_a_remote_env_is_reported_like_that_of_a_local_env(fault: str, reason: str, hosts: EnvHosts) -> None:
    table = f'{{"lane": 2, "faults": {{"step": "{fault}"}}}}'
    hosts.start("support.envs.troubled:Troubled", 3, f"sampling.env_config={table}", "sampling.env_step_timeout_s=1")
    with runner(hosts, "support.envs.troubled:Troubled") as sampler:
        wait_until(lambda: who_acts(sampler) and sampler.totals.discarded.get(reason), what=reason)
        wait_until(lambda: who_acts(sampler) == {0, 1, 2}, what="all lanes")
        assert sampler.totals.env_failures == 1
        check_books(sampler)


def test_a_live_host_that_answers_no_step_is_lost_after_the_workers_deadline(
    hosts: EnvHosts, caplog: pytest.LogCaptureFixture
) -> None:
    """The host's deadline is far away. The worker steps envs in lock-step, and goes on with those of other hosts."""
    table = '{"lane": 2, "faults": {"step": "hangs with the lock"}}'
    hosts.start("support.envs.troubled:Troubled", 2)
    deadlines = {"env_step_timeout_s": 1.0, "env_reset_timeout_s": 1.0, "envs_per_process": 1, "env_hosts_lease_s": 5.0}
    with runner(hosts, "support.envs.troubled:Troubled", **deadlines) as sampler:
        wait_until(lambda: who_acts(sampler) == {0, 1}, what="the sound host")
        hanging = hosts.start("support.envs.troubled:Troubled", 1, f"sampling.env_config={table}")
        wait_until(lambda: who_acts(sampler) and "env 2 is gone" in caplog.text, what="the loss")
        assert hanging.poll() is None
        hanging.kill()
        wait_until(lambda: who_acts(sampler) == {0, 1}, what="the other host's envs")
        assert set(sampler.totals.discarded) <= {"env_host_lost"}, "none where it hung right after a cut"
        check_books(sampler)


def test_a_host_with_other_spaces_is_refused_and_the_worker_goes_on(hosts: EnvHosts) -> None:
    hosts.start("CartPole-v1", 1)
    with runner(hosts) as sampler:
        other = hosts.start("Pendulum-v1", 2)
        while other.poll() is None:
            assert who_acts(sampler) == {0}
        assert other.returncode == ExitCode.PROTOCOL
        said = hosts.log(1).read_text()
        assert "refuses this env host: its envs have" in said
        assert "those of the first env host" in said


def test_an_env_host_whose_env_cannot_be_built_exits_with_an_env_error(hosts: EnvHosts) -> None:
    host = hosts.start("NoSuchEnv-v0", 1)
    assert host.wait(100) == ExitCode.ENV
    assert "NoSuchEnv-v0" in hosts.log(0).read_text()


def test_a_port_with_keys_lets_in_only_env_hosts_with_its_keys(by_tcp: EnvHosts, tmp_path: Path) -> None:
    keys, others = tmp_path / "keys", tmp_path / "others"
    make_keys(keys)
    make_keys(others)
    shutil.copy2(keys / "worker.public", others)
    refused = [by_tcp.start("CartPole-v1", 1), by_tcp.start("CartPole-v1", 1, f"keys.dir={others}")]
    by_tcp.start("CartPole-v1", 3, f"keys.dir={keys}")
    with runner(by_tcp, env_hosts_allow_insecure=False, env_hosts_keys=str(keys)) as sampler:
        while refused[1].poll() is None:
            assert who_acts(sampler) == {0, 1, 2}
        assert refused[1].returncode == ExitCode.KEYS
        assert refused[0].poll() in (None, ExitCode.KEYS)
        (host,) = sampler._sampler.envs._backend._places.hosts.values()  # type: ignore[attr-defined]
        assert host.name.endswith("(3 x CartPole-v1)")


@pytest.mark.parametrize("ending", ["stopped", "dropped"])
def test_a_runner_without_a_fleet_has_its_socket_in_a_private_folder_that_ends_with_it(
    ending: str, hosts: EnvHosts
) -> None:
    endpoints: list[str] = []

    def on_wait(endpoint: str) -> None:
        if not endpoints:
            endpoints.append(endpoint)
            hosts.start("CartPole-v1", 3, to=endpoint)

    sampler: SingleAgentEnvRunner | None = runner(hosts, socket_dir="", on_wait=on_wait)
    assert sampler is not None
    assert who_acts(sampler) == {0, 1, 2}
    (place,) = (Path(endpoint.removeprefix("ipc://")) for endpoint in endpoints)
    assert (place.name, stat.S_IMODE(place.parent.stat().st_mode)) == ("envs-0", 0o700)
    if ending == "stopped":
        sampler.stop()
        assert not place.exists()
        assert place.parent.exists(), "make_env would listen at the same endpoint"
        sampler = None
        gc.collect()
    else:
        sampler = None
        with pytest.warns(ResourceWarning, match="a port for env hosts was dropped without close"):
            gc.collect()
    assert not place.parent.exists()


@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0"])
def test_a_port_for_tcp_needs_keys_on_loopback_too(host: str) -> None:
    with pytest.raises(ConfigError, match=f"'{host}' serves by TCP, and there are no keys; name their folder"):
        SingleAgentEnvRunner(EnvRunnerConfig(env_placement="remote", env_hosts_host=host))


def test_a_port_that_is_in_use_raises_an_error_with_its_number(by_tcp: EnvHosts) -> None:
    port = by_tcp.at["env_hosts_port"]
    with (
        socket.create_server(("127.0.0.1", port)),
        pytest.raises(PortInUseError, match=f":{port} is already"),
    ):
        runner(by_tcp)


def test_garbage_on_the_port_is_refused_and_costs_no_env_a_step(hosts: EnvHosts) -> None:
    hosts.start("CartPole-v1", 3)
    hello = EnvHostHello(life="x", num_envs=1, spaces={"observation": {"kind": "abyss"}})
    foreign = [bytes(hello.frames()[0][:4]) + b"\x63" + bytes(hello.frames()[0][5:]), hello.frames()[1]]
    beat, life = EnvHeartbeat(life="nobody"), {"life": "x"}
    with runner(hosts) as sampler, zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.linger = 0
        socket.connect(hosts.endpoint())
        socket.send(b"")
        socket.send_multipart([b"HDRC", b"{}"])
        for frames in (hello.frames(), foreign, beat.frames(), encode(MessageKind.ENV_ANSWERS, life)):
            socket.send_multipart(frames)
        replies = []
        while len(replies) < 6:
            assert who_acts(sampler) == {0, 1, 2}
            while socket.poll(0):
                replies.append(decode(socket.recv_multipart()))
        codes = [reply.header.get("code", reply.kind.name) for reply in replies]
        assert codes == ["frame_count", "bad_tag", "bad_space", "version_mismatch", "FENCED", "FENCED"]
        assert sampler.totals.discarded == {}
        check_books(sampler)


def test_a_message_at_which_the_worker_fails_costs_no_env_a_step(
    hosts: EnvHosts, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """No message is known to do this: the handler of HELLOs is made to fail at each."""
    hosts.start("CartPole-v1", 3)
    failed = []

    def fail(_: Any, route: bytes, hello: EnvHostHello) -> None:
        failed.append(hello.life)
        raise RuntimeError("a mistake of ours")

    with runner(hosts) as sampler, zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        monkeypatch.setattr(remote_pool.RemotePool, "_greet", fail)
        socket.linger = 0
        socket.connect(hosts.endpoint())
        for life in "abc":
            socket.send_multipart(EnvHostHello(life=life, num_envs=1, spaces={}).frames())
        while len(failed) < 3:
            assert who_acts(sampler) == {0, 1, 2}
        assert who_acts(sampler) == {0, 1, 2}
        assert sampler.totals.discarded == {}
        check_books(sampler)
    assert [str(record.exc_info[1]) for record in caplog.records if record.exc_info] == ["a mistake of ours"]


def test_a_worker_that_waits_for_a_first_host_can_be_stopped(hosts: EnvHosts, caplog: pytest.LogCaptureFixture) -> None:
    class EnoughError(Exception):
        pass

    calls = threading.Semaphore(3)

    def on_wait(endpoint: str) -> None:
        assert endpoint == hosts.endpoint()
        if not calls.acquire(blocking=False):
            raise EnoughError

    with pytest.raises(EnoughError), caplog.at_level("INFO"):
        runner(hosts, on_wait=on_wait)
    assert f"waiting for env hosts at {hosts.endpoint()}" in caplog.text


def test_an_env_host_needs_no_torch() -> None:
    code = (
        "import sys, headrace.workers.envs.remote.host.process, headrace.workers.agents.packed_env, "
        "headrace.deploy.command.cli; sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
