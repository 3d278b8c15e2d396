"""Key files: CURVE key pairs, each of one role on the fleet's sockets.

    DIR/ROLE.secret     role, public, secret, checksum; mode 0600: a peer that has it is of that role
    DIR/ROLE.public     role, public, checksum

Both are TOML. Keys are 40 characters of Z85. The checksum covers everything before it, so that a damaged file is not
taken for a stranger's. The broker needs broker.secret and the .public of every role that it lets in. Each other peer
needs its own .secret and broker.public. `headrace keys init` makes them. Data only: schemas do not import zmq.
"""

from __future__ import annotations

import os
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import xxhash

from headrace.schemas.errors import KeysError

BROKER = "broker"
ADMITTED: Mapping[str, tuple[str, ...]] = {
    "worker": ("worker", "supervisor"),
    "learner": ("learner",),
    "weights": ("worker",),
}
"""Port of the broker -> the roles that may connect there. Each port is a ZAP domain."""

ENV_HOST, ENV_PORT = "env-host", "envs"
"""The role of hosts that lend a worker their envs, and the ZAP domain of the worker's port for them."""

CLIENT, CLIENT_PORT = "client", "clients"
"""The role of clients for which a worker's policy acts, and the ZAP domain of the worker's port for them."""

ROLES = (BROKER, *sorted({role for roles in ADMITTED.values() for role in roles} | {ENV_HOST, CLIENT}))
TOKEN_FILE = "http.token"
"""In the same folder: one word, which HTTP clients of a policy server show; mode 0600."""
DIR_VARIABLE = "HEADRACE_KEYS__DIR"

_Z85 = re.compile(r"[0-9a-zA-Z.\-:+=^!/*?&<>()\[\]{}@%$#]{40}")
_LARGEST_FILE = 4096


@dataclass(frozen=True, slots=True)
class ClientKeys:
    """The keys that a peer shows, and the server's key that it expects; all in Z85.

    `folder` is where they came from.
    """

    role: str
    public: bytes
    secret: bytes = field(repr=False)
    broker: bytes
    folder: Path

    def options(self) -> dict[str, bytes]:
        """Return the socket options to set before connecting, by their ZeroMQ names."""
        return {"CURVE_SERVERKEY": self.broker, "CURVE_PUBLICKEY": self.public, "CURVE_SECRETKEY": self.secret}


@dataclass(frozen=True, slots=True)
class BrokerKeys:
    """The broker's own secret, and the role of each public key it knows; all in Z85."""

    secret: bytes = field(repr=False)
    roles: Mapping[bytes, str]

    def options(self, port: str) -> dict[str, bytes | int]:
        """Return options of the socket that serves `port`, a key of `ADMITTED`.

        ENFORCE_DOMAIN: without a ZAP handler for the domain, no peer gets in. Without this option libzmq would then let
        in every peer that knows the broker's public key.
        """
        return {
            "CURVE_SERVER": 1,
            "CURVE_SECRETKEY": self.secret,
            "ZAP_DOMAIN": port.encode(),
            "ZAP_ENFORCE_DOMAIN": 1,
        }


def read_env_port_keys(folder: Path) -> BrokerKeys:
    """Read the keys with which a worker serves its env hosts: its own secret, and their public key.

    Raises `KeysError`.
    """
    own, host = read_key_file(folder / "worker.secret"), read_key_file(folder / f"{ENV_HOST}.public")
    return BrokerKeys(own["secret"].encode(), {host["public"].encode(): ENV_HOST})


def read_client_port_keys(folder: Path) -> BrokerKeys:
    """Read the keys with which a worker serves clients of its policy: its secret, and their public key.

    Raises `KeysError`.
    """
    own, client = read_key_file(folder / "worker.secret"), read_key_file(folder / f"{CLIENT}.public")
    return BrokerKeys(own["secret"].encode(), {client["public"].encode(): CLIENT})


def client_keys(keys: ClientKeys | str | os.PathLike[str] | None, role: str) -> ClientKeys | None:
    """Return the keys of `role` in a folder, or those given.

    None: the folder in the environment's HEADRACE_KEYS__DIR, or no keys without one. "" is no keys. Raises `KeysError`.
    """
    if keys is None:
        keys = os.environ.get(DIR_VARIABLE, "")
    if isinstance(keys, ClientKeys):
        return keys
    folder = os.fspath(keys)
    return read_client_keys(Path(folder).expanduser(), role) if folder else None


def read_client_keys(folder: Path, role: str) -> ClientKeys:
    """Read the keys of `role`.

    Raises `KeysError` for a file that is missing, damaged, or a secret that others may read.
    """
    own, broker = read_key_file(folder / f"{role}.secret"), read_key_file(folder / f"{server_of(role)}.public")
    return ClientKeys(role, own["public"].encode(), own["secret"].encode(), broker["public"].encode(), folder)


def server_of(role: str) -> str:
    """Return the role of the server that a peer of this role connects to."""
    return "worker" if role in (ENV_HOST, CLIENT) else BROKER


def read_broker_keys(folder: Path) -> BrokerKeys:
    """Read the broker's keys and those of all roles that it lets in. Raises `KeysError`."""
    own = read_key_file(folder / f"{BROKER}.secret")
    known = (read_key_file(folder / f"{role}.public") for role in ROLES if role != BROKER)
    return BrokerKeys(own["secret"].encode(), {file["public"].encode(): file["role"] for file in known})


def key_file(role: str, public: bytes, secret: bytes | None = None) -> str:
    """Return the text of ROLE.secret, or, without the secret, of ROLE.public."""
    values = {"role": role, "public": public.decode()}
    title = f"# Headrace: the public key of role {role}, for its peers.\n"
    if secret is not None:
        values["secret"] = secret.decode()
        title = f"# Headrace: SECRET key of role {role}. A peer with this file is a {role} of the fleet.\n"
    values["checksum"] = _checksum(values)
    return title + "".join(f'{name} = "{value}"\n' for name, value in values.items())


def read_key_file(path: Path) -> dict[str, str]:
    """Read role, public and, of a .secret, secret. Raises `KeysError`."""
    kinds = ("role", "public", "secret", "checksum") if path.suffix == ".secret" else ("role", "public", "checksum")
    try:
        with path.open("rb") as file:
            if path.suffix == ".secret" and (mode := os.fstat(file.fileno()).st_mode & 0o777) & 0o077:
                raise KeysError(str(path), f"others may read it (mode {mode:04o}); chmod 600 {path}")
            found = tomllib.loads(file.read(_LARGEST_FILE).decode())
    except FileNotFoundError as error:
        remedy = "copy it from where the fleet's keys were made, or make new ones: headrace keys init --dir"
        raise KeysError(str(path), f"there is no such file; {remedy} {path.parent}") from error
    except OSError as error:
        raise KeysError(str(path), f"it cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise _damaged(path, "is not TOML") from error
    if sorted(found) != sorted(kinds) or not all(isinstance(value, str) for value in found.values()):
        raise _damaged(path, f"should hold {', '.join(kinds)}, holds {', '.join(found) or 'nothing'}")
    if found.pop("checksum") != _checksum(found) or not all(_Z85.fullmatch(found[half]) for half in kinds[1:-1]):
        raise _damaged(path, "its checksum is that of other content")
    if found["role"] != path.stem:
        raise KeysError(str(path), f"it is the key of a {found['role']}, under another name; copy the right one")
    return found


def _damaged(path: Path, seen: str) -> KeysError:
    return KeysError(str(path), f"it is damaged: {seen}; copy it again from where the fleet's keys were made")


def _checksum(values: Mapping[str, str]) -> str:
    content = "\n".join(values[name] for name in ("role", "public", "secret") if name in values)
    return xxhash.xxh3_64_hexdigest(content.encode())
