"""A real env runner with episodes of external clients, and the chunks that the learner gets of them."""

from __future__ import annotations

import gc
import stat
import threading
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import orjson
import pytest
from golden_dm_env import OfDeepMind

from headrace.deploy.run.key_pairs import make_keys
from headrace.schemas.chunks.chunk import ChunkEnd
from headrace.schemas.credentials.keys import TOKEN_FILE
from headrace.schemas.credentials.tokens import read_token
from headrace.schemas.errors import ConfigError, KeysError, PortInUseError
from headrace.schemas.errors.episodes import EpisodeAbortedError
from headrace.schemas.messages import Tasks, WeightedTask
from headrace.schemas.settings.config import FleetConfig, SamplingSection
from headrace.schemas.settings.serving_settings import ServingSection
from headrace.workers import EnvRunnerConfig, SingleAgentEnvRunner
from headrace.workers.envs.context import EnvContext
from headrace.workers.serving.client import PolicyClient
from headrace.workers.serving.served_env import ServedEnv, ServedEnvs, served_config
from support.refusals import refused
from support.runners.stand_in_device import stand_in
from support.serving.raw_http import RawHttp
from support.waiting import TIMEOUT_S, wait_until


def serving(**changes: Any) -> ServingSection:
    return ServingSection(**{"enabled": True, "http_port": 0, "lease_s": 5.0, **changes})


@contextmanager
def runner(
    settings: ServingSection | None = None, socket_dir: str = "", *, allow_insecure: bool = False, **changes: Any
) -> Iterator[tuple[SingleAgentEnvRunner, ServedEnv]]:
    served: list[ServedEnv] = []
    creator = ServedEnvs(settings or serving(), "CartPole-v1", "", socket_dir=socket_dir, allow_insecure=allow_insecure)
    config = {"num_envs": 4, "seed": 1, "rollout_fragment_length": 8, "external_fragment_max_age_s": 0.2, **changes}

    def make(context: Any) -> ServedEnv:
        served.append(creator(context))
        return served[-1]

    sampler = SingleAgentEnvRunner(EnvRunnerConfig(env=make, **config))
    try:
        yield sampler, served[0]
    finally:
        sampler.stop()


def play(endpoint: str, seed: int, steps: int) -> tuple[list[Any], list[int]]:
    """CartPole, stepped by a client; gives what was seen and done."""
    env = gym.make("CartPole-v1")
    observation, _ = env.reset(seed=seed)
    seen, done = [observation], []
    with PolicyClient(endpoint, timeout_s=TIMEOUT_S) as client:
        episode = client.start_episode(f"cart-{seed}")
        for _ in range(steps):
            action = int(client.get_action(episode, observation))
            observation, reward, terminated, truncated, _ = env.step(action)
            seen.append(observation)
            done.append(action)
            client.log_returns(episode, float(reward))
            if terminated or truncated:
                break
        client.end_episode(episode, observation, truncated=not terminated)
    env.close()
    return seen, done


@contextmanager
def sampling(sampler: SingleAgentEnvRunner) -> Iterator[list[Any]]:
    """Fragments, gathered in a thread as a worker would."""
    chunks: list[Any] = []
    stop = threading.Event()

    def gather() -> None:
        while not stop.is_set():
            chunks.extend(sampler.sample_fragment())

    thread = threading.Thread(target=gather)
    thread.start()
    try:
        yield chunks
    finally:
        stop.set()
        thread.join(100)


def test_http_clients_may_use_the_name_that_the_worker_advertises() -> None:
    settings = FleetConfig(serving=serving(), sampling=SamplingSection(num_envs=1))
    with SingleAgentEnvRunner(served_config(settings, "Worker.example")) as sampler:
        served: Any = sampler.config.env
        for name, status in (("worker.example:80", 200), ("other.example", 400)):
            with RawHttp(served.ports()["http"]) as client:
                client.say(f"GET /v1/spaces HTTP/1.1\r\nHost: {name}\r\n\r\n".encode())
                assert client.hear().status == status, name


def test_a_policy_server_acts_on_another_device(monkeypatch: pytest.MonkeyPatch) -> None:
    module = {"vf_share_layers": False}  # torch computes it on the CPU too
    done = []
    with stand_in(monkeypatch) as device, ThreadPoolExecutor(1) as pool:
        for place in ("cpu", "cuda"):
            with runner(device=place, module_config=module) as (sampler, env):
                device.take()
                client = pool.submit(play, env.endpoint, 3, 30)
                while not client.done():
                    sampler.sample_fragment()
                done.append(client.result())
        counts = device.take()
    np.testing.assert_equal(done[0], done[1])
    steps = len(done[1][1])
    assert (counts.there, counts.back, counts.waits) == (steps, steps, steps)


def test_the_learner_gets_the_episodes_as_the_clients_played_them() -> None:
    with runner() as (sampler, served):
        with sampling(sampler) as chunks, ThreadPoolExecutor(4) as pool:
            played = list(pool.map(lambda seed: play(served.endpoint, seed, 30), range(8)))
        episodes: dict[str, list[Any]] = {}
        for chunk in chunks:
            episodes.setdefault(chunk.episode_id, []).append(chunk)
        assert len(episodes) == len(played)
        lived = sorted((np.array(seen).tobytes(), done) for seen, done in played)
        told = []
        for parts in episodes.values():
            obs = np.concatenate([*(part.obs[:-1] for part in parts), parts[-1].obs[-1:]])
            told.append((obs.tobytes(), np.concatenate([part.actions for part in parts]).tolist()))
            assert parts[-1].end in (ChunkEnd.TERMINATED, ChunkEnd.TRUNCATED)
            assert all((part.rewards == 1).all() for part in parts)
        assert sorted(told) == lived


def test_a_client_is_told_the_task_of_its_episode_and_the_chunks_name_it() -> None:
    with runner() as (sampler, served):
        with sampling(sampler) as chunks, PolicyClient(served.endpoint, timeout_s=TIMEOUT_S) as client:
            before, start = client.start_episode(), partial(put, f"{served.url}/v1/sessions/web")
            assert client.task_of(before) is None
            start("")
            assert "task" not in start("/episodes/plain")
            sampler.set_tasks(Tasks(version=(1, 1), tasks=[WeightedTask(values={"level": 3})]))
            episode = client.start_episode()
            assert client.task_of(episode) == {"level": 3}
            first = start("/episodes/told")
            sampler.set_tasks(Tasks(version=(1, 2), tasks=[WeightedTask(values={"level": 4})]))
            assert first["task"] == {"level": 3}
            assert start("/episodes/told") == first, "a repeated request gets the same answer"
            for level, own in ((None, before), ({"level": 3}, episode)):
                client.get_action(own, np.full(4, 0.0 if level is None else 0.25))
                client.end_episode(own, np.zeros(4))
                with refused("unknown_episode"):
                    client.task_of(own)
        told = {chunk.obs[0, 0]: chunk.task and (chunk.task.version, chunk.task.values) for chunk in chunks}
        assert told == {0.0: None, 0.25: ((1, 1), {"level": 3})}


def _vector(context: Any) -> Any:
    return gym.make_vec("CartPole-v1", num_envs=context.num_envs)


@pytest.mark.parametrize("like", [_vector, OfDeepMind], ids=["a native vector", "dm_env"])
def test_each_kind_of_env_may_name_the_spaces_of_one_episode(like: Any) -> None:
    """Earlier, a vector's batched spaces were served, and an env of dm_env failed."""
    settings = {"num_envs": 2, "seed": 0}
    with SingleAgentEnvRunner(EnvRunnerConfig(env=like, **settings)) as stepped:
        spaces = stepped.get_spaces()
    served = EnvRunnerConfig(env=ServedEnvs(serving(http_port=None), like, None), **settings)
    with SingleAgentEnvRunner(served) as sampler:
        assert sampler.get_spaces()["default_policy"] == spaces["default_policy"]


def put(session: str, path: str) -> Any:
    request = urllib.request.Request(session + path, b"", {"Headrace-Client": "t"}, method="PUT")
    with urllib.request.urlopen(request, timeout=TIMEOUT_S) as answer:
        return orjson.loads(answer.read())


def test_a_client_that_vanishes_leaves_an_aborted_marker() -> None:
    with runner(serving(lease_s=0.4), rollout_fragment_length=2) as (sampler, served):
        with sampling(sampler) as chunks:
            url = f"{served.url}/v1/sessions/gone"
            for path, body in (("", b""), ("/episodes/e", b""), *((f"/episodes/e/steps/{n}", BODY) for n in range(4))):
                request = urllib.request.Request(url + path, body, {"Headrace-Client": "t"}, method="PUT")
                urllib.request.urlopen(request, timeout=TIMEOUT_S).close()
            wait_until(lambda: any(chunk.end is ChunkEnd.ABORTED for chunk in chunks), what="the marker")
        totals = sampler.totals
        assert totals.stepped == 3 == sum(len(chunk) for chunk in chunks) + sum(totals.discarded.values())


def test_a_reward_logged_before_a_refused_step_counts_once() -> None:
    """Earlier, the reward of the refused step counted, and the reward of the corrected step did not."""
    with runner(module_to_env=["headrace.workers.connectors:UnsquashActions"]) as (sampler, served):
        with sampling(sampler) as chunks, PolicyClient(served.endpoint, timeout_s=TIMEOUT_S) as client:
            episode = client.start_episode()
            client.get_action(episode, np.zeros(4))
            client.log_returns(episode, 1.0, {"first": True})
            with refused("cannot_log"):
                client.log_action(episode, np.zeros(4), 1)
            client.log_returns(episode, 2.0, {"second": True})
            client.end_episode(episode, np.zeros(4))
        assert [chunk.rewards.tolist() for chunk in chunks] == [[3.0]]


BODY = b'{"observation": [0, 0, 0, 0], "reward": 0}'


def test_a_stopping_runner_answers_its_waiting_client_with_an_error() -> None:
    with runner() as (sampler, served):
        client = PolicyClient(served.endpoint, timeout_s=2)
        with sampling(sampler):
            episode = client.start_episode()
            client.get_action(episode, np.zeros(4))
        with ThreadPoolExecutor(1) as pool:
            asked = pool.submit(client.get_action, episode, np.zeros(4))
            wait_until(lambda: served.episodes.counts()["waiting"] == 1, what="the request")
            sampler.stop()
            with pytest.raises(Exception, match="cannot go on") as refused:
                asked.result(100)
            assert not isinstance(refused.value, EpisodeAbortedError)
        client.close()


def test_a_runner_serves_at_its_configured_port_and_names_a_taken_one(free_port: int) -> None:
    at_port = {"host": "127.0.0.1", "port": free_port}
    with runner(serving(**at_port, http_port=None), allow_insecure=True) as (_, served):
        assert served.endpoint == f"tcp://127.0.0.1:{free_port}"
        assert served.url == ""
        with (
            pytest.raises(PortInUseError, match=str(free_port)),
            runner(serving(**at_port), allow_insecure=True),
        ):
            pass


def test_a_second_server_at_a_socket_is_refused_and_takes_nothing_from_the_first(socket_dir: str) -> None:
    with runner(socket_dir=socket_dir) as (sampler, served):
        assert served.endpoint == f"ipc://{socket_dir}/clients-0"
        with pytest.raises(PortInUseError, match=f"{socket_dir}/clients-0 is already"), runner(socket_dir=socket_dir):
            pass
        with sampling(sampler):
            play(served.endpoint, 3, 20)


def test_a_server_without_a_folder_makes_a_private_one_that_ends_with_it() -> None:
    with runner() as (sampler, served):
        folder = Path(served.endpoint.removeprefix("ipc://")).parent
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
        sampler.make_env()
        assert sampler.env.endpoint == served.endpoint, "the endpoint outlives each env"
    assert not (folder / "clients-0").exists()
    del sampler, served
    gc.collect()
    assert not folder.exists()


def test_keys_and_a_token_are_required_by_tcp(tmp_path: Path) -> None:
    for host in ("0.0.0.0", "127.0.0.1"):
        with pytest.raises(ConfigError, match="there are no keys"), runner(serving(host=host, http_port=None)):
            pass
    open_token = tmp_path / "token"
    open_token.write_text("a-token-of-some-length\n")
    open_token.chmod(0o644)
    with pytest.raises(KeysError, match="others may read it"):
        read_token(open_token)
    open_token.chmod(0o600)
    assert read_token(open_token) == "a-token-of-some-length"
    open_token.write_text("short")
    with pytest.raises(KeysError, match="one word of at least 16"):
        read_token(open_token)
    make_keys(tmp_path / "keys")
    assert len(read_token(tmp_path / "keys" / TOKEN_FILE)) > 30


def test_a_token_in_clear_off_loopback_logs_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    make_keys(tmp_path / "keys")
    for host, warned in (("0.0.0.0", True), ("127.0.0.1", False)):
        caplog.clear()
        settings = ServingSection(enabled=True, host=host, http_port=0)
        ServedEnvs(settings, "CartPole-v1", str(tmp_path / "keys"))(EnvContext({}, num_envs=1)).close()
        assert ("clients send the token in clear; put TLS in front" in caplog.text) is warned
