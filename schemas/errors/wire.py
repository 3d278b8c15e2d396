"""Errors between peers: messages that cannot be read or sent, and peers that refuse each other."""

from __future__ import annotations

from headrace.schemas.errors.root import ExitCode, HeadraceError


class WireError(HeadraceError):
    """Bytes or messages break the protocol."""

    exit_code = ExitCode.PROTOCOL


class DecodeError(WireError):
    """A message is not a valid Headrace message. `reason` is a stable word, `detail` says what was seen."""

    def __init__(self, reason: str, detail: str) -> None:
        self.reason, self.detail = reason, detail
        super().__init__(f"{reason}: {detail}")


class EncodeError(WireError):
    """Something must not or cannot go on the wire."""


class InfosTooLargeError(EncodeError):
    """A batch's infos are `nbytes` bytes of JSON; one message carries `limit` at most."""

    def __init__(self, nbytes: int, limit: int) -> None:
        self.nbytes, self.limit = nbytes, limit
        super().__init__(
            f"a batch's infos have {nbytes} bytes of JSON; {limit} are allowed; "
            "shorten rollout_fragment_length, drop values in the env, or set infos = 'none'"
        )


class RefusedError(HeadraceError):
    """The broker, or a worker that an env host came to, refused this peer. `code` is the reason's word on the wire."""

    exit_code = ExitCode.PROTOCOL

    def __init__(self, code: str, detail: str) -> None:
        self.code, self.detail = code, detail
        super().__init__(detail)


class WrongFleetError(RefusedError):
    """The peer belongs to another fleet."""

    exit_code = ExitCode.WRONG_FLEET


class VersionMismatchError(RefusedError):
    """The peer speaks another protocol version."""

    exit_code = ExitCode.VERSION_MISMATCH


class FencedError(RefusedError):
    """A newer incarnation of this slot, or a newer learner, has taken this one's place."""

    exit_code = ExitCode.FENCED


class KeysRefusedError(RefusedError):
    """A server's keys and this peer's do not match, so they exchanged no message.

    The server is the broker at `endpoint`, or whatever `server` names.
    """

    exit_code = ExitCode.KEYS

    def __init__(self, endpoint: str, detail: str, server: str = "broker") -> None:
        self.endpoint = endpoint
        super().__init__("keys", f"the {server} at {endpoint} {detail}")


class KeyNotAllowedError(RefusedError):
    """The broker ended this peer's session because of its key: it is revoked, or of another role or group."""

    exit_code = ExitCode.KEYS


REFUSALS: dict[str, type[RefusedError]] = {
    "wrong_fleet": WrongFleetError,
    "version_mismatch": VersionMismatchError,
    "fenced": FencedError,
    "key_revoked": KeyNotAllowedError,
    "wrong_role": KeyNotAllowedError,
    "other_group": KeyNotAllowedError,
}


def refusal(code: str, detail: str) -> RefusedError:
    """Return the typed error for a REJECT or FENCED message with `code`."""
    return REFUSALS.get(code, RefusedError)(code, detail)
