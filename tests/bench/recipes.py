"""Train once by each shipped recipe and each learner of `docs/examples/`, and draw the curve of each.

PYTHONPATH=tests python -m bench.recipes [NAME ...] [--seed 1] [--until-steps N] [--folder docs/curves]

Each run writes FOLDER/NAME.json: env steps, mean return and seconds since the first step, from the run's metrics.jsonl.
Then FOLDER/recipes.svg and FOLDER/examples.svg are drawn from all files there. The mean is that of the newest 100
episodes of the fleet.
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
import tempfile
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from xml.sax.saxutils import escape

from documentation.examples import EXAMPLES, EXAMPLES_FOLDER, learner_of, words_of

from headrace.deploy.run.options import recipes

LIMIT_S = 1200.0
WIDTH, HEIGHT, GAP, COLUMNS = 220, 130, 50, 3
"""Size of one plot and the gap around it, in pixels; number of plots in a row."""


@dataclass(frozen=True, slots=True)
class Curve:
    """One run: at least one point (env steps, mean return, seconds since the first row of the run)."""

    recipe: str
    seed: int
    seconds: float
    """Seconds of the whole command."""
    points: list[tuple[int, float, float]]


def train(recipe: str, seed: int, until_steps: int | None) -> Curve:
    """Run `headrace up` with a recipe or an example to its own goal, or to so many env steps."""
    with tempfile.TemporaryDirectory() as folder, ExitStack() as ends:
        given = words_of(recipe) if recipe in EXAMPLES else ["--config", recipe]
        command = ["up", *given, "--seed", str(seed), "--run-dir", folder]
        command += ["--until-steps", str(until_steps)] if until_steps else []
        command += ["--timeout-s", str(LIMIT_S), "--set", "logging.interval_s=0.25", "-q", "--json"]
        if recipe in EXAMPLES:
            ends.enter_context(learner_of(recipe, Path(folder)))
        ended = subprocess.run(
            [sys.executable, "-m", "headrace.deploy", *command],
            cwd=EXAMPLES_FOLDER,
            capture_output=True,
            text=True,
            check=False,
        )
        if ended.returncode:
            raise SystemExit(f"{recipe} ended with exit code {ended.returncode}: {ended.stderr[-2000:]}")
        rows = map(json.loads, (Path(folder) / "metrics.jsonl").read_text().splitlines())
        points = [
            (row["env_steps"], round(row["episode_return_mean"], 2), round(row["elapsed_s"], 1))
            for row in rows
            if row["kind"] == "fleet" and "episode_return_mean" in row
        ]
        return Curve(recipe, seed, round(json.loads(ended.stdout)["seconds"], 1), points)


def svg(curves: list[Curve]) -> str:
    """Return a picture of small plots, one for each curve: mean return over env steps."""
    rows = math.ceil(len(curves) / COLUMNS)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {COLUMNS * (WIDTH + GAP)} {rows * (HEIGHT + GAP)}" '
        'font-family="sans-serif" font-size="11" fill="#777">',
        f"<title>Mean return over env steps of {', '.join(escape(curve.recipe) for curve in curves)}</title>",
    ]
    for place, curve in enumerate(curves):
        x, y = place % COLUMNS * (WIDTH + GAP) + GAP - 5, place // COLUMNS * (HEIGHT + GAP) + 20
        parts.append(f'<g transform="translate({x},{y})">{_plot(curve)}</g>')
    return "\n".join([*parts, "</svg>\n"])


def _plot(curve: Curve) -> str:
    steps, returns = [point[0] for point in curve.points], [point[1] for point in curve.points]
    low, span = min(returns), max(returns) - min(returns) or 1.0
    line = " ".join(
        f"{at / steps[-1] * WIDTH:.1f},{(1 - (value - low) / span) * HEIGHT:.1f}"
        for at, value in zip(steps, returns, strict=True)
    )
    return (
        f'<text y="-6" font-weight="bold">{escape(curve.recipe)}</text>'
        f'<path d="M0,0V{HEIGHT}H{WIDTH}" fill="none" stroke="#999"/>'
        f'<polyline points="{line}" fill="none" stroke="#2a78d6" stroke-width="2"/>'
        f'<text x="-4" y="8" text-anchor="end">{max(returns):,.0f}</text>'
        f'<text x="-4" y="{HEIGHT}" text-anchor="end">{low:,.0f}</text>'
        f'<text x="{WIDTH}" y="{HEIGHT + 14}" text-anchor="end">{steps[-1]:,} env steps</text>'
    )


def main() -> None:
    """Train, write the curves, and draw them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipes", nargs="*", choices=[*recipes(), *EXAMPLES, []], help="default: all")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--until-steps", type=int, help="stop here; default: where the recipe stops")
    parser.add_argument("--folder", type=Path, default=Path("docs/curves"))
    args = parser.parse_args()
    args.folder.mkdir(parents=True, exist_ok=True)
    for recipe in args.recipes or (*recipes(), *EXAMPLES):
        curve = train(recipe, args.seed, args.until_steps)
        steps, mean, _ = curve.points[-1]
        print(f"{recipe}: {mean:,.1f} after {steps:,} env steps and {curve.seconds:.0f} s", flush=True)
        (args.folder / f"{recipe}.json").write_text(json.dumps(asdict(curve)) + "\n")
    for picture, names in (("recipes", recipes()), ("examples", EXAMPLES)):
        paths = (path for path in sorted(args.folder.glob("*.json")) if path.stem in names)
        if found := [Curve(**json.loads(path.read_text())) for path in paths]:
            (args.folder / f"{picture}.svg").write_text(svg(found))


if __name__ == "__main__":
    main()
