"""The units in deploy/systemd: systemd accepts them, and their command lines do what the units say."""

from __future__ import annotations

import configparser
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from headrace.deploy.fleet.fleet import COPY_DEADLINE_S, OBITUARY_DEADLINE_S
from headrace.deploy.process.supervisor import INCURABLE, Role
from headrace.schemas.settings.config import DRAIN_TIMEOUT_S, FleetConfig
from headrace.schemas.settings.sampling_settings import ENV_CLOSE_TIMEOUT_S
from support.waiting import TIMEOUT_S

FOLDER = Path(__file__).resolve().parents[2] / "deploy" / "systemd"
COMMON = FOLDER / "headrace-@.service.d" / "common.conf"
UNITS = sorted(path.name for path in FOLDER.glob("*.service"))
HEADRACE = str(Path(sys.executable).with_name("headrace"))

needs_systemd = pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="needs systemd-analyze")


def read(path: Path) -> configparser.SectionProxy:
    unit = configparser.ConfigParser(interpolation=None, strict=False)
    unit.optionxform = str  # type: ignore[assignment, method-assign]
    unit.read(path)
    return unit["Service"]


def seconds(unit: str, key: str) -> float:
    return float(read(FOLDER / unit)[key])


@pytest.fixture
def copied(tmp_path: Path) -> Path:
    """The units, with the path of this installation in place of /opt/headrace."""
    copy = tmp_path / "units"
    shutil.copytree(FOLDER, copy)
    for path in copy.glob("*.service"):
        path.write_text(path.read_text().replace("/opt/headrace/bin/headrace", HEADRACE))
    return copy


def analyze(copied: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "SYSTEMD_UNIT_PATH": f"{copied}:", "LC_ALL": "C"}
    command = ["systemd-analyze", *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=TIMEOUT_S)


@needs_systemd
def test_systemd_accepts_every_unit(copied: Path) -> None:
    instances = [name.replace("@", "@demo") for name in UNITS]
    told = analyze(copied, "verify", *instances)
    assert (told.returncode, told.stderr) == (0, "")
    with (copied / UNITS[0]).open("a") as file:
        file.write("[Service]\nNoSuchSetting=1\n")
    assert "NoSuchSetting" in analyze(copied, "verify", instances[0]).stderr, "it reads these files"


@needs_systemd
@pytest.mark.parametrize("name", UNITS)
def test_every_unit_is_confined(copied: Path, name: str) -> None:
    told = analyze(copied, "security", "--offline=true", "--threshold=20", name.replace("@", "@demo"))
    assert told.returncode == 0, told.stdout[-300:]
    shutil.rmtree(copied / COMMON.parent.name)
    assert analyze(copied, "security", "--offline=true", "--threshold=20", name.replace("@", "@demo")).returncode != 0


def test_errors_that_a_restart_cannot_cure_end_a_unit() -> None:
    assert {int(code) for code in read(COMMON)["RestartPreventExitStatus"].split()} == {int(code) for code in INCURABLE}


def test_the_stop_timeout_of_each_unit_covers_its_drain() -> None:
    config = FleetConfig()
    roles = len(Role) * (config.supervisor.stop_timeout_s + 5.0) + config.supervisor.stop_timeout_s
    assert seconds("headrace-fleet@.service", "TimeoutStopSec") >= roles + OBITUARY_DEADLINE_S + 2 * COPY_DEADLINE_S
    workers = config.supervisor.stop_timeout_s + 10.0 + DRAIN_TIMEOUT_S
    assert seconds("headrace-workers@.service", "TimeoutStopSec") >= workers
    for name in ("headrace-serve@.service", "headrace-env-host@.service"):
        assert seconds(name, "TimeoutStopSec") > DRAIN_TIMEOUT_S + ENV_CLOSE_TIMEOUT_S


def test_a_watchdog_waits_longer_than_a_service_may_be_silent() -> None:
    config = FleetConfig()
    closing = config.broker.lease_s + ENV_CLOSE_TIMEOUT_S
    assert seconds("headrace-env-host@.service", "WatchdogSec") > 2 * closing
    assert all(seconds(name, "WatchdogSec") >= 60 for name in UNITS)
