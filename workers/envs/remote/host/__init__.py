"""The env host, which lends envs to a worker: `process.py` is the process, `hosted.py` its envs, `link.py` its socket.

It needs no torch, only the dependencies of the envs and the wire.
"""
