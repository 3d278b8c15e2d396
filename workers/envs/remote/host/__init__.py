"""A host of envs for a worker elsewhere. `process.py` is its life, `hosted.py` its envs, `link.py` the way there.

Needs no torch: only what the envs themselves need, and the wire.
"""
