"""Errors between peers: messages that cannot be read or sent, and peers that refuse each other."""

from __future__ import annotations

from headrace.schemas.errors.root import ExitCode, HeadraceError


class DecodeError(HeadraceError):
    """A message is not a valid Headrace message. `reason` is a stable word, `detail` says what was seen."""

    exit_code = ExitCode.PROTOCOL

    def __init__(self, reason: str, detail: str) -> None:
        self.reason, self.detail = reason, detail
        super().__init__(f"{reason}: {detail}")


class EncodeError(HeadraceError):
    """Something must not or cannot go on the wire."""

    exit_code = ExitCode.PROTOCOL


class InfosTooLargeError(EncodeError):
    """A batch's infos, or `what`, are `nbytes` bytes of JSON; one message carries `limit` at most."""

    def __init__(self, nbytes: int, limit: int, what: str = "infos") -> None:
        self.nbytes, self.limit = nbytes, limit
        super().__init__(
            f"a batch's {what} have {nbytes} bytes of JSON; {limit} are allowed; "
            "shorten rollout_fragment_length, drop values in the env, or set infos = 'none'"
        )


REFUSAL_EXIT_CODES = {
    "wrong_fleet": ExitCode.WRONG_FLEET,
    "version_mismatch": ExitCode.VERSION_MISMATCH,
    "fenced": ExitCode.FENCED,
    "keys": ExitCode.KEYS,
    "key_revoked": ExitCode.KEYS,
    "wrong_role": ExitCode.KEYS,
    "unknown_group": ExitCode.CONFIG,
    "group_declared": ExitCode.CONFIG,
    "too_many_groups": ExitCode.CONFIG,
}
"""Exit codes of peers that are refused, by the word on the wire; PROTOCOL for any other."""


class RefusedError(HeadraceError):
    """The broker, or a worker that an env host came to, refused this peer. `code` is the reason's word on the wire."""

    def __init__(self, code: str, detail: str) -> None:
        self.code, self.detail = code, detail
        self.exit_code = REFUSAL_EXIT_CODES.get(code, ExitCode.PROTOCOL)
        super().__init__(detail)


class FencedError(RefusedError):
    """A newer incarnation of this slot, or a newer learner, has taken this one's place."""


class KeysRefusedError(RefusedError):
    """A server's keys and this peer's do not match, so they exchanged no message.

    The server is the broker at `endpoint`, or whatever `server` names.
    """

    def __init__(self, endpoint: str, detail: str, server: str = "broker") -> None:
        self.endpoint = endpoint
        super().__init__("keys", f"the {server} at {endpoint} {detail}")


def refusal(code: str, detail: str) -> RefusedError:
    """Return the typed error for a REJECT or FENCED message with `code`."""
    return (FencedError if code == "fenced" else RefusedError)(code, detail)
