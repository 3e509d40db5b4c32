"""What the middlewares of the API server share: the words of ASGI, and the body of a request read before its turn."""

from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
Scope = MutableMapping[str, Any]

CHANGES = frozenset({"POST", "PUT", "PATCH", "DELETE"})


def is_change(scope: Scope) -> bool:
    """Whether it is a request that may write."""
    return scope["type"] == "http" and scope["method"] in CHANGES


async def read_body(receive: Receive, most_bytes: int) -> tuple[bytes, Receive]:
    """(the body, or somewhat more than `most_bytes` of it; a `receive` that gives all of it again)."""
    body, messages = b"", []
    while True:
        message = await receive()
        messages.append(message)
        body += message.get("body", b"")
        if message["type"] != "http.request" or not message.get("more_body") or len(body) > most_bytes:
            break

    async def again() -> Message:
        return messages.pop(0) if messages else await receive()

    return body, again
