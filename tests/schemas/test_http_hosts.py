"""Which Host headers name this server."""

from __future__ import annotations

import pytest

from headrace.schemas.peers.http_hosts import is_known_host

OWN = frozenset({"policy_server", "node-1.example", "::1"})


@pytest.mark.parametrize(
    "host",
    [
        "localhost",
        "LocalHost:8080",
        "localhost.",
        "localhost.:80",
        "127.0.0.1",
        "127.0.0.1:1",
        "[::1]",
        "[::1]:65535",
        "[::FFFF:127.0.0.1]",
        "0.0.0.0:80",
        "policy_server:80",
        "NODE-1.example.",
    ],
)
def test_a_host_of_this_server_is_known_with_or_without_a_port(host: str) -> None:
    assert is_known_host(host.encode(), OWN)


@pytest.mark.parametrize(
    "host",
    [
        "",
        ":",
        ":80",
        ".",
        "localhost:",
        "localhost:x",
        "localhost:-1",
        "localhost:123456",
        "localhost..",
        " localhost",
        "evil@localhost",
        "evil:80@localhost",
        "localhost:80@evil",
        "@localhost",
        "localhost@",
        "localhost#evil",
        "localhost/evil",
        "localhost?evil",
        "localhost\\evil",
        "http://localhost",
        "localhost,evil",
        "localhost evil",
        "localhost.evil.example",
        "evillocalhost",
        "127.0.0.1.evil.example",
        "2130706433",
        "0x7f.1",
        "127.1",
        "::1",
        "[::1",
        "::1]",
        "[]",
        "[localhost]",
        "[127.0.0.1]",
        "[::1]evil",
        "evil[::1]",
        "[::1%25lo]",
        "[::1]:80:80",
        "localhost\n",
        "localhost\0",
        "l\xf6calhost",
        "\u212aocalhost",
        "a" * 60_000,
        "[" + ":" * 60_000 + "]",
    ],
)
def test_all_else_is_no_host_of_this_server(host: str) -> None:
    assert not is_known_host(host.encode(), OWN)
