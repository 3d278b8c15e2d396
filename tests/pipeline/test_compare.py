"""`make compare`: pinned peers, their scripts, and the reported reason when a peer fails."""

from __future__ import annotations

import ast
import sys
from pathlib import Path

import pytest

from bench import compare
from bench.peer_environments import PEERS, FailedError, Peer, read_peers, run

RATES = """
import json, sys
assert sys.argv[2] != {fails_at!r}, "no such case"
print("ready")
print(json.dumps({{"rate": {rate}, "per_cpu_s": {rate}}}))
"""


@pytest.mark.parametrize("peer", read_peers().values(), ids=list(read_peers()))
def test_each_peer_is_pinned_and_has_a_script_for_each_measure(peer: Peer) -> None:
    named = {*peer.packages} - {"torch", "-e", "."}
    assert all("==" in package for package in named), "torch and what Headrace itself needs are in constraints.txt"
    assert peer.scripts
    for measure, script in peer.scripts.items():
        tree = ast.parse((PEERS / f"{script}.py").read_text())
        assert measure in compare.CASES
        assert measure == "training" or measure in (ast.get_docstring(tree) or "").split("python ")[1]


def test_a_peer_that_fails_is_named_with_the_reason_and_the_others_go_on(tmp_path: Path) -> None:
    peers = {}
    for arm, rate, fails_at in (("bare loop", 200.0, ""), ("slow", 50.0, ""), ("broken", 80.0, "64")):
        script = tmp_path / f"{arm}.py"
        script.write_text(RATES.format(rate=rate, fails_at=fails_at))
        peers[arm] = (Path(sys.executable), script)
    failed: dict[str, str] = {}
    rows = compare.rates("workers", peers, 0.1, 1, failed)
    assert {(row.case, row.arm): row.ratio for row in rows} == {
        ("8", "bare loop"): 1.0,
        ("8", "slow"): 0.25,
        ("8", "broken"): 0.4,
        ("64", "bare loop"): 1.0,
        ("64", "slow"): 0.25,
    }
    assert list(failed) == ["broken, workers 64"]
    assert "ended with exit code 1" in failed["broken, workers 64"]
    assert "AssertionError: no such case" in failed["broken, workers 64"]


def test_a_failed_installation_raises_an_error_with_the_reason() -> None:
    command = [sys.executable, "-c", "import sys; sys.exit('ERROR: No matching distribution found')"]
    with pytest.raises(FailedError, match=r"installing it ended with exit code 1: ERROR: No matching distribution"):
        run(command, "installing it", 60.0)
