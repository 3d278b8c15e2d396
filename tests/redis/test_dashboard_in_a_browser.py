"""The live page in a real browser: it shows the numbers of Redis, follows a fleet, and runs no text of a peer."""

from __future__ import annotations

import re
import shutil
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import orjson
import pytest

from headrace.broker.report import MergeScript, Part, Report
from headrace.schemas.accounts import redis_keys as keys
from headrace.schemas.accounts.env_errors import EnvErrorRow
from headrace.schemas.accounts.ledger import LedgerRow
from support.browser import Browser, needs_chromium
from support.dashboards import Dashboard, ask
from support.fleets.running_fleet import RunningFleet
from support.waiting import TIMEOUT_S, wait_until

pytestmark = [pytest.mark.processes, pytest.mark.browser, needs_chromium]

MakeRow = Callable[..., LedgerRow]
EVIL = "<script>alert(1)</script><img src=x onerror=alert(2)>"
FAILING = """
from headrace.workers.agents.examples import TwoCarts

class Derailed(TwoCarts):
    def step(self, actions):
        self.steps = getattr(self, "steps", 0) + 1
        if self.steps == 60:
            raise RuntimeError("EVIL")
        return super().step(actions)

def make(context):
    return Derailed() if context.vector_index == 0 else TwoCarts()
"""


def still_fleet(client: Any, fleet_id: str, make_row: MakeRow) -> dict[str, float]:
    """Put a fleet into Redis that does not change, with names that are markup. Return its numbers."""
    told: dict[str, Any] = {"incarnation": 1, "weights_behind": 2, "env_failures": 3, "env_failure": EVIL, "host": EVIL}
    report = Report(
        rows=[make_row(slot, 1, 10 + slot, 7) for slot in range(3)],
        gauges={
            **{"env_steps_per_s": 41230.5, "held_batches": 3.0, "episode_return_mean": 12.25, "episodes_window": 100.0},
            **{"episode_return_min": -3.0, "episode_return_max": 40.0, "learner_epoch": 2.0, "weights_seq": 1207.0},
            **{"aborted_window": 4.0, "aborted_return_mean": 9.5, "aborted_len_mean": 70.0, "episode_len_mean": 51.0},
        },
        counters={(0, 1): {"aborted_episodes_total": 6}},
        workers=dict.fromkeys(range(3), told),
        incarnations=dict.fromkeys(range(3), 1),
        lease={"epoch": 2, "connected": 1},
        policies={EVIL: {"return_mean": 1.5, "return_min": 1.0, "return_max": 2.0, "agents": 4.0}},
    )
    MergeScript(client, fleet_id, live_s=3600.0)(Part(report), [(1, ["event", EVIL, "slot", EVIL])], 0)
    client.hset(keys.key_name(fleet_id, keys.FLEET), "env", EVIL)
    failed = EnvErrorRow(
        **{"kind": "env_exception", "env": EVIL, "exception": "RuntimeError", "message": EVIL, "where": "cart.py:7"},
        **{"count": 12, "first_unix_s": 1e9, "last_unix_s": 1.1e9, "traceback": f"{EVIL}\n  line", "slots": [1]},
    )
    client.hset(keys.key_name(fleet_id, keys.ERRORS), failed.fingerprint, failed.model_dump_json())
    hashes = (client.hgetall(keys.key_name(fleet_id, key)) for key in (keys.TOTALS, keys.GAUGES))
    return {name.decode(): float(value) for found in hashes for name, value in found.items()}


def test_the_page_shows_the_numbers_of_redis_and_peer_strings_as_plain_text(
    tmp_path: Path, url: str, client: Any, fleet_id: str, make_row: MakeRow
) -> None:
    raw = still_fleet(client, fleet_id, make_row)
    with (
        Dashboard(tmp_path, "--redis-url", url, "--fleet-id", fleet_id) as dashboard,
        Browser(tmp_path / "profile") as browser,
    ):
        browser.open(dashboard.address)
        browser.wait("document.querySelectorAll('#workers tbody tr').length === 3")
        shown = browser.ask(
            "Object.fromEntries([...document.querySelectorAll('#tiles > [data-of], .flow > [data-of]')].map("
            "(one) => [one.dataset.of, one.querySelector('dd, strong').textContent]))"
        )
        for name in ("env_steps_per_s", "env_steps_total", "episode_return_mean", "episodes_total"):
            assert float(shown[name].replace(",", "")) == raw[name], name
        assert shown["env_failures_total"] == f"{raw['env_failures_total']:,.0f}"
        assert (shown["held_batches"], shown["weights_seq"], shown["workers"]) == ("3 batches", "2/1,207", "3")
        assert float(shown["aborted_episodes_total"]) == raw["aborted_episodes_total"] == 6
        assert browser.text("#tiles > [data-of=aborted_episodes_total] .note") == (
            "return 9.5, of finished ones 12.25; length 70, of finished ones 51"
        )
        assert shown["stepped"] == f"{raw['agent_steps_total']:,.0f}"
        assert shown["committed"] == f"{raw['committed_agent_steps_total']:,.0f}"
        lost = sum(raw[field] for field in raw if re.match(r"(dropped|discarded)_agent_steps_total", field))
        assert shown["lost"] == f"{lost:,.0f}"
        for reason in ("env_exception", "oversize", "stale"):
            assert reason in browser.text("[data-of=lost] ul")
        assert browser.text("#workers tbody tr [data-of=env_failures_all]") == "1"
        # Texts of peers are shown as they are, and nothing of them is an element.
        assert EVIL in browser.text("#policies")
        assert EVIL in browser.text("#fleet")
        assert "RuntimeError, 12 times" in browser.text("#errors article")
        assert f"{EVIL}\n  line" == browser.text("#errors pre")
        assert browser.ask("document.querySelectorAll('main script, main img').length") == 0
        # Sorting and filtering, by keyboard.
        browser.ask("document.querySelector('#workers thead th:nth-child(4) button').focus()")
        for expected in ("worker-2", "worker-0"):
            browser.press("Enter")
            assert browser.text("#workers tbody tr th") == expected
        browser.ask(
            "const box = document.getElementById('filter'); box.value = 'worker-1';"
            " box.dispatchEvent(new Event('input'))"
        )
        assert browser.ask("document.querySelectorAll('#workers tbody tr').length") == 1
        browser.resize(390, 844)
        assert browser.wait("innerWidth === 390 && document.documentElement.scrollWidth <= 390"), (
            "a phone shows it without a sideways scroll"
        )
        # A worker's own page.
        browser.open(f"{dashboard.address}worker/1")
        browser.wait("document.getElementById('worker-name')?.textContent === 'worker-1'")
        browser.wait("document.querySelector('#worker-ledger [data-of=stepped] strong')?.textContent.length > 1")
        assert EVIL in browser.text("#worker-words")
        assert browser.problems == []
        assert {url for url in browser.requests if not url.startswith((dashboard.address, "about:"))} == set()


def test_a_range_chosen_during_a_request_is_loaded_and_a_refused_stream_is_opened_again(
    tmp_path: Path, url: str, client: Any, fleet_id: str, make_row: MakeRow
) -> None:
    still_fleet(client, fleet_id, make_row)
    with (
        Dashboard(tmp_path, "--redis-url", url, "--fleet-id", fleet_id) as dashboard,
        Browser(tmp_path / "profile") as browser,
    ):
        browser.open(dashboard.address)
        browser.wait("document.querySelectorAll('#workers tbody tr').length === 3")
        browser.ask(
            "window.taken = []; window.release = null; window.real = fetch; window.take = Charts.take;"
            " Charts.take = (series, limit_s) => { taken.push(series.interval_s); take(series, limit_s); };"
            " window.hold = () => { window.fetch = (address) => address.includes('interval_s=5&')"
            " ? new Promise((go) => { release = () => go(real(address)); }) : real(address); loadSeries(); }; 0"
        )
        # A request of before may be under way. None begins between these words of one expression.
        browser.wait("!loading && ((taken = []), hold(), release !== null)")
        browser.ask("document.querySelector('[data-range=\"86400\"]').click(); release(); 0")
        browser.wait("taken.length > 0")
        assert browser.ask("taken.join()") == "60"
        # The browser does not open a stream of events again that the server has refused.
        browser.ask(
            "window.opened = 0; window.later = setTimeout; window.setTimeout = (call) => later(call, 10);"
            " window.EventSource = class { static CLOSED = 2; readyState = 2; addEventListener() {}"
            " constructor() { opened += 1; if (opened < 3) later(() => this.onerror(), 10); } }; listen(); 0"
        )
        browser.wait("opened === 3")


@pytest.mark.thorough
def test_the_page_follows_a_fleet_and_reports_an_outage_of_redis(tmp_path: Path) -> None:
    (tmp_path / "failing.py").write_text(FAILING.replace("EVIL", EVIL))
    arguments = ("--env", "failing:make", "--workers", "2", "--num-envs", "2", "--dashboard")
    policies = ("--set", 'sampling.policies={"short": {}, "long": {}}', "--set", "learner.steps_per_update=256")
    with (
        RunningFleet(tmp_path / "run", *arguments, *policies, cwd=tmp_path) as fleet,
        Browser(tmp_path / "profile") as browser,
    ):
        fleet.wait_until(lambda: fleet.steps() > 1000, "training has begun")
        found = re.search(r"dashboard: (http://\S+/)", fleet.said())
        assert found, fleet.said()
        wait_until(lambda: _answers(found[1]), "the page")
        browser.open(found[1])
        steps = "Number(document.querySelector('#tiles [data-of=env_steps_total] dd')?.textContent.replaceAll(',', ''))"
        first = browser.wait(steps)
        fleet.send(signal.SIGKILL, "worker", 1)
        later = browser.wait(f"{steps} > {first} ? {steps} : 0")
        assert later <= fleet.steps_of_envs()
        browser.wait(
            "[...document.querySelectorAll('#workers tbody tr')].some((row) => "
            "row.cells[0].textContent === 'worker-1' && "
            "row.querySelector('[data-of=restarts]').textContent === '1')"
        )
        browser.wait("document.querySelectorAll('#policies tbody tr').length === 2")
        browser.wait("document.querySelectorAll('#charts figure').length > 3")
        browser.wait("document.querySelector('#errors article')?.textContent.includes('RuntimeError')")
        assert "in step" in browser.text("#errors pre")
        assert browser.ask("document.querySelectorAll('main script, main img').length") == 0
        assert browser.problems == []
        assert {url for url in browser.requests if not url.startswith((found[1], "about:"))} == set()

        stopped = fleet.send(signal.SIGSTOP, "redis")
        browser.wait("document.getElementById('notice').textContent.startsWith('Redis is away since')")
        fleet.wait_until(lambda: fleet.pid("redis") not in (None, stopped), "another Redis")
        browser.wait("document.getElementById('notice').hidden")
        fleet.terminate()
        browser.wait("document.getElementById('verdict').textContent.startsWith('Ended')")
        result = fleet.finish()
        assert browser.text("[data-of=committed] strong") == f"{result['ledger']['committed'][0]:,}"
        assert browser.text("[data-of=stepped] strong") == f"{result['ledger']['stepped']:,}"
        assert browser.text("#fresh") == "final state"


def _answers(address: str) -> bool:
    try:
        return ask(address).status == 200
    except OSError:
        return False


@pytest.mark.thorough
def test_axe_finds_no_accessibility_problem_in_either_theme(
    tmp_path: Path, url: str, client: Any, fleet_id: str, make_row: MakeRow
) -> None:
    axe = _axe(tmp_path)
    still_fleet(client, fleet_id, make_row)
    with (
        Dashboard(tmp_path, "--redis-url", url, "--fleet-id", fleet_id) as dashboard,
        Browser(tmp_path / "profile", dark=True) as browser,
    ):
        for path, theme in (("", "dark"), ("worker/1", "dark"), ("", "light")):
            browser.open(f"{dashboard.address}{path}")
            browser.wait("document.getElementById('verdict')?.textContent.length > 25")
            browser.wait("document.documentElement.dataset.theme === 'dark'")
            if theme == "light":
                browser.ask("document.getElementById('theme').click()")
            assert browser.ask("document.documentElement.dataset.theme") == theme
            browser.ask(f"{axe}; 0")
            text = browser.ask("axe.run().then((found) => JSON.stringify(found.violations))")
            found = [(one["id"], [node["target"] for node in one["nodes"]][:3]) for one in orjson.loads(text)]
            assert found == [], (path, theme)


def _axe(folder: Path) -> str:
    """Return the script of axe-core, which npm fetches. Skip the test where it cannot."""
    if shutil.which("npm") is None:
        pytest.skip("npm, which fetches axe-core, is not installed")
    command = ["npm", "pack", "--silent", "axe-core@4"]
    packed = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False, timeout=TIMEOUT_S)
    files = list(folder.glob("axe-core-*.tgz"))
    if packed.returncode or not files:
        pytest.skip(f"axe-core cannot be fetched: {packed.stderr[-200:]}")
    shutil.unpack_archive(files[0], folder)
    return (folder / "package" / "axe.min.js").read_text()
