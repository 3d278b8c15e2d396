"""A video of episodes: pictures, most often of env 0, written to an MP4 file while they are played."""

from __future__ import annotations

import shutil
import subprocess
import tempfile
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Self

import numpy as np
from numpy.typing import NDArray

from headrace.schemas.errors import ConfigError, EnvError, is_there
from headrace.workers.envs.context import EnvContext
from headrace.workers.envs.creators import EnvCreator, find_creator

_KEY = "--render"
_FRAMES_PER_S = 30
_END_S = 60.0
"""Seconds that ffmpeg may take to write the rest of the video."""


class EpisodeVideo:
    """Writes the first `episodes` of env 0 to `path`. It is a callback of the runner; use it within `with`.

    The file exists, complete, once the block has ended without an error. Raises `ConfigError` at once if no video can
    be written.
    """

    def __init__(self, path: Path, episodes: int = 1) -> None:
        self._ffmpeg = _find_ffmpeg()
        if path.suffix != ".mp4":
            raise ConfigError(f"{str(path)!r} should end with .mp4", key=_KEY)
        if not (is_there(folder := path.absolute().parent) and folder.is_dir()):
            raise ConfigError(f"{str(path)!r} is in a folder that does not exist", key=_KEY)
        self.path = path
        self.frames = 0
        self._aside = path.with_name(f".{path.stem}.new.mp4")
        self._left = episodes
        self._problem = ""
        self._encoder: _Encoder | None = None

    def env_creator(self, env: str | Callable[..., Any] | None, *, of_each: bool = False) -> EnvCreator:
        """Return a creator that asks for pictures of env 0, or of each env."""
        creator = find_creator(env)

        def create(context: EnvContext) -> Any:
            if context.vector_index and not of_each:
                return creator(context)
            try:
                return creator(context.with_config({**context, "render_mode": "rgb_array"}))
            except TypeError as error:
                if "render_mode" not in str(error):
                    raise
                raise EnvError(
                    f"{_KEY}: the env cannot be built with render_mode ({error}); its constructor or creator should "
                    'take render_mode = "rgb_array" and show the env by it'
                ) from error

        return create

    def on_episode_end(self, env_index: int) -> None:
        """Count an episode of env 0."""
        self._left -= env_index == 0

    def on_episode_step(self, env_runner: Any, env: Any, env_index: int) -> None:
        """Show the observation after the step. Keep a problem for `check`: if a callback raised, the env would fail."""
        if env_index == 0 and self._left > 0 and not self._problem:
            rate = getattr(env, "metadata", {}).get("render_fps")
            self.show(env_runner.try_render_at(0), rate)

    on_episode_start = on_episode_step

    def watch(self, envs: Any, lane: int) -> None:
        """Show the env in a lane of a driver. Raises `EnvError` if that fails."""
        rate = (getattr(envs.lanes[lane].env, "metadata", None) or {}).get("render_fps")
        self.show(envs.try_render_at(lane), rate)
        self.check()

    def show(self, picture: NDArray[np.uint8] | None, frames_per_s: float | None = None) -> None:
        """Write a picture, unless there is a problem. None is one."""
        if self._problem:
            return
        if picture is None:
            self._problem = 'the env gives no picture; it should take render_mode = "rgb_array" and show itself by it'
            return
        if self._encoder is None:
            self._encoder = _Encoder(self._ffmpeg, self._aside, picture.shape, frames_per_s or _FRAMES_PER_S)
        self._problem = self._encoder.write(picture)
        self.frames += 1

    def check(self) -> None:
        """Raise `EnvError` if writing a picture has failed."""
        if self._problem:
            raise EnvError(f"there is no video: {self._problem}")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if self._encoder is not None:
                self._problem = self._encoder.close() or self._problem
            if kind is None:
                self.check()
                if self.frames:
                    self._aside.replace(self.path)
        finally:
            self._aside.unlink(missing_ok=True)


class _Encoder:
    """An ffmpeg process that gets raw pictures and writes H.264."""

    def __init__(self, ffmpeg: str, path: Path, shape: tuple[int, ...], frames_per_s: float) -> None:
        height, width, _ = self._shape = shape
        given = ["-f", "rawvideo", "-pix_fmt", "rgb24", "-s", f"{width}x{height}", "-r", f"{frames_per_s:g}", "-i", "-"]
        even = "pad=ceil(iw/2)*2:ceil(ih/2)*2"  # as H.264 needs it
        made = ["-an", "-c:v", "libx264", "-vf", even, "-pix_fmt", "yuv420p", str(path)]
        self._said: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 - `close` closes it
        self._process = subprocess.Popen(
            [ffmpeg, "-y", "-loglevel", "error", *given, *made],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=self._said,
            start_new_session=True,  # Ctrl-C must reach only this process
        )

    def write(self, picture: NDArray[np.uint8]) -> str:
        """Write a picture. Return the problem; "" if there is none."""
        if picture.shape != self._shape:
            return f"the env gives a picture of shape {picture.shape} after one of {self._shape}"
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(np.ascontiguousarray(picture).data)
        except OSError:
            return "ffmpeg has ended too early"
        return ""

    def close(self) -> str:
        """Finish the file. Return the problem that ffmpeg reports; "" if there is none."""
        try:
            self._process.communicate(timeout=_END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.communicate()
        with self._said:
            self._said.seek(0)
            words = self._said.read().decode(errors="replace").strip()
        return "" if self._process.returncode == 0 else f"ffmpeg ended with {self._process.returncode} ({words:.300})"


def _find_ffmpeg() -> str:
    """Return the ffmpeg of imageio-ffmpeg, else the machine's. Raises `ConfigError` where there is neither."""
    try:
        return str(import_module("imageio_ffmpeg").get_ffmpeg_exe())
    except (ImportError, RuntimeError) as error:
        found = shutil.which("ffmpeg")
        if found is None:
            raise ConfigError("a video needs ffmpeg; pip install 'headrace[video]'", key=_KEY) from error
        return found
