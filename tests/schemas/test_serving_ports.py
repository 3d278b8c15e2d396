"""Ports: serving ports of the config, to which each worker adds its slot, and quiet ones that a process chooses."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from headrace.schemas.errors import ConfigError
from headrace.schemas.peers.ports import quiet_ports
from headrace.schemas.settings.config_loading import build_config


def sections(workers: int, **serving: Any) -> dict[str, Any]:
    serving = {"enabled": True, "host": "127.0.0.1", **serving}
    return {"fleet": {"workers": workers}, "broker": {"allow_insecure": True}, "serving": serving}


def test_zeromq_and_http_ports_that_meet_in_some_slots_are_refused() -> None:
    for workers, port, http_port in ((4, 5900, 5902), (10, 5901, 5900)):
        said = rf"serving.port = {port} and serving.http_port = {http_port} meet, .* keep them {workers} or more apart"
        with pytest.raises(ConfigError, match=said):
            build_config(sections(workers, port=port, http_port=http_port))


def test_ports_above_the_highest_are_refused() -> None:
    for name in ("port", "http_port"):
        with pytest.raises(ConfigError, match=rf"serving\.{name} = 65534 leaves no port for each of fleet.workers = 3"):
            build_config(sections(3, **{name: 65534}))


def test_ports_far_enough_apart_port_0_and_a_single_worker_are_accepted() -> None:
    for workers, ports in ((2, (5900, 5902)), (1, (5900, 5901)), (100, (0, 5902)), (100, (5900, 0)), (0, (5900, 5901))):
        build_config(sections(workers, port=ports[0], http_port=ports[1]))
    build_config(sections(4, enabled=False, port=5900, http_port=5902) | {"broker": {}})
    build_config({"fleet": {"workers": 4}, "serving": {"enabled": True, "http_port": 5902}})


@pytest.mark.parametrize(
    ("said", "quiet"),
    [
        ("10002\t65533\n", [10_000, 10_001, 65_534, 65_535]),
        ("1024 9999", range(10_000, 65_536)),
        ("1024 65535", []),
        ("", []),
    ],
)
def test_quiet_ports_are_those_outside_the_ephemeral_range(
    said: str, quiet: Sequence[int], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "range").write_text(said)
    monkeypatch.setattr("headrace.schemas.peers.ports._RANGE", tmp_path / "range")
    found = list(quiet_ports())
    assert len(found) == min(len(quiet), 64)
    assert set(found) <= set(quiet)
