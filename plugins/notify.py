"""Word of a run's end: its verdict, or what failed and where its log is. Off until a connection says where to.

    airflow connections add craw4llm_notify --conn-type http --conn-host chat.example.org --conn-schema https \\
        --conn-extra '{"path": "/hooks/abc"}'
    airflow connections add craw4llm_notify --conn-type slackwebhook --conn-host https://hooks.slack.com/services \\
        --conn-password T0/B0/XYZ
    airflow connections add craw4llm_notify --conn-type smtp --conn-host mail.example.org --conn-port 587 --conn-login ... \\
        --conn-extra '{"to": "lab@example.org", "from_email": "airflow@example.org", "disable_ssl": true}'

The connection's id is `craw4llm_notify`, or what $CRAW4LLM_NOTIFY names. Its type chooses the way:

    http          JSON {"text", "state", "dag_id", "run_id", "url"} to host and path, with the password as bearer token: Mattermost,
                  and whatever reads JSON
    slackwebhook  Slack's incoming webhook, {"text"}; the password is the part of its address that is secret
    smtp          mail, by the SMTP provider's notifier

A run that fails is told of once, by the task that fails first; when it is cleared and fails again, again. Text of crawled pages (in an
error) mentions nobody in Slack and is no markup in mail. A notifier that fails is a line in the log, never a failed run.
"""

import contextlib
import hashlib
import html
import json
import os
import urllib.parse
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from airflow.sdk import BaseNotifier

DEFAULT_CONNECTION = "craw4llm_notify"
TIMEOUT_S = 15
PROJECT = Path(__file__).resolve().parent.parent


class RunNotifier(BaseNotifier):
    """state: "failed" for on_failure_callback of every task, "success" for on_success_callback of a report's."""

    def __init__(self, state: Literal["failed", "success"]) -> None:
        super().__init__()
        self.state = state

    def notify(self, context: Any) -> None:
        connection = _connection(os.environ.get("CRAW4LLM_NOTIFY") or DEFAULT_CONNECTION)
        if connection is None:
            return
        try:
            if self.state == "success" or _first_failure(context):
                send(connection, message(self.state, context), context)
                self.log.info("sent word of it by the connection %s (%s)", connection.conn_id, connection.conn_type)
        except Exception as error:
            self.log.warning("could not notify by %s: %s", connection.conn_id, error)


def message(state: str, context: Mapping[str, Any]) -> dict[str, str]:
    """text, state, dag_id, run_id, url (of the task's log)."""
    ti = context["ti"]
    url = str(getattr(ti, "log_url", "") or "")
    where = {"dag_id": str(ti.dag_id), "run_id": str(ti.run_id), "url": url}
    if state == "failed":
        # Without an error, the scheduler tells of a task that it has given up: no process of it was there to say why.
        cause = str(context.get("exception") or "its process was killed, or its machine went down").strip()[:1500]
        return {"text": f"{ti.dag_id}: {ti.task_id} failed: {cause}\nlog: {url}", "state": state, **where}
    query = urllib.parse.urlencode({"dag_id": where["dag_id"], "run_id": where["run_id"]})
    results = [f"results: {url.partition('/dags/')[0]}/craw4llm/run?{query}"] if "/dags/" in url else []
    text = "\n".join([f"{ti.dag_id}: the report is ready.", *_answers(ti), *results, f"log: {url}"])
    return {"text": text, "state": state, **where}


def send(connection: Any, content: Mapping[str, str], context: Any) -> None:
    """Raises whatever goes wrong."""
    kind, extra = connection.conn_type, connection.extra_dejson
    if kind == "http":
        headers = {"Authorization": f"Bearer {connection.password}"} if connection.password else {}
        _post(_address(connection) + extra.get("path", "/"), dict(content), headers)
    elif kind == "slackwebhook":
        secret = (connection.password or extra.get("webhook_token") or "").lstrip("/")
        text = content["text"].replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")  # `<!channel>` would call everybody
        _post(f"{_address(connection)}/{secret}".rstrip("/"), {"text": text}, {})
    elif kind == "smtp":
        from airflow.providers.smtp.notifications.smtp import SmtpNotifier

        mail = SmtpNotifier(
            to=extra["to"], from_email=extra.get("from_email"), subject="{{ subject }}", smtp_conn_id=connection.conn_id,
            html_content=f"<pre>{html.escape(content['text'], quote=False)}</pre>",
        )  # fmt: skip
        mail.subject = content["text"].partition("\n")[0][:150]
        mail.template_fields = ()  # type: ignore[assignment]  # the text of a page may hold {{ }}: nothing of it is a template
        mail.notify(context)
    else:
        raise ValueError(f"connection type {kind!r}; expected http, smtp or slackwebhook")


def _address(connection: Any) -> str:
    """Scheme, host and port, and the path where the host has one."""
    host = str(connection.host or "").rstrip("/")
    if "://" in host:
        return host if not connection.port else f"{host}:{connection.port}"
    port = f":{connection.port}" if connection.port else ""
    return f"{connection.schema or ('https' if connection.port in (None, 443) else 'http')}://{host}{port}"


def _post(address: str, content: Mapping[str, str], headers: Mapping[str, str]) -> None:
    data = json.dumps(content).encode()
    request = urllib.request.Request(address, data=data, headers={"Content-Type": "application/json", **headers})
    if request.type not in ("http", "https"):
        raise ValueError(f"the address begins with {request.type}:; expected http or https")
    urllib.request.urlopen(request, timeout=TIMEOUT_S).close()


def _first_failure(context: Mapping[str, Any]) -> bool:
    """Whether no other task of this run has told of its failure yet. Kept beside the jobs; where that cannot be, each task tells."""
    run = context.get("dag_run")
    key = "\n".join([str(context["ti"].dag_id), str(context["ti"].run_id), str(getattr(run, "clear_number", 0) or 0)])
    place = PROJECT / (os.environ.get("CRAW4LLM_ROOT") or "artifacts") / "logs" / "told" / hashlib.sha256(key.encode()).hexdigest()[:24]
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        place.touch(exist_ok=False)
    except FileExistsError:
        return False
    except OSError:
        return True
    return True


def _connection(name: str) -> Any:
    from airflow.sdk import Connection

    with contextlib.suppress(Exception):  # there is none: nobody asked for word
        return Connection.get(name)
    return None


def _answers(ti: Any) -> list[str]:
    record: Any = getattr(ti, "xcom_pull", lambda **_: None)(task_ids=ti.task_id)
    try:
        return list(json.loads((Path(record["path"]) / "manifest.json").read_text())["notes"]["answers"])
    except (OSError, ValueError, KeyError, TypeError):
        return []
