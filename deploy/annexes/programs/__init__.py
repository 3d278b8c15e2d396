"""A fleet that a Python program starts and stops: `with headrace.fleet("CartPole-v1", workers=3) as run`."""

from headrace.deploy.annexes.programs.running_fleet import RunningFleet as RunningFleet
from headrace.deploy.annexes.programs.running_fleet import fleet as fleet
