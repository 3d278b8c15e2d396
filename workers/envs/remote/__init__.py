"""Envs on other hosts, which come and go as they like, each by `headrace env-host`: the worker's side.

`pool.py` is what a vector drives, `peer.py` what is known of one host, `router_port.py` the port where they come in.
"""
