"""The version of the installed distribution."""

from importlib.metadata import version

__version__: str = version("headrace")
"""The version, as in `pip show headrace`. Also `headrace.workers.__version__`."""
