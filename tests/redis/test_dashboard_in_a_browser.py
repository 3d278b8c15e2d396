"""The live page in a real browser: it shows the numbers of Redis, follows a fleet, and runs no text of a peer."""

from __future__ import annotations

import re
import shutil
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import orjson
import pytest

from headrace.broker.reports.report import MergeScript, Part, Report
from headrace.schemas.accounts import redis_keys as keys
from headrace.schemas.accounts.consumer_groups import GroupBooks, GroupRow
from headrace.schemas.accounts.env_errors import EnvErrorRow
from headrace.schemas.accounts.ledger import LedgerRow
from headrace.schemas.accounts.logged_metrics import LoggedMetric
from headrace.schemas.accounts.process_state import ProcessState
from headrace.schemas.basics.bounds import OTHER_TASKS
from headrace.schemas.messages.learner_messages import LEARNER_PARTS
from headrace.schemas.settings.config import FleetConfig, FleetSection
from support.browser import Browser, needs_chromium
from support.dashboards import Dashboard, ask
from support.fleets.running_fleet import RunningFleet
from support.page_texts import READ, Texts, page_texts
from support.waiting import TIMEOUT_S, wait_until

pytestmark = [pytest.mark.processes, pytest.mark.browser, needs_chromium]

MakeRow = Callable[..., LedgerRow]
EVIL = "<script>alert(1)</script><img src=x onerror=alert(2)>"
STILL = ("verdict", "severity", "fleet", "numbers", "labelled", "ledger", "policies", "logged", "workers", "garbage")
"""Parts of a state in which nothing depends on the time."""
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


def still_gauges() -> dict[str, float]:
    """Return the gauges of the fleet that does not change."""
    gauges = {
        **{"env_steps_per_s": 41230.5, "held_batches": 3.0, "held_bytes": 5.5 * 2**20, "oldest_unsettled_age_s": 2.5},
        **{"episode_return_mean": 12.25, "episodes_window": 100.0, "episode_return_min": -3.0},
        **{"episode_return_max": 40.0, "episode_len_mean": 215.125, "learner_epoch": 2.0, "weights_seq": 1207.0},
        **{"aborted_window": 4.0, "aborted_return_mean": 9.5, "aborted_len_mean": 70.0},
    }
    for metric in ("worker_env_steps_per_s_quantile", "episode_return_quantile"):
        gauges |= {keys.labelled(metric, "quantile", at): 10.0 + 100 * float(at) for at in keys.QUANTILES}
    for metric, parts in (("learner_time_share", LEARNER_PARTS), ("worker_time_share", ("env", "wait"))):
        gauges |= {keys.labelled(metric, "part", part): 1 / len(parts) for part in parts}
    return gauges


def still_fleet(client: Any, fleet_id: str, make_row: MakeRow) -> None:
    """Put a fleet into Redis that does not change, with a minute of history and with names that are markup.

    Worker 0 is stopped, envs of worker 1 fail, worker 2 waits, worker 3 has env hosts, worker 4 has clients, and envs
    of worker 5 have processes.
    """
    now, workers = time.time(), 20
    # Marks have the time of Redis. So that they are within the curves, these go on for some seconds.
    times = [now + 5.0 * number for number in range(-9, 4)]
    told: dict[str, Any] = {"incarnation": 1, "host": EVIL, "pid": 77, "num_envs": 8, "unix_s": times[-1]}
    states = {
        slot: {**told, "weights_behind": slot % 3, "held_batches": slot, "env_steps_per_s": 2061.5 + slot}
        for slot in range(workers)
    }
    states[1] |= {"env_failures": 5, "env_failure": EVIL, "env_failure_age_s": 4.0, "envs_lost": 1}
    states[2] |= {"blocked": "window", "blocked_since_unix_s": times[-1] - 75.0}
    hosts = {"connected": 1, "wanted": 2, "versions": ["1.0", "1.1"]}
    states[3] |= {"env_hosts": hosts, "env_failures": 1, "envs_lost": 4, "env_steps": 100}
    states[4]["serving"] = {"clients": 12, "requests_per_s": 345.5, "latency_p50_s": 0.8, "latency_p95_s": 61.0}
    states[5] |= {"rss_bytes": 200 << 20, "envs_rss_bytes": 3 << 30, "cpu_share": 0.25, "envs_cpu_share": 3.5}
    settings = FleetConfig(fleet=FleetSection(workers=workers))
    about = {
        "env": EVIL,
        "settings": orjson.dumps({key: settings.value_of(key) for key in keys.TOLD_SETTINGS}).decode(),
    }
    clock = iter([times[0], *times])
    merge = MergeScript(client, fleet_id, live_s=3600.0, clock=lambda: next(clock), about=about)
    for number in range(len(times)):
        report = Report(
            rows=[make_row(slot, 1, 10 + slot + number, 7 + number) for slot in range(workers)],
            gauges=still_gauges(),
            counters={(0, 1): {"aborted_episodes_total": 6}},
            workers=states,
            incarnations=dict.fromkeys(range(workers), 1),
            lease={"epoch": 2, "connected": 1, "since_unix_s": now - 3700.0, "committed_unix_s": now - 5.0},
            policies={
                EVIL: {"return_mean": 1.5, "return_min": 1.0, "return_max": 2.0, "len_mean": 41.25, "agents": 4.0},
                "other": {"return_mean": -1234.5625, "return_min": -2000.0, "return_max": 0.125, "agents": 1500.0},
            },
            groups={
                "record": GroupBooks(
                    GroupRow(
                        on_slow="wait",
                        connected=True,
                        program=EVIL[:255],
                        pid=7,
                        lag_steps=5120,
                        oldest_s=44.0,
                        committed=(81920, 640),
                        dropped={"overflow": (64, 2), "before_group": (32, 1)},
                        committed_unix_s=now - 7200.0,
                    )
                ),
                "watch": GroupBooks(),
            },
            task_figures={
                EVIL: {"episodes": 310.0, "env_failures": 2.0, "return_mean": 0.9125, "last_unix_s": now - 7200.0},
                '{"level":10}': {"episodes": 0.0, "env_failures": 1234.0, "last_unix_s": now - 7200.0},
                OTHER_TASKS: {"episodes": 5.0, "env_failures": 0.0, "len_mean": 12.5, "last_unix_s": now - 7200.0},
            },
            metrics={EVIL: LoggedMetric(reduce="mean", value=0.0625)},
            metric_sums={},
        )
        events = [(1, ["event", "lost", "slot", "1"]), (2, ["event", "learner", "epoch", "2"])]
        events.append((3, ["event", EVIL, "slot", EVIL]))
        merge(Part(report), events, 0)
    row = {"unix_s": str(now), "env_steps": "1", "weights_seq": "1207", "values": '{"loss": 0.125, "kl": -3.0864e-9}'}
    client.xadd(keys.key_name(fleet_id, keys.LEARNER_ROWS), row, id="2-1")
    failed = EnvErrorRow(
        **{"kind": "env_exception", "env": EVIL, "exception": "RuntimeError", "message": EVIL, "where": "cart.py:7"},
        **{
            "count": 12,
            "first_unix_s": 1e9 + 3e6,
            "last_unix_s": 1.1e9,
            "traceback": f"{EVIL}\n  line",
            "slots": [1, 3],
            "tasks": ['{"level":3}', EVIL],
        },
    )
    client.hset(keys.key_name(fleet_id, keys.ERRORS), failed.fingerprint, failed.model_dump_json())
    for name, slot in (("supervisor", None), ("broker", None), ("worker-0", 0), ("worker-1", 1)):
        process = ProcessState(
            **{"name": name, "role": name.partition("-")[0], "slot": slot, "incarnation": 1, "pid": 4321, "host": EVIL},
            **{"started_unix_s": now - 3700.0, "restarts": 0 if slot is None else 3, "rss_bytes": 300 << 20},
            **{
                "last_words": "" if slot is None else f"{EVIL} {'x' * 100}",
                "is_stopped": slot == 0,
                "silent_s": 12.0 if slot == 0 else 0,
            },
            unix_s=now,
        )
        client.hset(keys.key_name(fleet_id, keys.PROCESSES), name, process.model_dump_json())


SPY = """
window.drawn = { marks: new Set(), bands: new Set() };
const pen = CanvasRenderingContext2D.prototype, lineTo = pen.lineTo, fill = pen.fill;
pen.lineTo = function (...place) {
  if (this.getLineDash().join() === '4,4') drawn.marks.add(`${this.strokeStyle} ${Math.round(place[0])}`);
  return lineTo.apply(this, place);
};
pen.fill = function (...what) {
  if (this.fillStyle.startsWith('rgba')) drawn.bands.add(this.canvas.closest('figure').querySelector('h3').textContent);
  return fill.apply(this, what);
};
Charts.draw(); 0
"""
"""Note what is drawn into the charts from now on: dashed lines, and shaded areas."""


def test_the_page_shows_the_numbers_of_redis_and_peer_strings_as_plain_text(
    tmp_path: Path, url: str, client: Any, fleet_id: str, make_row: MakeRow
) -> None:
    still_fleet(client, fleet_id, make_row)
    with (
        Dashboard(tmp_path, "--redis-url", url, "--fleet-id", fleet_id) as dashboard,
        Browser(tmp_path / "profile") as browser,
    ):
        browser.open(dashboard.address)
        browser.wait("document.querySelectorAll('#workers tbody tr').length === 20 && Charts.marks().length > 0")
        shown = browser.ask(READ)
        for section, expected in page_texts(shown["state"]).items():
            assert shown["texts"][section] == expected, section
        # What the page was given is what Redis has.
        state = ask(dashboard.address, "/state.json").json()
        assert [shown["state"][part] for part in STILL] == [state[part] for part in STILL]
        for key in (keys.TOTALS, keys.GAUGES):
            for field, value in client.hgetall(keys.key_name(fleet_id, key)).items():
                name, label, text = keys.unlabelled(field.decode())
                found = state["labelled"][name][text] if label else state["numbers"][name]
                assert found == float(value), field
        for one in state["workers"]:
            told = orjson.loads(client.hget(keys.key_name(fleet_id, keys.WORKERS), str(one["slot"])))
            assert {name: one[name] for name in told} == told
        _shows_findings(shown["texts"], browser.text("#verdict"))
        _draws_the_history(browser)
        _goes_along_env_steps(browser)
        # Texts of peers are shown as they are, and nothing of them is an element.
        for place in (
            "#fleet",
            "#policies",
            "#tasks",
            "#groups",
            "#logged",
            "#processes",
            "#workers",
            "#findings",
            "#errors pre",
        ):
            assert EVIL in browser.text(place), place
        assert browser.ask("document.querySelectorAll('main script, main img').length") == 0
        # Sorting and filtering, by keyboard.
        browser.ask("document.querySelector('#workers thead th:nth-child(3) button').focus()")
        for expected in ("worker-19", "worker-0"):
            browser.press("Enter")
            assert browser.text("#workers tbody tr th") == expected
        browser.ask(
            "const box = document.getElementById('filter'); box.value = 'worker-12';"
            " box.dispatchEvent(new Event('input'))"
        )
        assert browser.ask("document.querySelectorAll('#workers tbody tr').length") == 1
        browser.resize(390, 844)
        browser.wait("innerWidth === 390 && document.documentElement.scrollWidth <= 390")  # no scroll to the side
        # A worker's own page.
        browser.open(f"{dashboard.address}worker/1")
        browser.wait("document.getElementById('worker-name')?.textContent === 'worker-1'")
        browser.wait("document.querySelector('#worker-ledger [data-of=stepped] strong')?.textContent.length > 1")
        assert EVIL in browser.text("#worker-words")
        assert browser.ask("document.documentElement.scrollWidth") <= 390, "a phone shows a long word without a scroll"
        assert browser.ask(
            "[...document.querySelectorAll('#findings > li')].map((one) => one.dataset.kind).join()"
        ) == ("envs_failing"), "findings of other workers are on the overview"
        assert browser.problems == []
        assert {url for url in browser.requests if not url.startswith((dashboard.address, "about:"))} == set()


def _shows_findings(texts: Texts, verdict: str) -> None:
    """Check that the page names what is wrong, worst first: cause, since, limit and command."""
    findings = texts["findings"]
    assert list(findings) == ["process_stopped", "window_full", "envs_failing", "env_hosts_missing"]
    severity, cause, since, command = findings["process_stopped"]
    assert (severity, cause) == ("Error", "waiting for worker-0 (pid 4321), which is stopped")
    assert re.fullmatch(r"for 12 s, since \d\d:\d\d:\d\d; limit: broker\.lease_s = \d+", since)
    assert command == "kill -CONT 4321"
    assert re.match(r"for 1 min \d+ s, since .*; try: Commit, or enlarge the window.", findings["window_full"][2])
    assert EVIL in findings["envs_failing"][1]
    assert texts["peers"]["worker-3"][0] == "1 of 2"
    assert "late" in verdict


def _draws_the_history(browser: Browser) -> None:
    """Check the captions, the marks and the bands of the charts."""
    captions = (
        "Object.fromEntries([...document.querySelectorAll('#charts figure')].map((one) => [one.querySelector('h3')"
    )
    shown = browser.ask(f"{captions}.textContent, one.querySelector('figcaption').textContent]))")
    assert shown["Queue, batches"] == "held by the broker 3"
    assert shown["Steps of single workers, env steps/s"] == "5 % to 95 % 15 to 105quartiles 35 to 85median 60"
    assert shown["Return of episodes"] == "5 % to 95 % 15 to 105quartiles 35 to 85mean 12.25median 60aborted ones 9.5"
    # 20 workers take a batch of 32 env steps each in five seconds.
    assert shown["Throughput, steps/s"] == "env steps taken 128agent steps committed 128"
    assert shown["Time of the learner, %"] == "wait 25decode 25train 25publish 25"
    browser.ask(SPY)
    browser.wait("drawn.marks.size && drawn.bands.size === 2")
    bands = browser.ask("[...drawn.bands].sort().join()")
    assert bands == "Return of episodes,Steps of single workers, env steps/s"
    assert browser.ask("new Set([...drawn.marks].map((mark) => mark.split(' ')[0])).size") == 2, "good and bad news"
    assert browser.text("#marks-count") == "3 events"
    for mark in ("worker 1: lost the connection", "learner epoch 2 began", f"ended ({EVIL[:40]})"):
        assert mark in browser.text("#marks")


def _goes_along_env_steps(browser: Browser) -> None:
    """Check the choice of the horizontal axis, and the vertical axis of curves that are constant but for rounding."""
    browser.ask("window.Real = uPlot; uPlot = function (...all) { window.built = all; return new Real(...all); }; 0")
    browser.ask("document.querySelector('[data-axis=steps]').click()")
    browser.wait("window.built")
    steps = browser.ask("built[1][0]")
    assert steps == sorted(steps)
    assert 0 < steps[-1] < 1e6, "env steps, and no Unix times"
    assert browser.ask("built[0].scales.x.range()[1]") == steps[-1]
    assert browser.ask("built[0].axes[0].values(null, [12000])") == ["12K"]
    for value in (0.3, -7.5, 475.0, 1e-5):
        low, high = browser.ask(f"built[0].scales.y.range(null, {value}, {value * (1 + 1e-15)!r})")
        assert 0.1 * abs(value) < high - low < 0.3 * abs(value)
        assert low < value < high
    assert browser.ask("built[0].scales.y.range(null, 0, 0)") == [0, 1]
    browser.ask("window.built = null; document.querySelector('[data-axis=time]').click()")
    browser.wait("window.built")
    assert browser.ask("built[1][0][0]") > 1e9


@pytest.mark.thorough
def test_a_range_chosen_during_a_request_is_loaded_and_a_refused_stream_is_opened_again(
    tmp_path: Path, url: str, client: Any, fleet_id: str, make_row: MakeRow
) -> None:
    still_fleet(client, fleet_id, make_row)
    with (
        Dashboard(tmp_path, "--redis-url", url, "--fleet-id", fleet_id) as dashboard,
        Browser(tmp_path / "profile") as browser,
    ):
        browser.open(dashboard.address)
        browser.wait("document.querySelectorAll('#workers tbody tr').length === 20")
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
        browser.wait("document.getElementById('notice').textContent.startsWith('Redis has been away since')")
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
        for path, theme, width in (("", "dark", 1440), ("worker/1", "dark", 390), ("", "light", 390)):
            browser.resize(width, 900)
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
