"""Who may read the metrics where the server has tokens."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, Final

from serve.rpc.guard import bearer_token
from serve.rpc.identity import Identities

if TYPE_CHECKING:
    from wsgiref.types import StartResponse, WSGIApplication

SCOPE: Final = "metrics"


def guarded(app: WSGIApplication, identities: Identities) -> WSGIApplication:
    """``app`` for those alone whose token has the scope ``metrics``: 401 without a valid token, 403 with another's scopes."""

    def answer(environ: dict[str, Any], start_response: StartResponse) -> Iterable[bytes]:
        header = environ.get("HTTP_AUTHORIZATION")
        caller = identities.who(bearer_token([] if header is None else [header]))
        if caller is not None and SCOPE in caller.scopes:
            return app(environ, start_response)
        if caller is None:
            status, text = "401 Unauthorized", "the request carries no valid token: send it as 'Authorization: Bearer TOKEN'"
        else:
            status, text = "403 Forbidden", f"the token of {caller.name} may not read metrics; the scope it needs: {SCOPE}"
        body = f"{text}\n".encode()
        headers = [("Content-Type", "text/plain; charset=utf-8"), ("Content-Length", str(len(body)))]
        start_response(status, [*headers, ("WWW-Authenticate", "Bearer")] if caller is None else headers)
        return [body]

    return answer
