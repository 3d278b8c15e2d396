"""Certificates that live for a day, and TLS in front of a real Redis server whose program has none."""

from __future__ import annotations

import contextlib
import select
import socket
import ssl
import subprocess
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path


class Certificates:
    """An authority with a server's and a client's certificate, others that have expired, and those of a stranger."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir()
        for authority in ("ca", "stranger-ca"):
            named = ("-subj", f"/CN={authority}", "-days", "1", "-addext", "keyUsage=critical,keyCertSign")
            _openssl("req", "-x509", *_KEY, *self._out(authority), *named)
        self._issue("server", "ca", 1)
        self._issue("client", "ca", 1)
        self._issue("expired", "ca", 0)  # OpenSSL takes no negative number from 3.6 on
        self._issue("stranger", "stranger-ca", 1)

    def path(self, name: str, suffix: str = "pem") -> str:
        return str(self.folder / f"{name}.{suffix}")

    def options(self, certificate: str | None = "client", authority: str | None = "ca") -> str:
        """The parameters of a URL that name these files."""
        named = [f"ssl_ca_certs={self.path(authority)}"] if authority else []
        if certificate:
            named += [f"ssl_certfile={self.path(certificate)}", f"ssl_keyfile={self.path(certificate, 'key')}"]
        return "&".join(named)

    def server_options(self) -> tuple[str, ...]:
        """Return the options with which a server with TLS starts."""
        files = (("cert", "server", "pem"), ("key", "server", "key"), ("ca-cert", "ca", "pem"))
        return tuple(word for kind, name, suffix in files for word in (f"--tls-{kind}-file", self.path(name, suffix)))

    def _issue(self, name: str, authority: str, days: int) -> None:
        request, extension = self.path(name, "csr"), self.folder / "extension"
        # Python checks by X509_STRICT from 3.13 on, which asks for a key identifier, and for the usage above.
        extension.write_text("subjectAltName=IP:127.0.0.1\nauthorityKeyIdentifier=keyid\n")
        _openssl("req", "-new", *_KEY, "-keyout", self.path(name, "key"), "-out", request, "-subj", f"/CN={name}")
        signed = ("-CA", self.path(authority), "-CAkey", self.path(authority, "key"), "-CAcreateserial")
        what = ("-days", str(days), "-extfile", str(extension), "-out", self.path(name))
        _openssl("x509", "-req", "-in", request, *signed, *what)

    def _out(self, name: str) -> tuple[str, ...]:
        return ("-keyout", self.path(name, "key"), "-out", self.path(name))


@dataclass(frozen=True)
class SecuredRedis:
    """A server that is reached in clear at `plain_url`, and by TLS at `port`."""

    plain_url: str
    port: int
    certificates: Certificates

    def url(self, options: str | None = None, host: str = "127.0.0.1", port: int | None = None) -> str:
        """The administrator's URL by TLS; None: with the client's certificate."""
        user = self.plain_url.partition("://")[2].rpartition("@")[0]
        options = self.certificates.options() if options is None else options
        return f"rediss://{user}@{host}:{port or self.port}/0?{options}"


_KEY = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes")


def _openssl(*words: str) -> None:
    subprocess.run(["openssl", *words], check=True, capture_output=True)


def has_tls(program: str) -> bool:
    """Return whether this server can serve by TLS: then it ends with a word on the certificate that it lacks."""
    refused = subprocess.run(
        [program, "--port", "0", "--tls-port", "1", "--save", ""], capture_output=True, text=True, check=False
    )
    return "tls-cert-file" in refused.stdout + refused.stderr


class TlsFront:
    """Takes connections by TLS on a free port, and hands them on in clear to a server that has none."""

    def __init__(self, certificates: Certificates, name: str, target: int, asks_client: bool) -> None:
        self._context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self._context.load_cert_chain(certificates.path(name), certificates.path(name, "key"))
        if asks_client:
            self._context.load_verify_locations(certificates.path("ca"))
            self._context.verify_mode = ssl.CERT_REQUIRED
        self._target = target
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self._sockets = [self._listener]
        self._threads: list[threading.Thread] = []
        self._start(self._accept)

    def close(self) -> None:
        for each in self._sockets:
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join()
        self._listener.close()

    def _start(self, target: Callable[..., None], *args: socket.socket) -> None:
        thread = threading.Thread(target=target, args=args)
        self._threads.append(thread)
        thread.start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                near, _ = self._listener.accept()
                self._sockets.append(near)
                self._start(self._serve, near)

    def _serve(self, near: socket.socket) -> None:
        """One thread reads both sides: two may not use one TLS connection at a time."""
        secured = self._context.wrap_socket(near, server_side=True, do_handshake_on_connect=False)
        self._sockets.append(secured)  # `near` is detached. redis 5 may keep a client that never begins a handshake.
        with secured, contextlib.suppress(OSError):
            secured.do_handshake()
            with socket.create_connection(("127.0.0.1", self._target)) as far:
                while True:
                    ready = [secured] if secured.pending() else select.select([secured, far], [], [])[0]
                    for one, other in ((secured, far), (far, secured)):
                        if one in ready:
                            if not (data := one.recv(1 << 16)):
                                return
                            other.sendall(data)
