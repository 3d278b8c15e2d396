"""`headrace dashboard` over HTTP, against a real Redis: its pages, its access rules, and its updates from Redis."""

from __future__ import annotations

import asyncio
import contextlib
import platform
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from starlette.requests import Request
from starlette.routing import Route

from headrace.broker.reports.report import MergeScript, Part, Report
from headrace.deploy.annexes.watch.exporter.metrics_text import metrics_text
from headrace.deploy.annexes.watch.page.app import ASSETS, SCRIPTS, Hub, make_app, states_of
from headrace.deploy.monitoring.facts import Facts
from headrace.deploy.run.redis_view import Snapshot
from headrace.schemas.accounts import redis_keys as keys
from headrace.schemas.accounts.ledger import LedgerRow
from headrace.schemas.accounts.process_state import ProcessState
from headrace.schemas.errors import ExitCode
from headrace.schemas.peers.http_hosts import BY_PROGRAM
from support.dashboards import Dashboard, States, ask
from support.waiting import TIMEOUT_S, wait_until

pytestmark = pytest.mark.processes

MakeRow = Callable[..., LedgerRow]
MOST_SCRIPT_BYTES = 100_000
TOKEN = "a-word-of-sixteen-characters-or-more"


@pytest.fixture(scope="module")
def fleet() -> str:
    return "shown"


@pytest.fixture(scope="module")
def dashboard(shared_server: Any, fleet: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Dashboard]:
    arguments = ("--redis-url", shared_server.url, "--fleet-id", fleet)
    with Dashboard(tmp_path_factory.mktemp("dashboard"), *arguments) as started:
        yield started


def test_the_page_has_strict_headers_and_other_paths_methods_and_hosts_fail(dashboard: Dashboard) -> None:
    page = ask(dashboard.address)
    assert page.status == 200
    policy = page.headers["content-security-policy"]
    assert "unsafe" not in policy
    assert {"default-src 'none'", "script-src 'self'", "style-src 'self'", "frame-ancestors 'none'"} <= set(
        policy.split("; ")
    )
    assert page.headers["x-content-type-options"] == "nosniff"
    assert page.headers["referrer-policy"] == "no-referrer"
    text = page.body.decode()
    assert not re.search(r"\bstyle=|\bon\w+=|<style|<script(?! src=\"/assets/)|//", text.replace("<!doctype", ""))
    for path in re.findall(r'(?:href|src)="(/[^"]+)"', text):
        assert ask(dashboard.address, path).status == 200, path
    for path in ("/../server.py", "/assets/../app.py", "/assets/uPlot.LICENSE", "/worker/x", "/nothing"):
        assert ask(dashboard.address, path).status == 404, path
    for method in ("POST", "PUT", "DELETE", "OPTIONS"):
        assert ask(dashboard.address, method=method).status == 405
    assert ask(dashboard.address, "/worker/3", "HEAD").body == b""
    assert ask(dashboard.address, f"/worker/{'1' * 5000}").status == 200, "more digits than int() reads"
    for host, status in (("evil.example", 421), ("127.0.0.1.evil.example", 421), ("", 421), ("localhost:80", 200)):
        assert ask(dashboard.address, headers={"Host": host}).status == status, host


def test_scripts_are_small_and_uplot_is_the_only_third_party_script() -> None:
    scripts = [path for path in ASSETS.iterdir() if path.suffix == ".js"]
    assert {path.name for path in scripts} == set(SCRIPTS)
    assert sum(path.stat().st_size for path in scripts) < MOST_SCRIPT_BYTES
    for path in ASSETS.glob("[!u]*.js"):
        assert not re.search(r"innerHTML|outerHTML|insertAdjacent|document\.write|\beval\b|https?:", path.read_text())


def test_states_follow_redis_and_curves_are_served_incrementally(
    dashboard: Dashboard, fleet: str, client: Any, make_row: MakeRow
) -> None:
    merge = MergeScript(client, fleet)
    merge(Part(Report(rows=[make_row(0, 1, 5, 5)], gauges={"held_batches": 1.0})), [], 0)
    with contextlib.closing(States(dashboard.address)) as states:
        assert states.headers["content-type"].startswith("text/event-stream")
        assert states.headers["x-accel-buffering"] == "no", "a proxy would hold the states back"
        for batches in (10, 20):
            merge(Part(Report(rows=[make_row(0, 1, batches, batches)], gauges={"held_batches": 2.0})), [], 0)
            wanted = int(client.hget(keys.key_name(fleet, keys.TOTALS), "agent_steps_total"))
            while (state := states.next())["numbers"].get("agent_steps_total") != wanted:
                pass  # the deadline is that of the socket and of the test
            assert state["ledger"]["stepped"] == wanted
    assert ask(dashboard.address, "/state.json").json()["fleet"]["id"] == fleet
    series = wait_until(lambda: _with_points(ask(dashboard.address, "/series.json?interval_s=60").json()), "the curves")
    assert series["interval_s"] == 60
    assert series["curves"]["held_batches"]
    last = series["unix_s"][-1]
    assert ask(dashboard.address, f"/series.json?interval_s=60&after={last}").json()["unix_s"] == []
    assert ask(dashboard.address, "/series.json?interval_s=7").status == 400
    assert f'headrace_agent_steps_total{{fleet="{fleet}"}} {wanted}' in ask(dashboard.address, "/metrics").body.decode()


def _with_points(series: Any) -> Any:
    return series if series["unix_s"] else None


def test_on_sigterm_the_dashboard_sends_a_last_state_and_ends_the_stream(
    tmp_path: Path, url: str, fleet_id: str, client: Any
) -> None:
    MergeScript(client, fleet_id)(Part(Report(gauges={"held_batches": 1.0})), [], 0)
    with Dashboard(tmp_path, "--redis-url", url, "--fleet-id", fleet_id) as dashboard:
        states = States(dashboard.address)
        assert states.next()["numbers"]["held_batches"] == 1.0
        dashboard.process.send_signal(signal.SIGTERM)
        last = None
        while (state := states.next()) is not None:
            last = state
        states.close()
        assert last is not None
        assert dashboard.process.wait(100) == 0, dashboard.said()


def test_a_viewer_gets_the_last_state_although_the_end_comes_while_it_is_sent_the_one_before() -> None:
    async def look() -> list[bytes]:
        hub = Hub()
        hub.publish("the first")
        stream = states_of(hub)
        sent = [await anext(stream)]
        hub.publish("the last")
        hub.end()
        return sent + [each async for each in stream]

    first, *between, last, end = asyncio.run(look())
    assert b"the first" in first
    assert b"the last" in last
    assert not between
    assert end.startswith(b"event: end")


def test_the_page_serves_the_metrics_of_the_exporter_while_redis_is_away() -> None:
    stopped = ProcessState(name="supervisor", role="supervisor", pid=1, state="stopped")
    facts = Facts(1000.0, Snapshot(fleet_id="f"), redis_error="refused", processes={"supervisor": stopped})

    async def look() -> bytes:
        hub = Hub()
        hub.publish("a state", facts)
        route = next(route for route in make_app(hub).routes if getattr(route, "path", "") == "/metrics")
        assert isinstance(route, Route)
        return bytes((await route.endpoint(Request({"type": "http", "headers": []}))).body)

    assert asyncio.run(look()) == metrics_text({"f": facts})[0]


def test_viewers_share_the_memory_of_a_state() -> None:
    async def look() -> tuple[bytes, bytes]:
        hub = Hub()
        hub.publish("the first")
        return await anext(states_of(hub)), await anext(states_of(hub))

    one, other = asyncio.run(look())
    assert one is other


def test_the_dashboard_requires_its_token_and_swaps_it_for_a_cookie(tmp_path: Path, url: str, fleet_id: str) -> None:
    file = tmp_path / "token"
    file.touch(0o600)
    file.write_text(f"{TOKEN}\n")
    arguments = ("--redis-url", url, "--fleet-id", fleet_id, "--listen", "0.0.0.0:0", "--token-file", str(file))
    with Dashboard(tmp_path, *arguments) as dashboard:
        at = re.sub(r"//[^:]+:", "//127.0.0.1:", dashboard.address)
        for path in ("/", "/state.json", "/events", "/assets/app.js", "/?token=wrong"):
            refused = ask(at, path)
            assert refused.status == 401, path
            assert TOKEN not in refused.body.decode()
        assert ask(at, "/state.json", headers={"Authorization": f"Bearer {TOKEN}"}).status == 200
        assert ask(at, "/rendezvous.json").status == 404, "it asks for no token, and there is no run directory here"
        of_a_name = {"Host": "fleet.example:8090"}
        by_program, shown = of_a_name | {BY_PROGRAM: "1"}, of_a_name | {"Authorization": f"Bearer {TOKEN}"}
        rebound = ask(at, "/rendezvous.json", headers=of_a_name)
        assert (rebound.status, BY_PROGRAM in rebound.body.decode()) == (421, True)
        assert ask(at, "/rendezvous.json", headers=by_program).status == 404
        assert ask(at, "/rendezvous.json", headers=shown).status == 404
        assert ask(at, "/rendezvous.json", headers={"Host": platform.node()}).status == 404
        assert ask(at, "/state.json", headers=shown).status == 200
        assert ask(at, "/state.json", headers=by_program).status == 401
        assert ask(at, f"/?token={TOKEN}", headers=of_a_name).status == 200
        swapped = ask(at, f"/worker/3?token={TOKEN}")
        cookie = swapped.headers["set-cookie"]
        assert {"HttpOnly", "Path=/", "SameSite=strict"} <= set(cookie.split("; "))
        assert 'content="0;url=/worker/3"' in swapped.body.decode()
        assert TOKEN not in swapped.body.decode() + cookie
        assert ask(at, "/state.json", headers={"Cookie": cookie.split(";")[0]}).status == 200
        assert ask(at, "/state.json", headers={"Cookie": f"{cookie.split('=')[0]}={TOKEN}"}).status == 401


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--listen", "0.0.0.0:0"], "0.0.0.0 is reachable from other machines, and there is no token"),
        (["--run-dir", "nowhere"], "name a run by --run-dir, or a fleet by --redis-url and --fleet-id together"),
    ],
)
def test_impossible_arguments_give_an_error_of_one_line(url: str, arguments: list[str], says: str) -> None:
    command = [sys.executable, "-m", "headrace.deploy", "dashboard", "--redis-url", url, "--fleet-id", "a", *arguments]
    ended = subprocess.run(command, capture_output=True, text=True, check=False, timeout=TIMEOUT_S)
    assert ended.returncode == ExitCode.CONFIG
    assert says in ended.stderr
    assert len(ended.stderr.strip().splitlines()) == 1
