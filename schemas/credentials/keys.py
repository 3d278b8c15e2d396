"""Key files of a fleet: CURVE key pairs, each of one role and one group on the fleet's sockets.

    DIR/ROLE.secret, DIR/ROLE.GROUP.secret     a peer that has it is of that role and group
    DIR/ROLE.public, DIR/ROLE.GROUP.public     a peer that a server lets in

`key_files.py` describes the files. The broker needs broker.secret and a .public of every role that it lets in. Each
other peer needs its own .secret and broker.public. `headrace keys init` makes those of the default group, `headrace
keys add` others. Data only: schemas do not import zmq.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from headrace.schemas.credentials.key_files import PeerKey, fingerprint, group_rule, is_group, key_name, read_key_file
from headrace.schemas.credentials.known_keys import KnownKeys
from headrace.schemas.errors import KeysError, absolute

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

ROLES_AT: Mapping[str, tuple[str, ...]] = {**ADMITTED, ENV_PORT: (ENV_HOST,), CLIENT_PORT: (CLIENT,)}
"""`ADMITTED`, with the ports of workers."""

ROLES = (BROKER, *sorted({role for roles in ROLES_AT.values() for role in roles}))
TOKEN_FILE = "http.token"
"""In the same folder: one word, which HTTP clients of a policy server show; mode 0600."""
DIR_VARIABLE, GROUP_VARIABLE = "HEADRACE_KEYS__DIR", "HEADRACE_KEYS__GROUP"


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
    group: str = ""

    def options(self) -> dict[str, bytes]:
        """Return the socket options to set before connecting, by their ZeroMQ names."""
        return {"CURVE_SERVERKEY": self.broker, "CURVE_PUBLICKEY": self.public, "CURVE_SECRETKEY": self.secret}


@dataclass(frozen=True, slots=True)
class BrokerKeys:
    """A server's own secret, in Z85, and the keys of its peers."""

    secret: bytes = field(repr=False)
    known: KnownKeys
    public: bytes = b""
    """The server's own public key, where it is published; else empty."""

    @property
    def roles(self) -> Mapping[bytes, str]:
        """Return the role of each public key that is let in, in Z85."""
        return self.known.roles

    def judge(self, port: str, public: bytes) -> tuple[PeerKey | None, str]:
        """Return the known key that a peer shows at `port`, or None, and why it is refused; "" if it is let in."""
        key = self.known.find(public)
        if key is None:
            return None, "an unknown key"
        if key.revoked:
            return key, "a revoked key"
        return key, "" if key.role in ROLES_AT[port] else f"a {key.role} key"

    def options(self, port: str) -> dict[str, bytes | int]:
        """Return options of the socket that serves `port`, a key of `ADMITTED`.

        ENFORCE_DOMAIN: without a ZAP handler for the domain, no peer gets in. Without this option libzmq would then let
        in every peer that knows the broker's public key.
        """
        return {"CURVE_SERVER": 1, "CURVE_SECRETKEY": self.secret, "ZAP_DOMAIN": port.encode(), "ZAP_ENFORCE_DOMAIN": 1}


def port_keys(folder: str | None, role: str, group: str | None = None) -> BrokerKeys | None:
    """Return the keys with which a worker serves peers of `role`: its own secret, and their public keys.

    None: the folder in HEADRACE_KEYS__DIR, if that is set. "": no keys. Raises `KeysError`.
    """
    found = keys_folder(folder)
    if found is None:
        return None
    return BrokerKeys(_own(found, "worker", group)["secret"].encode(), KnownKeys(found, (role,)))


def client_keys(
    keys: ClientKeys | str | os.PathLike[str] | None, role: str, group: str | None = None
) -> ClientKeys | None:
    """Return the keys of `role` in a folder, or those given.

    None: those in the folder of HEADRACE_KEYS__DIR, if that is set. "": no keys. `group` is as in `read_client_keys`.
    Raises `KeysError`.
    """
    if isinstance(keys, ClientKeys):
        return keys
    folder = keys_folder(keys)
    if folder is None:
        return None
    try:
        return read_client_keys(folder, role, group)
    except OSError as error:
        remedy = f"give it to the user that runs this: chown -R USER {folder}"
        raise KeysError(str(folder), f"user {os.geteuid()} cannot read it: {error.strerror}; {remedy}") from error


def check_fingerprint(keys: ClientKeys | None, role: str, published: str, where: str) -> None:
    """Raise `KeysError` unless these keys expect the broker whose key has the fingerprint `published`.

    "": the broker has no keys, and nothing is checked. `where` is the rendezvous that has the fingerprint.
    """
    if published and keys is None:
        copy = f"copy {role}.secret and broker.public to this machine, and name their folder in keys.dir"
        raise KeysError(where, f"its fleet asks for keys, and this process has none; {copy}")
    if published and keys is not None and (expected := expected_key(keys)) != published:
        found = f"it is of another broker (fingerprint {expected}, and {where} has {published:.16})"
        raise KeysError(str(keys.folder / "broker.public"), f"{found}; copy it again from the fleet's folder of keys")


def expected_key(keys: ClientKeys | None) -> str:
    """Return the fingerprint of the server's key that a peer with these keys expects; "" without keys."""
    return fingerprint(keys.broker) if keys is not None else ""


def keys_folder(named: str | os.PathLike[str] | None) -> Path | None:
    """Return the folder of keys that is named; with None, the one in the environment. "" is no folder."""
    folder = os.fspath(named) if named is not None else os.environ.get(DIR_VARIABLE, "")
    return absolute(Path(folder).expanduser()) if folder else None


def read_client_keys(folder: Path, role: str, group: str | None = None) -> ClientKeys:
    """Read the keys of `role` and `group`.

    None: the group in the environment's HEADRACE_KEYS__GROUP, or "". "": the only key of the role, or among several
    that of the default group. Raises `KeysError` for a file that is missing, damaged, or a secret that others may read.
    """
    own, server = _own(folder, role, group), server_of(role)
    of_group = folder / f"{key_name(server, own['group'])}.public"  # a worker of the same group before others
    theirs = read_key_file(of_group if of_group.exists() else _only(folder, server, "public"))
    public, secret = own["public"].encode(), own["secret"].encode()
    return ClientKeys(role, public, secret, theirs["public"].encode(), folder, own["group"])


def _own(folder: Path, role: str, group: str | None) -> dict[str, str]:
    group = os.environ.get(GROUP_VARIABLE, "") if group is None else group
    if not is_group(group):
        raise KeysError(str(folder), f"keys.group: {group!r} is no name of a group; {group_rule()}")
    path = folder / f"{key_name(role, group)}.secret" if group else _only(folder, role, "secret")
    return read_key_file(path)


def _only(folder: Path, role: str, half: str) -> Path:
    """Return the path of the role's only file of this half; among several, or without any, the default group's."""
    default, others = folder / f"{role}.{half}", sorted(folder.glob(f"{role}.*.{half}"))
    if default.exists() or not others:
        return default
    if len(others) > 1:
        names = ", ".join(path.name for path in others[:8])
        raise KeysError(str(folder), f"it has {names}; say by keys.group which group this peer is of")
    return others[0]


def server_of(role: str) -> str:
    """Return the role of the server that a peer of this role connects to."""
    return "worker" if role in (ENV_HOST, CLIENT) else BROKER


def read_broker_keys(folder: Path) -> BrokerKeys:
    """Read the broker's keys and those of all roles that it lets in. Raises `KeysError`."""
    own = read_key_file(folder / f"{BROKER}.secret")
    known = KnownKeys(folder, [role for role in ROLES if role != BROKER])
    return BrokerKeys(own["secret"].encode(), known, own["public"].encode())
