"""Debian's chromium without a window, driven by its DevTools protocol over two pipes."""

from __future__ import annotations

import base64
import json
import os
import shutil
import subprocess
import threading
from pathlib import Path
from typing import Any

import pytest

from support.waiting import wait_until

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
needs_chromium = pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed")
_FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-extensions"),
    *("--no-first-run", "--disable-component-update", "--disable-dev-shm-usage", "--remote-debugging-pipe"),
)


class Browser:
    """One page of a browser, as a context manager. `requests`, `problems`: what it asked for, and what went wrong."""

    def __init__(self, profile: Path, width: int = 1440, height: int = 900, *, dark: bool = False) -> None:
        self.requests: list[str] = []
        self.problems: list[str] = []
        self._answers: dict[int, Any] = {}
        self._number, self._session = 0, ""
        to_browser, self._to = os.pipe()
        self._from, from_browser = os.pipe()
        line = f'exec "$0" "$@" 3<&{to_browser} 4>&{from_browser}'
        self._process = subprocess.Popen(
            ["bash", "-c", line, str(CHROMIUM), *_FLAGS, f"--user-data-dir={profile}", "about:blank"],
            pass_fds=(to_browser, from_browser),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(to_browser)
        os.close(from_browser)
        self._thread = threading.Thread(target=self._listen, daemon=True)
        self._thread.start()
        target = self._call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self._call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log"):
            self._call(f"{domain}.enable")
        self.resize(width, height)
        self._call("Emulation.setScrollbarsHidden", hidden=True)  # they cut a strip off its pictures
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self._call("Emulation.setEmulatedMedia", features=[scheme])

    def resize(self, width: int, height: int) -> None:
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self._call("Emulation.setDeviceMetricsOverride", **size)

    def open(self, address: str) -> None:
        self._call("Page.navigate", url=address)

    def ask(self, expression: str) -> Any:
        """Return the value of a JavaScript expression on the page, also one of a promise."""
        found = self._call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    def wait(self, expression: str) -> Any:
        """Wait until an expression on the page is true, and return its value."""
        return wait_until(lambda: self.ask(expression), expression, pause_s=0.1)

    def text(self, selector: str) -> str:
        return str(self.ask(f"document.querySelector({json.dumps(selector)})?.textContent ?? ''"))

    def press(self, key: str) -> None:
        codes = {"Tab": 9, "Enter": 13, "Escape": 27}
        for kind in ("rawKeyDown", "char", "keyUp") if key == "Enter" else ("rawKeyDown", "keyUp"):
            text = {"text": "\r"} if kind == "char" else {}
            event = {"type": kind, "key": key, "code": key, "windowsVirtualKeyCode": codes[key], **text}
            self._call("Input.dispatchKeyEvent", **event)

    def picture(self, file: Path, *, whole: bool = True) -> None:
        """Write a PNG of the whole page, or of what the window shows of it."""
        found = self._call("Page.captureScreenshot", captureBeyondViewport=whole)
        file.write_bytes(base64.b64decode(found["data"]))

    def _call(self, method: str, **parameters: Any) -> Any:
        self._number += 1
        number = self._number
        message = {"id": number, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._to, json.dumps(message).encode() + b"\0")
        answer = wait_until(lambda: self._answers.pop(number, None), f"the browser's answer to {method}")
        assert "error" not in answer, answer
        return answer["result"]

    def _listen(self) -> None:
        kept = b""
        while part := os.read(self._from, 1 << 16):
            *whole, kept = (kept + part).split(b"\0")
            for message in map(json.loads, whole):
                if "id" in message:
                    self._answers[message["id"]] = message
                else:
                    self._note(message["method"], message["params"])

    def _note(self, method: str, event: Any) -> None:
        if method == "Network.requestWillBeSent":
            self.requests.append(event["request"]["url"])
        elif method == "Runtime.exceptionThrown":
            self.problems.append(str(event["exceptionDetails"]))
        elif method == "Runtime.consoleAPICalled":
            self.problems.append(f"console: {event}")
        elif method == "Log.entryAdded":
            self.problems.append(f"{event['entry']['level']}: {event['entry']['text']} {event['entry'].get('url')}")
        elif method == "Page.javascriptDialogOpening":
            self.problems.append(f"dialog: {event}")

    def __enter__(self) -> Browser:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._to)  # the browser ends with its pipe
        try:
            self._process.wait(20)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._thread.join(20)
        os.close(self._from)
