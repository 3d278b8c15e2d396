"""Redis over TLS: a working connection, and an error of one line for each fault."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import pytest

from headrace.deploy.run import redis_server
from headrace.deploy.run.redis_server import check_url
from headrace.schemas.errors import RedisUnavailableError
from support.secured_redis import Certificates, SecuredRedis, TlsFront

pytestmark = pytest.mark.processes

MakeUrl = Callable[[SecuredRedis, Certificates], str]


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a busy machine a handshake takes as long as it takes."""
    monkeypatch.setattr(redis_server, "CHECK_TIMEOUT_S", 30.0)


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
        ("client", None, r"does not trust the authority of its certificate \(.*\?ssl_ca_certs=/path/ca\.pem$"),
        ("client", "stranger-ca", "does not trust the authority of its certificate"),
        (None, "ca", "it asks for a client certificate; name yours in the URL: ssl_certfile="),
        ("expired", "ca", "the client certificate in ssl_certfile has expired; renew it$"),
        ("stranger", "ca", "does not know the authority of the client certificate in ssl_certfile"),
        ("missing", "ca", r"ssl_certfile names .*missing\.pem, which cannot be read \(No such file"),
        ("client", "missing", r"ssl_ca_certs names .*missing\.pem, which cannot be read"),
    ],
)
def test_missing_expired_and_foreign_certificates_give_distinct_errors(
    secured: SecuredRedis, certificate: str | None, authority: str | None, words: str
) -> None:
    url = secured.url(secured.certificates.options(certificate, authority))
    with refused(url) as caught:
        check_url(url)
    assert caught.match(words)


def test_wrong_certificate_files_and_tls_options_are_refused(secured: SecuredRedis, certificates: Certificates) -> None:
    key = certificates.path("ca", "key")
    with refused(url := secured.url(f"ssl_ca_certs={key}")) as caught:
        check_url(url)
    assert caught.match(r"ssl_ca_certs names .*ca\.key, which has no certificate; name a PEM file")
    with refused(url := secured.url(certificates.options(None) + f"&ssl_keyfile={key}")) as caught:
        check_url(url)
    assert caught.match(r"it is not a Redis URL.*&ssl_certfile=FILE&ssl_keyfile=FILE")
    with refused(url := secured.url(certificates.options() + "&ssl_ca_cert=x")) as caught:
        check_url(url)
    assert caught.match("it is not a Redis URL")


def test_a_servers_certificate_that_has_expired_or_is_of_another_host_is_refused(secured: SecuredRedis) -> None:
    with refused(url := secured.url(host="localhost")) as caught:
        check_url(url)
    assert caught.match("its certificate is of another host .*localhost")
    with contextlib.closing(TlsFront(secured.certificates, "expired", secured.port, asks_client=False)) as front:
        with refused(url := secured.url(port=front.port)) as caught:
            check_url(url)
        assert caught.match("its certificate has expired; renew it")


def test_the_error_for_a_wrong_scheme_names_redis_or_rediss(
    secured: SecuredRedis, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain_port = secured.plain_url.rpartition(":")[2].partition("/")[0]
    with refused(url := secured.plain_url.replace(plain_port, str(secured.port))) as caught:
        check_url(url)
    assert caught.match("this port speaks TLS; write rediss:// instead of redis://$")
    monkeypatch.setattr(redis_server, "CHECK_TIMEOUT_S", 2.0)  # a server without TLS waits for the rest of a line
    with refused(url := secured.url(port=int(plain_port))) as caught:
        check_url(url)
    assert caught.match("this port speaks no TLS; write redis:// instead of rediss://$")
