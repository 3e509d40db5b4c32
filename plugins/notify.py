"""Word of a run's end: its verdict, or what failed and where its log is. Off until a connection says where to.

    airflow connections add craw4llm_notify --conn-type http --conn-host hooks.example.org --conn-schema https \\
        --conn-extra '{"path": "/T/B"}'
    airflow connections add craw4llm_notify --conn-type smtp ... \\
        --conn-extra '{"to": "lab@example.org", "from_email": "airflow@example.org"}'

The connection's id is `craw4llm_notify`, or what $CRAW4LLM_NOTIFY names. Its type chooses the notifier: smtp (the SMTP provider's),
slackwebhook (the Slack provider's, where installed), http: the message as JSON ({"text", "state", "dag_id", "run_id", "url"}, which Slack,
Mattermost and Teams read) posted to host and path. A notifier that fails is a line in the log, never a failed run.
"""

import json
import os
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from airflow.sdk import BaseNotifier

DEFAULT_CONNECTION = "craw4llm_notify"
TIMEOUT_S = 15


class RunNotifier(BaseNotifier):
    """For on_failure_callback of every task, and on_success_callback of a report's."""

    def notify(self, context: Any) -> None:
        connection = _connection(os.environ.get("CRAW4LLM_NOTIFY") or DEFAULT_CONNECTION)
        if connection is None:
            return
        try:
            send(connection, message(context), context)
        except Exception as error:
            self.log.warning("could not notify by %s: %s", connection.conn_id, error)


def message(context: Mapping[str, Any]) -> dict[str, str]:
    """text, state, dag_id, run_id, url."""
    ti = context["ti"]
    error = context.get("exception")
    where = {"dag_id": str(ti.dag_id), "run_id": str(ti.run_id), "url": str(getattr(ti, "log_url", "") or "")}
    if error is not None:
        cause = str(error).strip()[:1500]
        return {"text": f"{ti.dag_id}: {ti.task_id} failed: {cause}\nlog: {where['url']}", "state": "failed", **where}
    answers = _answers(ti)
    text = "\n".join([f"{ti.dag_id}: the report is ready.", *answers, f"log: {where['url']}"])
    return {"text": text, "state": "success", **where}


def send(connection: Any, content: Mapping[str, str], context: Any) -> None:
    kind, extra = connection.conn_type, connection.extra_dejson
    if kind == "http":
        scheme = connection.schema or ("https" if connection.port in (None, 443) else "http")
        port = f":{connection.port}" if connection.port else ""
        address = f"{scheme}://{connection.host}{port}{extra.get('path', '/')}"
        request = urllib.request.Request(address, data=json.dumps(dict(content)).encode(), headers={"Content-Type": "application/json"})
        if connection.password:
            request.add_header("Authorization", f"Bearer {connection.password}")
        urllib.request.urlopen(request, timeout=TIMEOUT_S).close()
    elif kind == "smtp":
        from airflow.providers.smtp.notifications.smtp import SmtpNotifier

        subject = content["text"].partition("\n")[0][:150]
        text = content["text"].replace("&", "&amp;").replace("<", "&lt;")
        mail = SmtpNotifier(
            to=extra["to"], from_email=extra.get("from_email"), subject="{{ subject }}", html_content=f"<pre>{text}</pre>",
            smtp_conn_id=connection.conn_id,
        )  # fmt: skip
        mail.subject, mail.template_fields = subject, ()  # type: ignore[assignment]  # the text of a page may hold {{ }}: nothing of it is a template
        mail.notify(context)
    elif kind == "slackwebhook":
        from airflow.providers.slack.hooks.slack_webhook import SlackWebhookHook

        SlackWebhookHook(slack_webhook_conn_id=connection.conn_id).send(text=content["text"])
    else:
        raise ValueError(f"connection type {kind!r}; expected http, smtp or slackwebhook")


def _connection(name: str) -> Any:
    from airflow.sdk import Connection

    try:
        return Connection.get(name)
    except Exception:  # there is none: nobody asked for word
        return None


def _answers(ti: Any) -> list[str]:
    record: Any = getattr(ti, "xcom_pull", lambda **_: None)(task_ids=ti.task_id)
    try:
        return list(json.loads((Path(record["path"]) / "manifest.json").read_text())["notes"]["answers"])
    except (OSError, ValueError, KeyError, TypeError):
        return []
