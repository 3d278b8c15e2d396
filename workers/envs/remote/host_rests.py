"""How long hosts whose envs only failed get no envs. Does no I/O."""

from __future__ import annotations

_FIRST_S, _LONGEST_S = 10.0, 600.0


class HostRests:
    """The rests of hosts, by name. The second rest of a host is twice as long, and so on.

    A host that was given envs for longer than the longest rest begins with a short one again.
    """

    def __init__(self) -> None:
        self._rests: dict[str, tuple[int, float]] = {}
        """Name -> (number of rests in a row, monotonic time in seconds at which the last one ends)."""

    def begin(self, name: str, now: float) -> tuple[int, float]:
        """Begin a rest of the host. Return its number in a row, and its length in seconds."""
        number, until = self._rests.pop(name, (0, now))
        number = 1 if now > until + _LONGEST_S else number + 1
        rest_s = min(_FIRST_S * 2.0 ** min(number - 1, 60), _LONGEST_S)
        self._rests[name] = number, now + rest_s
        return number, rest_s

    def is_resting(self, name: str, now: float) -> bool:
        """Return whether the host gets no envs now."""
        return now < self._rests.get(name, (0, now))[1]
