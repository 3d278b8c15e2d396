"""Takes the pictures of the guides, of a fleet of three workers with a failing env and a worker that was killed.

Usage: python docs/_ext/pictures.py (or `make pictures`), with chromium installed. Takes about two minutes, and writes
`dashboard.png`, `report.png` and `top.svg` in docs/images.
"""

from __future__ import annotations

import io
import re
import shutil
import signal
import sys
import time
from pathlib import Path

from PIL import Image
from rich.console import Console, Group  # noqa: TID251 - it draws pictures

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests"))

from headrace.deploy.annexes.watch.report.report_command import write_report  # noqa: E402
from headrace.deploy.annexes.watch.top.top import StateSource, screen  # noqa: E402
from headrace.deploy.monitoring.facts import FactsReader  # noqa: E402
from support.browser import Browser  # noqa: E402
from support.fleets.running_fleet import RunningFleet  # noqa: E402

IMAGES = ROOT / "docs" / "images"
FOLDER = Path("/tmp/demo")
"""A folder that must not be there. The pictures show its name."""
SIZE = 1280, 1010
COLUMNS, LINES = 110, 24
TERMINAL = """<svg class="{unique_id}" viewBox="0 0 {terminal_width} {terminal_height}" xmlns="http://www.w3.org/2000/svg">
<title>headrace top</title>
<style>
  :root {{ color: #1b1f24; --paper: #fff; --dim: #57606a; --yellow: #8a5a00; --cyan: #0a5c8a; --red: #b3261e }}
  @media (prefers-color-scheme: dark) {{
    :root {{ color: #d8dee6; --paper: #131416; --dim: #9aa4ae; --yellow: #d0b344; --cyan: #68a0b3; --red: #ff8a80 }}
  }}
  .{unique_id}-matrix {{ font: {char_height}px/{line_height}px monospace }}
{styles}
</style>
<defs>{lines}</defs>
{backgrounds}<g class="{unique_id}-matrix">{matrix}</g>
</svg>
"""
COLOURS = {
    "#c5c8c6": "currentColor",
    "#292929": "var(--paper)",
    "#868887": "var(--dim)",
    "#d0b344": "var(--yellow)",
    "#68a0b3": "var(--cyan)",
    "#4e707b": "var(--cyan)",
    "#cc555a": "var(--red)",
}
"""Colours of rich's theme of a terminal, and what they are in light and dark pages."""
CARTS = """
import gymnasium

class Derailing(gymnasium.Wrapper):
    def step(self, action):
        if self.np_random.random() < 0.002:
            raise RuntimeError("the cart left the rails")
        return super().step(action)

def make(context):
    env = gymnasium.make("CartPole-v1")
    return Derailing(env) if (context.worker_index, context.vector_index) == (2, 0) else env
"""


def main() -> None:
    """Run the fleet and take all pictures."""
    FOLDER.mkdir()
    try:
        (FOLDER / "carts.py").write_text(CARTS)
        run_dir, profile = FOLDER / "runs" / "cartpole", FOLDER / "profile"
        options = (
            "--env",
            "carts:make",
            "--workers",
            "3",
            "--num-envs",
            "4",
            "--set",
            "fleet.fleet_id=cartpole",
        )
        with RunningFleet(run_dir, *options, cwd=FOLDER) as fleet:
            fleet.wait_until(lambda: fleet.steps() > 0, "first steps")
            time.sleep(30)
            fleet.send(signal.SIGKILL, "worker", 1)
            time.sleep(30)
            address = re.search(r"http://127\.0\.0\.1:\d+/", fleet.said())
            assert address, "the address of the page"
            with Browser(profile, *SIZE) as browser:
                browser.open(address[0])
                browser.wait("document.querySelectorAll('#charts canvas').length > 3")
                time.sleep(2)
                take(browser, "dashboard.png")
            (IMAGES / "top.svg").write_text(picture_of_top(run_dir))
            fleet.terminate()
            fleet.finish()
        write_report(run_dir, None, None, None)
        with Browser(profile, *SIZE) as browser:
            browser.open((run_dir / "report.html").as_uri())
            browser.wait("document.querySelectorAll('#charts canvas').length > 3")
            take(browser, "report.png")
    finally:
        shutil.rmtree(FOLDER)


def take(browser: Browser, name: str) -> None:
    """Write a picture of what the window shows, with few colours: it is in each clone."""
    browser.picture(IMAGES / name, whole=False)
    Image.open(IMAGES / name).convert("RGB").quantize(200, dither=Image.Dither.NONE).save(
        IMAGES / name, optimize=True
    )


def picture_of_top(run_dir: Path) -> str:
    """Return what `headrace top` shows of a fleet as SVG, in the colours of a light or a dark page."""
    console = Console(
        record=True, file=io.StringIO(), width=COLUMNS, height=LINES, force_terminal=True
    )
    with FactsReader(run_dir) as reader:
        source = StateSource(reader)
        console.print(Group(*screen(source.read(), source.curves, COLUMNS, LINES)))
    drawn = console.export_svg(unique_id="top", code_format=TERMINAL)
    styles, end, rest = drawn.partition("</style>")
    for shown, ours in COLOURS.items():
        styles, rest = (
            styles.replace(f"fill: {shown}", f"fill: {ours}"),
            rest.replace(f'"{shown}"', f'"{ours}"'),
        )
    return styles + end + rest


if __name__ == "__main__":
    main()
