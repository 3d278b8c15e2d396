"""Envs for tests. A process of its own finds them by their import path, such as `support.envs.toy:make_counting`."""
