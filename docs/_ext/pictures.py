"""Takes the pictures of the guides, of a fleet with a failing env and a worker that was killed.

Usage: python docs/_ext/pictures.py (or `make pictures`), with chromium installed. Takes about
two minutes, and writes `dashboard.png`, `report.png` and `top.svg` in docs/images.
"""

import io
import shutil
import signal
import sys
import time
from pathlib import Path

from PIL import Image
from rich.console import Console, Group
from rich.terminal_theme import DEFAULT_TERMINAL_THEME as LIGHT

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests"))

from headrace.deploy.annexes.watch.report.report_command import write_report  # noqa: E402
from headrace.deploy.annexes.watch.top.top import StateSource  # noqa: E402
from headrace.deploy.annexes.watch.top.top_view import screen  # noqa: E402
from headrace.deploy.monitoring.facts import FactsReader  # noqa: E402
from headrace.schemas.basics.run_files import endpoint_in  # noqa: E402
from support.browser import Browser  # noqa: E402
from support.fleets.running_fleet import RunningFleet  # noqa: E402

IMAGES = ROOT / "docs" / "images"
FOLDER = Path("/tmp/demo")
"""A folder that must not be there. The pictures show its name."""
FLEET = ("--env=carts:make", "--workers=3", "--num-envs=4", "--set=fleet.fleet_id=cartpole")
SVG = """<svg viewBox="0 0 {terminal_width} {terminal_height}" xmlns="http://www.w3.org/2000/svg">
<title>headrace top</title>
<style>
  @media (prefers-color-scheme: dark) {{ svg {{ filter: invert(0.93) hue-rotate(180deg) }} }}
  .{unique_id}-matrix {{ font: {char_height}px/{line_height}px monospace }}
{styles}
</style>
<defs>{lines}</defs>
{backgrounds}<g class="{unique_id}-matrix">{matrix}</g>
</svg>
"""
CARTS = """
from gymnasium import Wrapper, make as env

class Derailing(Wrapper):
    def step(self, action):
        if self.np_random.random() < 0.002:
            raise RuntimeError("the cart left the rails")
        return super().step(action)

def make(at):
    cart = env("CartPole-v1")
    return Derailing(cart) if (at.worker_index, at.vector_index) == (2, 0) else cart
"""


def take(address: str, name: str) -> None:
    """Write a picture of the top of a page, with few colours: the file is in each clone."""
    with Browser(FOLDER / "profile", 1280, 1010) as browser:
        browser.open(address)
        browser.wait("document.querySelectorAll('#charts canvas').length > 3")
        time.sleep(2)
        browser.picture(IMAGES / name, whole=False)
    picture = Image.open(IMAGES / name).convert("RGB")
    picture.quantize(200, dither=Image.Dither.NONE).save(IMAGES / name, optimize=True)


FOLDER.mkdir()
try:
    (FOLDER / "carts.py").write_text(CARTS)
    run_dir = FOLDER / "runs" / "cartpole"
    with RunningFleet(run_dir, *FLEET, cwd=FOLDER) as fleet:
        fleet.wait_until(lambda: fleet.steps() > 0, "first steps")
        time.sleep(30)
        fleet.send(signal.SIGKILL, "worker", 1)
        time.sleep(30)
        take(endpoint_in(run_dir, "dashboard"), "dashboard.png")
        console = Console(record=True, file=io.StringIO(), width=110, height=24)
        with FactsReader(run_dir) as reader:
            source = StateSource(reader)
            console.print(Group(*screen(source.read(), source.curves, 110, 24)))
        drawn = console.export_svg(theme=LIGHT, unique_id="top", code_format=SVG)
        (IMAGES / "top.svg").write_text(drawn)
    write_report(run_dir, None, None, None)
    take((run_dir / "report.html").as_uri(), "report.png")
finally:
    shutil.rmtree(FOLDER)
