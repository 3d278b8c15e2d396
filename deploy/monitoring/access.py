"""The page's guard: who may see it, and what browsers may do with it.

method        GET and HEAD only
Host header   an address, localhost, or a name of this machine
token         where one is set: "Authorization: Bearer TOKEN", a cookie, or ?token=TOKEN, which is swapped for the
              cookie; not for the paths that are public
headers       a content security policy without inline code or styles, and no access for other origins
"""

from __future__ import annotations

from collections.abc import Collection

from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from headrace.schemas.credentials.tokens import digest_of, same_token
from headrace.schemas.peers.http_hosts import is_known_host

POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
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


class Guard:
    """Passes a request on to `app`, or refuses it.

    Anyone who can reach the port may read the `public` paths. Without a token they may read every path.
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
        request = Request(scope)
        if request.method not in ("GET", "HEAD"):
            return PlainTextResponse("this server only reads: GET or HEAD\n", 405, {"allow": "GET, HEAD"})
        if self._token is None:
            if is_known_host(request.headers.get("host", "").encode("latin-1"), frozenset()):
                return None
            return PlainTextResponse("the Host header names another server; use its address or localhost\n", 421)
        shown, cookie = request.headers.get("authorization", ""), request.cookies.get(self._cookie, "")
        is_shown = same_token(shown, f"Bearer {self._token}") or same_token(cookie, digest_of(self._token))
        if scope["path"] in self._public or is_shown:
            return None
        if same_token(request.query_params.get("token", ""), self._token):
            return self._swap(scope["path"])
        return PlainTextResponse(_NO_TOKEN, 401, {"www-authenticate": "Bearer"})

    def _swap(self, path: str) -> Response:
        """Answer a request that has the token in its URL: set the cookie, and let the browser load the page without it.

        The response is a page that loads the real one, not a redirect. If the link came from another site, the browser
        would not send a strict cookie after a redirect.
        """
        safe = path if path.startswith("/worker/") and path.removeprefix("/worker/").isdigit() else "/"
        answer = Response(_SWAP.format(path=safe), media_type="text/html")
        answer.set_cookie(self._cookie, digest_of(self._token or ""), path="/", httponly=True, samesite="strict")
        return answer
