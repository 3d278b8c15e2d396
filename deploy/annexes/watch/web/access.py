"""The page's guard: who may see it, and what browsers may do with it.

method        GET and HEAD only
token         where one is set: "Authorization: Bearer TOKEN", a cookie, or ?token=TOKEN, which is swapped for the
              cookie; not for the paths that are public
Host header   without the token: an address, localhost, or this machine's name; for public paths any name if a header
              shows that no web page asks. With the token: any name. A page of a stranger, whose name means this
              machine, has neither
headers       a content security policy without inline code or styles, and no access for other origins
"""

from __future__ import annotations

import platform
from collections.abc import Collection

from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from headrace.schemas.credentials.tokens import digest_of, same_token
from headrace.schemas.peers.http_hosts import BY_PROGRAM, is_known_host

POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
HEAD_BYTES = 1 << 16
"""The longest request line and headers together."""

_HEADERS = [
    (name.encode(), value.encode())
    for name, value in {
        "content-security-policy": POLICY,
        "x-content-type-options": "nosniff",
        "x-frame-options": "DENY",
        "referrer-policy": "no-referrer",
        "cross-origin-opener-policy": "same-origin",
        "cross-origin-resource-policy": "same-origin",
        "cache-control": "no-store",
    }.items()
]
_SWAP = '<!doctype html><meta charset="utf-8"><meta http-equiv="refresh" content="0;url={path}"><title>Headrace</title>'
_NO_TOKEN = "show this server's token: open the page with ?token=TOKEN, or send Authorization: Bearer TOKEN\n"
_OTHER_SERVER = (
    "the Host header names another server; use its address or localhost, show its token if it has one, or for "
    f"/rendezvous.json send the header {BY_PROGRAM}: 1\n"
)
_OWN_NAMES = frozenset({platform.node().lower()})


class Guard:
    """Passes a request on to `app`, or refuses it.

    Programs that can reach the port may read the `public` paths. Without a token they may read every path.
    """

    def __init__(self, app: ASGIApp, token: str | None, port: int, public: Collection[str] = ()) -> None:
        self._app = app
        self._token = token
        self._public = public
        self._cookie = f"headrace_{port}"
        """Browsers keep cookies by host, not by port."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return

        async def send_guarded(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message.get("headers", []), *_HEADERS]
            await send(message)

        await (self._refusal(scope) or self._app)(scope, receive, send_guarded)

    def _refusal(self, scope: Scope) -> Response | None:
        """Return the refusal to send instead of the app's response; None if the app may answer."""
        if sum(len(name) + len(value) for name, value in scope["headers"]) > HEAD_BYTES:  # all of it came at once
            return PlainTextResponse(f"headers of more than {HEAD_BYTES} bytes\n", 431)
        request = Request(scope)
        if request.method not in ("GET", "HEAD"):
            return PlainTextResponse("this server only reads: GET or HEAD\n", 405, {"allow": "GET, HEAD"})
        if self._token is not None and self._is_shown(request, self._token):
            return None
        is_public = scope["path"] in self._public
        if self._token is None or is_public:
            host = request.headers.get("host", "").encode("latin-1")
            if is_known_host(host, _OWN_NAMES) or (is_public and BY_PROGRAM in request.headers):
                return None
            return PlainTextResponse(_OTHER_SERVER, 421)
        if same_token(request.query_params.get("token", ""), self._token):
            return self._swap(scope["path"])
        return PlainTextResponse(_NO_TOKEN, 401, {"www-authenticate": "Bearer"})

    def _is_shown(self, request: Request, token: str) -> bool:
        shown, cookie = request.headers.get("authorization", ""), request.cookies.get(self._cookie, "")
        return same_token(shown, f"Bearer {token}") or same_token(cookie, digest_of(token))

    def _swap(self, path: str) -> Response:
        """Answer a request that has the token in its URL: set the cookie, and let the browser load the page without it.

        The response is a page that loads the real one, not a redirect. If the link came from another site, the browser
        would not send a strict cookie after a redirect.
        """
        safe = path if path.startswith("/worker/") and path.removeprefix("/worker/").isdigit() else "/"
        answer = Response(_SWAP.format(path=safe), media_type="text/html")
        answer.set_cookie(self._cookie, digest_of(self._token or ""), path="/", httponly=True, samesite="strict")
        return answer
