"""Envs on other hosts, which come and go, each by `headrace env-host`: the worker's side.

`pool.py` is the backend of a vector, `peer.py` what is known of one host, `router_port.py` the port for hosts.
"""
