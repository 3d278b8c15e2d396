"""Private folders for Unix sockets: pytest's tmp_path may be too long for one."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from headrace.schemas.peers.socket_folder import new_socket_folder


@contextmanager
def socket_folder() -> Iterator[Path]:
    """Yield a new folder with a short path and mode 0700. Remove it at the end."""
    folder = new_socket_folder()
    try:
        yield folder
    finally:
        shutil.rmtree(folder)
