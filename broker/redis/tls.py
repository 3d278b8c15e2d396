"""Finds the reason why a TLS connection to Redis fails, by trying the steps of TLS one by one."""

from __future__ import annotations

import socket
import ssl
from pathlib import Path
from typing import Any

from redis.connection import SSLConnection, parse_url

from headrace.schemas.settings.redis_url import TLS_FILES

_CA = "name the file of its authority in the URL: ?ssl_ca_certs=/path/ca.pem"
_CLIENT = "name yours in the URL: ssl_certfile=/path/client.pem&ssl_keyfile=/path/client.key"

_REFUSALS = (
    ("CERTIFICATE_REQUIRED", "it asks for a client certificate", _CLIENT),
    ("CERTIFICATE_EXPIRED", "the client certificate in ssl_certfile has expired", "renew it"),
    (
        "UNKNOWN_CA",
        "it does not know the authority of the client certificate in ssl_certfile",
        "let its tls-ca-cert-file have that authority, or take another certificate",
    ),
    ("HANDSHAKE_FAILURE", "it refuses the handshake, as for want of a client certificate", _CLIENT),
    ("BAD_CERTIFICATE", "it refuses the client certificate in ssl_certfile", "take another one"),
)
"""Parts of the names of TLS alerts, what they mean, and what to do."""


def tls_problem(url: str, timeout_s: float) -> tuple[str, str] | None:
    """Return the problem with TLS and the remedy, for people; None if TLS is not the problem.

    Connects to the server at `url`. Each step may take `timeout_s` seconds.
    """
    try:
        options: dict[str, Any] = _parse(url)
    except ValueError:
        return None
    if "path" in options:  # a Unix socket
        return None
    address = (options.get("host", "localhost"), options.get("port", 6379))
    if options.get("connection_class") is not SSLConnection:
        return _of_plain(address, timeout_s)
    context = ssl.create_default_context()
    return _of_files(context, options) or _of_handshake(context, address, timeout_s, options)


def _parse(url: str) -> Any:
    parse: Any = parse_url
    return parse(url)


def _of_plain(address: tuple[str, int], timeout_s: float) -> tuple[str, str] | None:
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    try:
        with socket.create_connection(address, timeout_s) as plain, context.wrap_socket(plain):
            pass
    except OSError:
        return None
    return "this port speaks TLS", "write rediss:// instead of redis://"


def _of_files(context: ssl.SSLContext, options: dict[str, Any]) -> tuple[str, str] | None:
    """Load the files that the URL names, one by one."""
    authority, certificate, key = (options.get(name) for name in TLS_FILES)
    for name in TLS_FILES:
        if path := options.get(name):
            try:
                Path(path).read_bytes()
            except OSError as error:
                return f"{name} names {path}, which cannot be read ({error.strerror})", "correct the path"
    try:
        if authority:
            context.load_verify_locations(authority)
    except ssl.SSLError:
        return f"ssl_ca_certs names {authority}, which has no certificate", "name a PEM file"
    try:
        if certificate:
            context.load_cert_chain(certificate, key, options.get("ssl_password", ""))
    except ssl.SSLError:
        both = f"{certificate} and {key}" if key else certificate
        return f"{both} are no certificate and its key", "name PEM files that belong together"
    return None


def _of_handshake(
    context: ssl.SSLContext, address: tuple[str, int], timeout_s: float, options: dict[str, Any]
) -> tuple[str, str] | None:
    """Shake hands, and wait for a refusal: by TLS 1.3 it comes after the handshake."""
    if options.get("ssl_cert_reqs") == "none":
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    try:
        with socket.create_connection(address, timeout_s) as plain:
            try:
                with context.wrap_socket(plain, server_hostname=address[0]) as secured:
                    if not secured.recv(1):
                        return "it closes connections by TLS, as for want of a client certificate", _CLIENT
            except ssl.SSLCertVerificationError as error:
                return _of_its_certificate(error)
            except (ssl.SSLError, ConnectionError, TimeoutError) as error:
                if refusal := _refusal(error):
                    return refusal
    except OSError:
        return None
    return _speaks_plainly(address, timeout_s)


def _of_its_certificate(error: ssl.SSLCertVerificationError) -> tuple[str, str]:
    said = error.verify_message.rstrip(".")
    if "expired" in said:
        return "its certificate has expired", "renew it, or correct the clock of this machine"
    if "mismatch" in said.lower():
        return f"its certificate is of another host ({said})", "name the host as the certificate does"
    return f"this machine does not trust the authority of its certificate ({said})", _CA


def _refusal(error: OSError) -> tuple[str, str] | None:
    reason = str(getattr(error, "reason", None) or "")
    return next(((seen, advice) for name, seen, advice in _REFUSALS if name in reason), None)


def _speaks_plainly(address: tuple[str, int], timeout_s: float) -> tuple[str, str] | None:
    try:
        with socket.create_connection(address, timeout_s) as plain:
            plain.settimeout(timeout_s)
            plain.sendall(b"PING\r\n")
            answer = plain.recv(1)
    except OSError:
        return None
    return ("this port speaks no TLS", "write redis:// instead of rediss://") if answer in (b"+", b"-") else None
