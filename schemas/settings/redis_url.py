"""The URL of Redis in settings: the URL itself, or the path of a private file with it, since `ps` shows argv."""

from __future__ import annotations

from pathlib import Path
from urllib.parse import parse_qsl, quote, urlencode, urlsplit, urlunsplit

from headrace.schemas.basics.run_files import mode_for_others, open_at_once

TLS_FILES = ("ssl_ca_certs", "ssl_certfile", "ssl_keyfile")
"""Parameters of a rediss:// URL that name files."""

NOT_A_URL = (
    "redis://[user:password@]HOST:PORT/DB, or rediss:// for TLS; in a password write / as %2F, # as %23, ? as %3F, "
    "@ as %40; TLS may have ?ssl_ca_certs=FILE&ssl_certfile=FILE&ssl_keyfile=FILE"
)
_FILE = "file:"
_LARGEST_FILE = 4096
_SHOWN_PARAMETERS = ("db", "ssl_ca_certs", "ssl_certfile", "ssl_keyfile", "ssl_cert_reqs", "ssl_check_hostname")


def read_redis_url(text: str) -> str:
    """Return `text` if it is a URL, else "file:" and the absolute path of the file at the path `text`; "" for "".

    The content of the file is checked and not kept: its password may be replaced while a fleet runs. Files that the URL
    names get absolute paths. Raises `ValueError` with a sentence that has no password.
    """
    if not text or "://" in text or text.startswith(_FILE):
        return _with_absolute_files(text)
    path = Path(text).expanduser()
    _read(path)
    return f"{_FILE}{path.absolute()}"


def is_file(kept: str) -> bool:
    """Return whether what `read_redis_url` returned names a file."""
    return kept.startswith(_FILE)


def current_url(kept: str) -> str:
    """Return the URL of what `read_redis_url` returned: of a file, the one that it has now.

    Paths in a file are relative to its folder. Raises `ValueError` like it.
    """
    if not is_file(kept):
        return kept
    path = Path(kept.removeprefix(_FILE))
    return _with_absolute_files(_read(path), path.parent)


def _read(path: Path) -> str:
    try:
        with open(path, encoding="utf-8", opener=open_at_once) as file:
            if mode := mode_for_others(file.fileno(), path):
                raise ValueError(f"others may read {path} (mode {mode:04o}); chmod 600 {path}")
            text = file.read(_LARGEST_FILE).strip()
    except FileNotFoundError:
        # The text may be a URL without its beginning, with a password in it.
        raise ValueError(
            f"should be {NOT_A_URL}; or the path of a file that has such a URL, and there is none"
        ) from None
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} cannot be read ({type(error).__name__})") from None
    if "://" not in text or len(text.split()) != 1:
        raise ValueError(f"{path} should have one line with a URL: {NOT_A_URL}")
    return text


def _with_absolute_files(url: str, folder: Path | None = None) -> str:
    """Make the paths in the URL absolute, so that they are the same for every process of the fleet."""
    if not url.startswith("rediss://"):
        return url
    try:
        parts = urlsplit(url)
    except ValueError:
        return url  # the client refuses it, and does not show it
    options = parse_qsl(parts.query, keep_blank_values=True)
    if "@" in parts.path + parts.query + parts.fragment or not any(name in TLS_FILES for name, _ in options):
        return url
    absolute = [
        (name, str((folder or Path.cwd()) / Path(value).expanduser()) if name in TLS_FILES and value else value)
        for name, value in options
    ]
    return urlunsplit(parts._replace(query=urlencode(absolute, quote_via=quote, safe="/")))


def without_password(url: str) -> str:
    """Replace the password in a URL by `***`, for logs and errors.

    A password may have "/", "#" or "?" that should have been escaped, so all before the last "@" counts as part of it.
    Of the parameters only harmless ones stay: a password may stand behind a name that is misspelt. In place of a file
    stands the URL in it.
    """
    try:
        url = current_url(url)
    except ValueError:
        return url
    head, separator, rest = url.partition("://") if "://" in url else ("", "", url)
    secret, at, address = rest.rpartition("@")
    address, _, query = address.partition("?")
    shown = "&".join(part for part in query.split("&") if part.partition("=")[0] in _SHOWN_PARAMETERS)
    kept = f"?{shown}" if shown else ""
    if not at and not _is_address(address.partition("/")[0]):
        return "(malformed URL)"
    user = secret.partition(":")[0]
    known = f"{user}:***@" if ":" in secret else "***@" if at else ""
    return f"{head}{separator}{known}{address}{kept}"


def _is_address(text: str) -> bool:
    """Return whether this is HOST or HOST:PORT, and not a user and the beginning of a password."""
    host, colon, port = text.rpartition(":")
    return not colon or text.endswith("]") or (bool(host) and port.isdigit())
