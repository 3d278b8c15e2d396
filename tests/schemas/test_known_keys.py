"""The keys in a folder, while files there change."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import zmq

from headrace.schemas.credentials import known_keys
from headrace.schemas.credentials.key_files import key_file
from headrace.schemas.credentials.known_keys import KnownKeys


def new_public() -> bytes:
    return zmq.curve_keypair()[0]


def test_a_key_copied_over_another_with_the_same_mtime_replaces_it(tmp_path: Path) -> None:
    """All public keys of a role have one size, and a copy may keep the inode."""
    path, before, after = tmp_path / "worker.public", new_public(), new_public()
    path.write_text(key_file("worker", before))
    known, times = KnownKeys(tmp_path, ["worker"]), path.stat()
    path.write_text(key_file("worker", after))
    while path.stat().st_ctime_ns == times.st_ctime_ns or path.stat().st_mtime_ns != times.st_mtime_ns:
        os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))  # the system's clock for files moves each few ms
    known.look(0.0)
    assert known.roles == {after: "worker"}


def test_strangers_do_not_keep_a_server_busy_with_a_large_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A look takes 20 ms here, and a stranger comes each millisecond for ten seconds."""
    (tmp_path / "worker.public").write_text(key_file("worker", new_public()))
    clock, looks, scandir = SimpleNamespace(now=0.0), [0], os.scandir

    def slow_scandir(folder: Any) -> Any:
        clock.now += 0.02
        looks[0] += 1
        return scandir(folder)

    monkeypatch.setattr(known_keys, "time", SimpleNamespace(monotonic=lambda: clock.now))
    monkeypatch.setattr(os, "scandir", slow_scandir)
    known = KnownKeys(tmp_path, ["worker"])
    while clock.now < 10.0:
        clock.now += 0.001
        assert known.find(b"a stranger's") is None
    assert 10 < looks[0] < 30
