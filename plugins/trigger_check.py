"""Values of a triggered run are checked when it is triggered, by the experiment itself: no run begins that would fail at its first task.

Airflow checks each field of a form by its schema, alone. It takes keys that no field has, and it cannot know that a batch must be a
multiple of the context length. So the trigger's request, from the form or the API, is put to the experiment as the command line would put
it; what the command line refuses is refused here, with the same words, as status 400, which the form shows.
"""

import json
import re
from typing import Any
from urllib.parse import unquote

from asgi import Receive, Scope, Send, read_body
from craw4llm.errors import Craw4LLMError
from craw4llm.experiment import expand, load, names

TRIGGER = re.compile(r"/api/v\d+/dags/(?P<dag>[^/]+)/dagRuns")
RERUNS = "_reruns"
HOW = {"crawl_arms": {"replicates": (1, 20), "launcher": None}}  # fields of a form that are no parameters of its experiment
MOST_BYTES = 1 << 20


class TriggerCheck:
    """ASGI middleware."""

    def __init__(self, app: Any) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        found = TRIGGER.search(scope["path"]) if scope["type"] == "http" and scope["method"] == "POST" else None
        sent = {name for name, _ in scope.get("headers", ())}
        stranger = not sent & {b"authorization", b"cookie"}  # Airflow answers with 401
        if found is None or not scope["path"].endswith("/dagRuns") or stranger:
            await self.app(scope, receive, send)
            return
        body, receive = await read_body(receive, MOST_BYTES)
        error = refusal(unquote(found["dag"]), body)
        if error:
            content = json.dumps({"detail": error}).encode()
            headers = [(b"content-type", b"application/json"), (b"content-length", str(len(content)).encode())]
            await send({"type": "http.response.start", "status": 400, "headers": headers})
            await send({"type": "http.response.body", "body": content})
            return

        await self.app(scope, receive, send)


def refusal(dag_id: str, body: bytes) -> str:
    """Why a run of this DAG may not begin with these values; "" where it may, and for what is for Airflow to judge."""
    name = dag_id.removesuffix(RERUNS)
    if name not in names() or len(body) > MOST_BYTES:
        return ""
    try:
        conf = json.loads(body)["conf"]
    except (ValueError, KeyError, TypeError):
        return ""
    if not isinstance(conf, dict):
        return ""
    how = HOW.get(dag_id, {})
    try:
        declared = load(name)
        given = {}
        for key, value in conf.items():
            if key in how:
                continue
            parameter = declared.parameters.get(key)
            if parameter is None:
                return f"{name} has no parameter {key[:100]!r}; it has: {', '.join(sorted({*declared.parameters, *how}))}"
            if value is None and parameter.default == "":
                continue
            if parameter.many:
                if not isinstance(value, list) or not all(isinstance(word, str) for word in value):
                    return f"{name}: {key} is {value!r:.200}; expected a list of some of {', '.join(parameter.choices)}"
                value = ",".join(value)
            elif isinstance(value, str) and parameter.type is not str:
                return f"{name}: {key} is {value!r:.200}; expected {parameter.type.__name__}, not text"
            elif value is None:
                return f"{name}: {key} is null; expected {parameter.type.__name__}"
            given[key] = value
        expand(declared, given)
    except Craw4LLMError as error:
        return str(error)
    return ""
