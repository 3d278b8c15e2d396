"""A fixture for tests of serving."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from support.socket_folders import socket_folder


@pytest.fixture
def socket_dir() -> Iterator[str]:
    """A private folder for Unix sockets, where one server can follow on another."""
    with socket_folder() as folder:
        yield str(folder)
