"""Redis over TLS: a working connection, and an error of one line for each fault."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Iterator

import pytest
import redis

from headrace.broker.redis.client import unusable
from headrace.deploy.run import redis_server
from headrace.deploy.run.redis_server import check_url
from headrace.schemas.errors import RedisUnavailableError
from support import ports
from support.secured_redis import Certificates, SecuredRedis, TlsFront

LEAVES_SOCKETS = redis.VERSION < (5, 1)
"""Before, redis did not close the socket of a connection on which TLS failed."""
pytestmark = [
    pytest.mark.processes,
    *[pytest.mark.filterwarnings("ignore:unclosed <socket:ResourceWarning")] * LEAVES_SOCKETS,
]

MakeUrl = Callable[[SecuredRedis, Certificates], str]


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """On a busy machine a handshake takes as long as it takes."""
    monkeypatch.setattr(redis_server, "CHECK_TIMEOUT_S", 30.0)
    yield
    if LEAVES_SOCKETS:
        gc.collect()  # here, where the warning is expected


@contextlib.contextmanager
def refused(url: str) -> Iterator[pytest.ExceptionInfo[RedisUnavailableError]]:
    with pytest.raises(RedisUnavailableError) as caught:
        yield caught
    password = url.partition("://:")[2].partition("@")[0]
    assert not password or password not in f"{caught.value} {caught.value.__cause__}"
    assert "\n" not in str(caught.value)


def test_a_tls_server_with_a_ca_and_a_client_certificate_is_accepted(secured: SecuredRedis) -> None:
    check_url(secured.url(), "mine")


@pytest.mark.parametrize(
    ("certificate", "authority", "words"),
    [
        (
            "client",
            None,
            r"certificate verify failed: self-signed certificate in certificate chain .*; check the host and",
        ),
        ("client", "stranger-ca", "certificate verify failed: self-signed certificate in certificate chain"),
        (None, "ca", "certificate required"),
        ("expired", "ca", "alert certificate expired"),
        ("stranger", "ca", "alert unknown ca"),
        (
            "missing",
            "ca",
            r"ssl_certfile=.*missing\.pem.* No such file or directory; check the host and the ssl_ files",
        ),
        ("client", "missing", r"ssl_ca_certs=.*missing\.pem.* No such file or directory"),
    ],
)
def test_the_error_for_a_certificate_has_the_words_of_openssl(
    secured: SecuredRedis, certificate: str | None, authority: str | None, words: str
) -> None:
    url = secured.url(secured.certificates.options(certificate, authority))
    with refused(url) as caught:
        check_url(url)
    assert caught.match(words)
    assert caught.match(rf"^Redis at rediss://\*\*\*@127.0.0.1:{secured.port}/0\?")


def test_wrong_certificate_files_and_tls_options_are_refused(secured: SecuredRedis, certificates: Certificates) -> None:
    key = certificates.path("ca", "key")
    with refused(url := secured.url(f"ssl_ca_certs={key}")) as caught:
        check_url(url)
    assert caught.match(r"ssl_ca_certs=.*ca\.key.*no certificate or crl found")
    with refused(url := secured.url(certificates.options(None) + f"&ssl_keyfile={key}")) as caught:
        check_url(url)
    assert caught.match(r"it is not a Redis URL.*&ssl_certfile=FILE&ssl_keyfile=FILE")
    with refused(url := secured.url(certificates.options() + "&ssl_ca_cert=x")) as caught:
        check_url(url)
    assert caught.match("it is not a Redis URL")


def test_a_servers_certificate_that_has_expired_or_is_of_another_host_is_refused(secured: SecuredRedis) -> None:
    with refused(url := secured.url(host="localhost")) as caught:
        check_url(url)
    assert caught.match("certificate is not valid for 'localhost'")
    with contextlib.closing(TlsFront(secured.certificates, "expired", secured.port, asks_client=False)) as front:
        with refused(url := secured.url(port=front.port)) as caught:
            check_url(url)
        assert caught.match("certificate verify failed: certificate has expired")


def test_the_error_for_a_wrong_scheme_names_redis_or_rediss(
    secured: SecuredRedis, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain_port = secured.plain_url.rpartition(":")[2].partition("/")[0]
    with refused(url := secured.plain_url.replace(plain_port, str(secured.port))) as caught:
        check_url(url)
    assert caught.match("start it, or write rediss:// where the port speaks TLS$")
    monkeypatch.setattr(redis_server, "CHECK_TIMEOUT_S", 2.0)  # a server without TLS waits for the rest of a line
    with refused(url := secured.url(port=int(plain_port))) as caught:
        check_url(url)
    assert caught.match("handshake operation timed out; .* write redis:// where the port speaks no TLS$")


def test_a_tls_server_that_is_not_there_is_to_be_started(secured: SecuredRedis) -> None:
    with refused(url := secured.url(port=ports.free_port())) as caught:
        check_url(url)
    assert caught.match("Connection refused; start it, correct --redis-url")


def test_a_reset_after_the_handshake_is_told_with_the_alert_that_it_hid(secured: SecuredRedis) -> None:
    url = secured.url(secured.certificates.options(None))
    reset = redis.ConnectionError("Error 104 while writing to socket. Connection reset by peer.")
    reset.__context__ = ConnectionResetError(104, "Connection reset by peer")
    assert "certificate required" in unusable(url, reset, 30.0).reason
