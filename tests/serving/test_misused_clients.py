"""Misuse of the client in Python: a wrong call raises an error that names the mistake, and changes nothing else."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest

from headrace.deploy.clients.http_client import PolicyServer
from headrace.schemas.errors import ConfigError, EnvContractError
from headrace.schemas.errors.episodes import EpisodeError, EpisodesClosedError
from headrace.workers.serving.client import PolicyClient
from support.refusals import refused
from support.serving.acting_clients import ServingRunner, acting, serving_runner
from support.waiting import TIMEOUT_S

SEEN = [0.0, 0.0, 0.0, 0.0]
LOOP: dict[str, Any] = {}
LOOP["loop"] = LOOP
DEEP: dict[str, Any] = {}
for _ in range(80):
    DEEP = {"down": DEEP}
ODD = {
    "set": {1},
    "large": 1 << 70,
    "text": "\udc80",
    (1, 2): 3,
    "nan": math.nan,
    "infs": np.array([-np.inf]),
    "nul": "\0nan",
}
LOST = {"object": object(), "complex": 1j, "loop": LOOP, "deep": DEEP, "one": {1: "one", "1": "other"}}


@pytest.fixture(scope="module")
def there() -> Iterator[ServingRunner]:
    with serving_runner() as served:
        yield served


@pytest.mark.parametrize("make", [PolicyClient, acting])
def test_an_info_that_is_no_dict_is_refused_and_any_other_is_taken(make: Any, caplog: pytest.LogCaptureFixture) -> None:
    with serving_runner() as there, make(there.endpoint) as client:
        episode = client.start_episode()
        client.get_action(episode, SEEN)
        for bad in ("text", 5, []):
            with pytest.raises(EnvContractError, match=r"^info should be a dict"):
                client.log_returns(episode, 5.0, bad)
        client.log_returns(episode, 1.0, {"speed": np.float32(0.5), "at": np.arange(2), 7: "é", **ODD, **LOST})
        client.get_action(episode, SEEN)
        client.end_episode(episode, SEEN)
    assert [reward for chunk in there.chunks for reward in chunk.rewards.tolist()] == [1.0, 0.0]
    (told,) = [info for chunk in there.chunks for info in chunk.infos if info]
    assert told.pop("deep").keys() == {"down"}
    assert math.isnan(told.pop("nan"))
    carried = {"set": [1], "large": str(1 << 70), "text": "\\udc80", "(1, 2)": 3, "infs": [-math.inf], "nul": "\0nan"}
    assert told == {"speed": 0.5, "at": [0, 1], "7": "é", **carried, "loop": {}, "one": {"1": "one"}}
    assert "infos go without info['object']" in caplog.text


def test_an_info_over_http_is_what_other_clients_tell(caplog: pytest.LogCaptureFixture) -> None:
    odd = {"nan": math.nan, "inf": [-math.inf, None], "lone": "\ud800", "nul": "\0nan", "deep": {"at": [[0.5]]}}
    large = {"text": "x" * (1 << 20)}
    with serving_runner(max_message_bytes=1 << 22, http_port=0) as there:
        client = PolicyServer(there.runner.env.url)
        client.ask("PUT", client.session)
        client.ask("PUT", episode := f"{client.session}/episodes/a")
        for step, info in enumerate((None, odd, large, {"n": 1})):
            told = {} if info is None else {"info": info, "reward": 1.0}
            client.ask("PUT", f"{episode}/steps/{step}", {"observation": SEEN, **told})
        client.ask("PUT", f"{episode}/steps/4", {"observation": SEEN, "end": "terminated"})
        client.close()
        with PolicyClient(there.endpoint) as other:
            id = other.start_episode()
            other.get_action(id, SEEN)
            for info in (odd, large, {"n": 1}):
                other.log_returns(id, 1.0, info)
                other.get_action(id, SEEN)
            other.end_episode(id, SEEN)
    by_http, by_zmq = there.chunks
    assert repr(by_http.infos) == repr(by_zmq.infos)
    assert repr(by_http.infos) == repr([{}, {**odd, "lone": "\\ud800"}, {}, {"n": 1}, {}])
    assert caplog.text.count("infos go without info (1,048,") == 1, "counted together"
    assert [group.count for group in there.runner.totals.failure_groups.all()] == [2]


@pytest.mark.parametrize("make", [PolicyClient, acting])
@pytest.mark.parametrize("policies", [{}, {"short": None, "long": None}], ids=["one agent", "two agents"])
def test_infos_none_reads_no_info_of_a_client(make: Any, policies: Any) -> None:
    told: dict[str, Any] = {"scene": object(), "large": "x" * 100}
    settings = {"infos": "none", **({"policies": policies} if policies else {})}
    changes = settings if make is acting else {}
    by_agent = {"short": SEEN, "long": SEEN}
    with serving_runner(**settings) as there, make(there.endpoint, **changes) as client:
        episode = client.start_episode()
        client.get_action(episode, by_agent if policies else SEEN)
        reward, info = (dict.fromkeys(by_agent, 1.0), dict.fromkeys(by_agent, told)) if policies else (1.0, told)
        client.log_returns(episode, reward, info)
        client.end_episode(episode, by_agent if policies else SEEN)
    assert there.chunks
    assert not any(chunk.infos for chunk in there.chunks)
    runners = [there.runner, *([client._acting._runner] if make is acting else [])]
    assert not any(runner.totals.failure_groups.all() for runner in runners)


def test_an_info_that_is_too_large_is_left_out(there: ServingRunner, caplog: pytest.LogCaptureFixture) -> None:
    with PolicyClient(there.endpoint) as client:
        episode = client.start_episode()
        client.get_action(episode, SEEN)
        client.log_returns(episode, 0.0, {"picture": "x" * 600_000})
        client.get_action(episode, SEEN)
    assert "infos go without info (600,014 bytes of JSON; at most 524,288 fit)" in caplog.text


def test_a_reward_that_is_text_is_refused(there: ServingRunner) -> None:
    with PolicyClient(there.endpoint) as client:
        episode = client.start_episode()
        client.get_action(episode, SEEN)
        for bad in ("1", b"1", "nan"):
            with pytest.raises(EnvContractError, match="reward should be a finite number"):
                client.log_returns(episode, bad)


@pytest.mark.parametrize("session", ["x" * 65, 5, b"x", "\udc80"])
def test_a_client_refuses_an_invalid_session_id(there: ServingRunner, session: Any) -> None:
    with refused("bad_request", match="ClientHello: session: "):
        PolicyClient(there.endpoint, session=session)


@pytest.mark.parametrize("id", ["x" * 300, 5, b"x", ["x"]])
def test_an_invalid_episode_id_is_refused_and_the_client_goes_on(there: ServingRunner, id: Any) -> None:
    with PolicyClient(there.endpoint) as client, acting(there.endpoint) as actor:
        with refused("bad_request", match="EpisodeStart: episode: "):
            client.start_episode(id)
        with pytest.raises(EpisodeError, match="has an id of"):
            actor.start_episode(id)
        for one in (client, actor):
            one.get_action(one.start_episode(), SEEN)  # type: ignore[attr-defined]


@pytest.mark.parametrize("endpoint", ["", None, 5, "127.0.0.1:5900", "tcp://127.0.0.1", "http://127.0.0.1:5900"])
def test_an_invalid_endpoint_gives_an_error_with_the_right_form(endpoint: Any) -> None:
    with pytest.raises(ConfigError, match=r'endpoint: .* it is "tcp://HOST:PORT" or "ipc:///PATH"'):
        PolicyClient(endpoint)


@pytest.mark.parametrize("endpoint", ["ipc://clients-0", "ipc:///" + "x" * 107, "ipc://"])
def test_a_path_that_can_be_no_socket_is_refused(endpoint: str) -> None:
    with pytest.raises(ConfigError, match=r"the address should be ipc:///PATH, with a path of at most 107 bytes, got"):
        PolicyClient(endpoint)


def test_calls_of_a_closed_client_raise_an_error(there: ServingRunner) -> None:
    client = PolicyClient(there.endpoint)
    episode = client.start_episode()
    client.close()
    for call in (client.start_episode, lambda: client.get_action(episode, SEEN)):
        with pytest.raises(EpisodesClosedError, match="this client is closed"):
            call()


@pytest.mark.parametrize("make", [PolicyClient, acting])
def test_a_bad_info_of_an_agent_is_refused_with_the_agents_name(make: Any) -> None:
    seen, policies = {"short": SEEN, "long": SEEN}, {"short": None, "long": None}
    changes = {"policies": policies} if make is acting else {}
    with serving_runner(policies=policies) as there, make(there.endpoint, **changes) as client:
        episode = client.start_episode()
        client.get_action(episode, seen)
        with pytest.raises(EnvContractError, match=r"info.* should be a dict") as refusal:
            client.log_returns(episode, {"short": 1.0}, {"short": {}, "long": 5})
        assert "of agent 'long'" in str(refusal.value)
        client.log_returns(episode, {"short": 1.0}, {"long": {"a": np.arange(2), "b": math.inf}})
        client.get_action(episode, seen)
        client.end_episode(episode, seen)
    assert [info for chunk in there.chunks for info in chunk.infos if info] == [{"a": [0, 1], "b": math.inf}]


@pytest.mark.parametrize("acts", [False, True], ids=["served", "acting"])
@pytest.mark.parametrize("strict", [False, True])
def test_clients_check_bounds_if_the_config_says_so(acts: bool, strict: bool) -> None:
    with serving_runner(strict_bounds=strict) as there:
        make: Any = acting if acts else PolicyClient
        changes: dict[str, Any] = {"strict_bounds": strict} if acts else {"timeout_s": TIMEOUT_S}
        with make(there.endpoint, **changes) as client:
            episode = client.start_episode()
            told = pytest.raises(
                EnvContractError, match=r"(?s)obs(ervation)? should be within .* got values from 0\.0 to 9\.0"
            )
            with told if strict else nullcontext():
                client.get_action(episode, [9.0, 0.0, 0.0, 0.0])
            client.get_action(episode, SEEN)
            client.end_episode(episode, SEEN)
    assert there.runner.totals.observations_outside == (not strict)
