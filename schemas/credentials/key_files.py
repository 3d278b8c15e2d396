"""Key files: the form of one file of keys, and reading it.

    DIR/NAME.secret                    role, group, public, secret, checksum; mode 0600
    DIR/NAME.public                    role, group, public, checksum
    DIR/NAME.FINGERPRINT.revoked       the same as .public, of a key that is admitted no more

NAME is ROLE, or ROLE.GROUP; a file without a group is of the default one, "". All are TOML. Keys are 40 characters of
Z85. The checksum covers everything before it, so that a damaged file is not taken for a stranger's.
"""

from __future__ import annotations

import hashlib
import os
import re
import tomllib
from collections.abc import Container, Mapping
from dataclasses import dataclass
from pathlib import Path

import xxhash

from headrace.schemas.basics.bounds import GROUP_PATTERN
from headrace.schemas.basics.run_files import mode_for_others, open_at_once
from headrace.schemas.errors import KeysError

_GROUP = re.compile(GROUP_PATTERN)
_Z85 = re.compile(r"[0-9a-zA-Z.\-:+=^!/*?&<>()\[\]{}@%$#]{40}")
_LARGEST_FILE = 4096


@dataclass(frozen=True, slots=True)
class PeerKey:
    """A public key, in Z85, with its role and group."""

    role: str
    group: str
    public: bytes
    revoked: bool = False

    @property
    def name(self) -> str:
        """Return ROLE or ROLE.GROUP, as in the names of its files."""
        return key_name(self.role, self.group)

    @property
    def fingerprint(self) -> str:
        """Return 16 hexadecimal digits that stand for the key."""
        return fingerprint(self.public)


def fingerprint(public: bytes) -> str:
    """Return 16 hexadecimal digits that stand for a public key in Z85."""
    return hashlib.sha256(public).hexdigest()[:16]


def key_name(role: str, group: str) -> str:
    """Return the name of a key's files, without their suffix."""
    return f"{role}.{group}" if group else role


def is_group(name: object) -> bool:
    """Return whether this may be the name of a group; "" is the default one."""
    return isinstance(name, str) and (not name or _GROUP.fullmatch(name) is not None)


def key_file(role: str, public: bytes, secret: bytes | None = None, group: str = "") -> str:
    """Return the text of NAME.secret, or, without the secret, of NAME.public."""
    values = {"role": role} | ({"group": group} if group else {}) | {"public": public.decode()}
    name = f"role {role}, group {group}" if group else f"role {role}"
    title = f"# Headrace: the public key of {name}, for its peers.\n"
    if secret is not None:
        values["secret"] = secret.decode()
        title = f"# Headrace: SECRET key of {name}. A peer with this file is a {role} of the fleet.\n"
    values["checksum"] = _checksum(values)
    return title + "".join(f'{name} = "{value}"\n' for name, value in values.items())


def read_key_file(path: Path) -> dict[str, str]:
    """Read role, group, public and, of a .secret, secret. Raises `KeysError`."""
    halves = ("public", "secret") if path.suffix == ".secret" else ("public",)
    try:
        with open(path, "rb", opener=open_at_once) as file:
            if path.suffix == ".secret" and (mode := mode_for_others(file.fileno(), path)):
                raise KeysError(str(path), f"others may read it (mode {mode:04o}); chmod 600 {path}")
            found = tomllib.loads(file.read(_LARGEST_FILE).decode())
    except FileNotFoundError as error:
        remedy = "copy it from where the fleet's keys were made, or make new ones: headrace keys init --dir"
        raise KeysError(str(path), f"there is no such file; {remedy} {path.parent}") from error
    except PermissionError as error:
        remedy = f"give it to the user that runs this: chown -R USER {path.parent}"
        raise KeysError(str(path), f"user {os.geteuid()} cannot read it: {error.strerror}; {remedy}") from error
    except OSError as error:
        raise KeysError(str(path), f"it cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise _damaged(path, "is not TOML") from error
    kinds = ("role", *(["group"] if "group" in found else []), *halves, "checksum")
    if sorted(found) != sorted(kinds) or not all(isinstance(value, str) for value in found.values()):
        raise _damaged(path, f"should hold {', '.join(kinds)}, holds {', '.join(found) or 'nothing'}")
    if found.pop("checksum") != _checksum(found) or not all(_Z85.fullmatch(found[half]) for half in halves):
        raise _damaged(path, "its checksum is that of other content")
    found.setdefault("group", "")
    name = key_name(found["role"], found["group"])
    if not is_group(found["group"]):
        raise KeysError(str(path), f"{found['group']!r} is no name of a group; {group_rule()}")
    if path.suffix != ".revoked" and name != path.stem:
        raise KeysError(str(path), f"it is the key of a {name}, under another name; copy the right one")
    return found


def read_public_key(path: Path) -> PeerKey:
    """Read the public half in a key file of any kind. Raises `KeysError`."""
    found = read_key_file(path)
    return PeerKey(found["role"], found["group"], found["public"].encode(), path.suffix == ".revoked")


def is_revoked_by(stems: Container[str], key: PeerKey) -> bool:
    """Return whether one of the .revoked files with these stems is about `key`, whatever the file holds.

    So a file that was cut or damaged revokes its key too. A file without a fingerprint in its name revokes each key of
    its role and group.
    """
    return f"{key.name}.{key.fingerprint}" in stems or key.name in stems


def group_rule() -> str:
    """Return the rule for names of groups, for people."""
    return "give up to 32 lower-case letters, digits, '-' and '_', beginning with a letter or digit"


def _damaged(path: Path, seen: str) -> KeysError:
    return KeysError(str(path), f"it is damaged: {seen}; copy it again from where the fleet's keys were made")


def _checksum(values: Mapping[str, str]) -> str:
    content = "\n".join(values[name] for name in ("role", "group", "public", "secret") if name in values)
    return xxhash.xxh3_64_hexdigest(content.encode())
