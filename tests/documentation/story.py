"""Runs the blocks of a page in their order, as a reader types them: in one folder and one Python session."""

from __future__ import annotations

import importlib
import os
import signal
import socket
import subprocess
import sys
import time
from contextlib import ExitStack, suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import orjson
import pytest
from documentation.blocks import Block
from documentation.stand_ins import STAND_INS, EnoughError

from headrace.schemas.settings.config_loading import load_config
from headrace.workers import EnvRunner
from support.waiting import PATIENCE

_START_S = 90.0 * PATIENCE
_RUN_S = 240.0
_STOP_S = 60.0 * PATIENCE


class Story:
    """A page being read: `folder` is where it happens. Ends what it has started."""

    def __init__(self, folder: Path, ports: list[str]) -> None:
        self.folder = folder
        self._ports = dict(zip(ports, free_ports(len(ports)), strict=True))
        self._names: dict[str, Any] = {"__name__": "page"}
        self._running: list[subprocess.Popen[bytes]] = []
        self._modules = set(sys.modules)

    def run(self, block: Block) -> None:
        """Run or read one block. Raises what it raises."""
        text = block.text
        for number, port in self._ports.items():
            text = text.replace(number, port)
        if block.file:
            (self.folder / block.file).write_text(text)
            importlib.invalidate_caches()
        elif block.language == "python":
            self._run_python(block, text)
        elif "background until" in block.marks:
            self._start(block, text)
        elif block.language == "sh":
            self._run_shell(block, text)
        elif block.language == "toml":
            file = self.folder / f"line-{block.line}.toml"
            file.write_text(text)
            load_config(file, environ={})
        else:
            orjson.loads(text)

    def _run_python(self, block: Block, text: str) -> None:
        for name in block.marks.get("given", "").split():
            self._names[name] = STAND_INS[name]()
        code = compile("\n" * (block.line - 1) + text, str(block.page), "exec")
        with suppress(EnoughError):
            exec(code, self._names)  # noqa: S102 - the pages are our own

    def _run_shell(self, block: Block, text: str) -> None:
        ended = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", text],
            cwd=self.folder,
            env=_environment(),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=_RUN_S,
            check=False,
        )
        assert ended.returncode == 0, f"{block.page.name}:{block.line}: {ended.stdout.decode()[-4000:]}"

    def _start(self, block: Block, text: str) -> None:
        log = self.folder / f"line-{block.line}.log"
        with log.open("wb") as output:
            process = subprocess.Popen(
                ["bash", "-c", f"exec {text}"],
                cwd=self.folder,
                env=_environment(),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self._running.append(process)
        sign, deadline = self.folder / block.marks["background until"], time.monotonic() + _START_S
        while not sign.exists():
            with suppress(subprocess.TimeoutExpired):
                process.wait(0.1)
            ended = process.poll() is not None or time.monotonic() > deadline
            assert not ended, f"{block.page.name}:{block.line}: no {sign.name} comes: {log.read_text()[-4000:]}"

    def __enter__(self) -> Self:
        self._place = pytest.MonkeyPatch()
        self._place.chdir(self.folder)
        self._place.syspath_prepend(self.folder)  # as for a script that is started there
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with ExitStack() as ends:
            ends.callback(self._leave)
            for process in self._running:
                ends.callback(_stop, process)
            for value in self._names.values():
                if isinstance(value, EnvRunner):
                    ends.callback(value.stop)

    def _leave(self) -> None:
        self._place.undo()
        for name in set(sys.modules) - self._modules:
            if str(getattr(sys.modules[name], "__file__", None)).startswith(str(self.folder)):
                del sys.modules[name]


def free_ports(count: int) -> list[str]:
    """Return the numbers of free ports, as text."""
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for own in sockets:
            own.bind(("127.0.0.1", 0))
        return [str(own.getsockname()[1]) for own in sockets]


def _environment() -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("HEADRACE_")}
    return {**kept, "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}


def _stop(process: subprocess.Popen[bytes]) -> None:
    """Drain it, as Ctrl-C would; kill all of its session when that takes too long."""
    process.terminate()
    try:
        process.wait(_STOP_S)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        raise
