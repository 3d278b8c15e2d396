"""Access to Redis: short timeouts, no retries by the client, and failures in words.

The client must not retry by itself: a retried command whose first reply was lost runs twice. The caller knows which of
its writes are harmless to repeat, and decides (see `scripts.py`).
"""

from __future__ import annotations

import inspect
import ssl
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit, urlunsplit

import redis
from redis.backoff import NoBackoff
from redis.connection import AbstractConnection
from redis.credentials import CredentialProvider
from redis.exceptions import (
    AuthenticationError,
    BusyLoadingError,
    ExecAbortError,
    NoPermissionError,
    OutOfMemoryError,
    ReadOnlyError,
    RedisError,
)
from redis.retry import Retry

from headrace.schemas.errors import RedisUnavailableError
from headrace.schemas.settings.redis_url import NOT_A_URL, current_url, is_file, without_password

TIMEOUT_S = 0.25
START_IT = "start it, correct --redis-url, or leave it out"
USE_TLS = "start it, or write rediss:// where the port speaks TLS"
CHECK_TLS = "check the host and the ssl_ files in the URL, or write redis:// where the port speaks no TLS"
MAKE_USERS = "make users with the rights that a fleet needs: headrace keys redis --fleet-id ID"

# redis-py sends its own name on each connection. A user with least rights is not allowed to do that.
_SAYS_NO_NAME: dict[str, Any] = (
    {"driver_info": None}
    if "driver_info" in inspect.signature(AbstractConnection.__init__).parameters
    else {"lib_name": None, "lib_version": None}
)

ODD_ANSWERS = (TypeError, ValueError, AttributeError, LookupError, RecursionError)
"""Errors of the library where the server's answer is not of the form that Redis gives to this command."""
REDIS_FAILURES = (RedisError, OSError, *ODD_ANSWERS)
"""Errors that any call may raise while Redis is away or refuses: no connection, time out, LOADING, NOAUTH, READONLY,
OOM. A server that is no Redis causes `ODD_ANSWERS`.
"""

_HANDSHAKE_S = 1.0
"""Least time that a TLS handshake may take. It has several messages."""
_NO_CONNECTION = (redis.ConnectionError, redis.TimeoutError)


def connect(url: str, timeout_s: float = TIMEOUT_S) -> redis.Redis:
    """Return a client that connects when first used. Each send and each answer may take `timeout_s` seconds.

    `url` may name a file (`read_redis_url`). Each new connection reads user and password from it again.

    Raises `RedisUnavailableError` for a URL that cannot be understood, or a file that cannot be read.
    """
    credentials: dict[str, Any] = {}
    try:
        named, url = url, current_url(url)
    except ValueError as error:
        raise RedisUnavailableError(without_password(url), str(error)) from None
    try:
        parts = urlsplit(url)
        if "@" in parts.path + parts.query + parts.fragment:
            raise ValueError("a password that is cut where it should be escaped")
        by_tls = parts.scheme == "rediss"
        if is_file(named):
            url = urlunsplit(parts._replace(netloc=parts.netloc.rpartition("@")[2]))
            credentials["credential_provider"] = _CredentialsInFile(named)
        client = redis.Redis.from_url(
            url,
            socket_timeout=timeout_s,
            socket_connect_timeout=max(timeout_s, _HANDSHAKE_S) if by_tls else timeout_s,
            retry=Retry(NoBackoff(), 0),
            protocol=2,
            **_SAYS_NO_NAME,
            **credentials,
            **(_tls_options(parts.query) if by_tls else {}),
        )
        pool: Any = client.connection_pool
        pool.connection_class(**pool.connection_kwargs)  # refuses unknown parameters now, not at the first call
    except (ValueError, TypeError, RedisError):
        # Their texts may have parts of the password, so they are not even kept as the cause.
        raise RedisUnavailableError(without_password(url), f"it is not a Redis URL, {NOT_A_URL}") from None
    return client


@dataclass(frozen=True, slots=True)
class _CredentialsInFile(CredentialProvider):
    """User and password as they stand in a file when the library asks for them, at each connection."""

    named: str

    def get_credentials(self) -> Any:
        try:
            parts = urlsplit(current_url(self.named))
        except ValueError as error:
            raise redis.ConnectionError(str(error)) from None
        password = unquote(parts.password or "")
        return (unquote(parts.username), password) if parts.username else (password,) if password else ()


def _tls_options(query: str) -> dict[str, Any]:
    """Return the library's options for TLS that the URL does not set."""
    given = parse_qs(query)
    if "ssl_keyfile" in given and "ssl_certfile" not in given:
        raise ValueError("a key without its certificate")
    options: dict[str, Any] = {"ssl_password": ""}  # without one OpenSSL would ask for it at the terminal
    if given.get("ssl_cert_reqs") != ["none"]:
        options["ssl_check_hostname"] = True  # older versions of the library did not check it
    return options


def in_words(error: BaseException) -> str:
    """Return one line that says why a call to Redis failed. Of TLS it has the words of OpenSSL."""
    text = " ".join(str(error).split()).rstrip(".") or type(error).__name__
    if isinstance(error, ODD_ANSWERS):
        text = f"it answers what no Redis would: {text}"
    return text[:200]


def unusable(url: str, error: BaseException, timeout_s: float, advice: str = START_IT) -> RedisUnavailableError:
    """Return the error that says why the Redis at `url`, whose call has raised `error`, cannot be used."""
    if isinstance(error, NoPermissionError):
        advice = MAKE_USERS
    elif isinstance(error, OutOfMemoryError | ReadOnlyError):
        advice = "free its memory, or name its primary by --redis-url"
    elif isinstance(error, _NO_CONNECTION) and not isinstance(error, AuthenticationError | BusyLoadingError):
        cause = error.__context__
        if without_password(url).startswith("rediss:") and not isinstance(cause, ConnectionRefusedError):
            advice = CHECK_TLS
            if isinstance(cause, TimeoutError):
                error = cause  # the library's text does not say whether the connection or the handshake took too long
            elif not isinstance(cause, ssl.SSLError) or isinstance(cause, ssl.SSLEOFError):
                error = _alert(url, timeout_s) or error
        elif isinstance(cause, ConnectionResetError):
            advice = USE_TLS
    return RedisUnavailableError(without_password(url), in_words(error), timeout_s, advice)


def _alert(url: str, timeout_s: float) -> OSError | None:
    """Return the error of a TLS connection on which nothing is sent.

    By TLS 1.3 a server refuses a client's certificate after the handshake. A client that has sent a command by then may
    get a reset, and not the reason.
    """
    pool: Any = connect(url, timeout_s).connection_pool
    try:
        with pool.connection_class(**pool.connection_kwargs)._connect() as secured:
            secured.recv(1)
    except OSError as error:
        return error
    return None


@contextmanager
def naming_failures(url: str, timeout_s: float) -> Iterator[None]:
    """Turn a failure of Redis within the block into a `RedisUnavailableError`. Does not look for its cause."""
    try:
        yield
    except REDIS_FAILURES as error:
        raise RedisUnavailableError(without_password(url), in_words(error), timeout_s) from error


def ask(client: redis.Redis, *command: str | bytes) -> Any:
    """Return the server's answer to a command. The library has no types for it."""
    execute: Any = client.execute_command
    return execute(*command)


@dataclass(frozen=True, slots=True)
class RedisReader:
    """The few typed reads that Headrace does. All results are bytes. A key of another type counts as a failure."""

    client: redis.Redis

    def fields(self, key: str) -> list[bytes]:
        """Return the names of all fields of a hash."""
        return list(ask(self.client, "HKEYS", key))

    def field(self, key: str, field: str) -> bytes | None:
        """Return one field of a hash; None without it."""
        return self._bytes("HGET", key, field)

    def text(self, key: str) -> bytes | None:
        """Return the value of a string key; None without one."""
        return self._bytes("GET", key)

    def entries(self, key: str, after: str, most: int) -> list[tuple[bytes, dict[bytes, bytes]]]:
        """Return up to `most` entries of a stream with ids above `after`."""
        return self._entries("XRANGE", key, f"({after}", "+", "COUNT", str(most))

    def newest_entry(self, key: str) -> tuple[bytes, dict[bytes, bytes]] | None:
        """Return the newest entry of a stream; None if it has none."""
        found = self._entries("XREVRANGE", key, "+", "-", "COUNT", "1")
        return found[0] if found else None

    def _entries(self, *command: str) -> list[tuple[bytes, dict[bytes, bytes]]]:
        return [(identity, fields or {}) for identity, fields in ask(self.client, *command) or ()]

    def hashes_at_once(self, keys: Mapping[str, str]) -> dict[str, dict[bytes, bytes]]:
        """Read several hashes as of one moment (MULTI). Return them by the names that `keys` gives them.

        A Redis that is out of memory takes no MULTI. It takes no writes either, so the hashes do not change meanwhile.
        """
        try:
            return self._hashes(keys, together=True)
        except (ExecAbortError, OutOfMemoryError):
            return self._hashes(keys, together=False)

    def _hashes(self, keys: Mapping[str, str], *, together: bool) -> dict[str, Any]:
        with self.client.pipeline(transaction=together) as pipe:
            for key in keys.values():
                pipe.hgetall(key)
            return dict(zip(keys, pipe.execute(), strict=True))

    def _bytes(self, *command: str) -> bytes | None:
        value: bytes | None = ask(self.client, *command)
        return value
