"""Word of a run's end goes where a connection says, says what happened, and never fails a run."""

import email.message
import http.server
import json
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import airflow_env
import pytest

import notify
from notify import RunNotifier

sys.path.insert(0, str(airflow_env.PROJECT / "scripts"))
import airflow_trial


class Connection(SimpleNamespace):
    conn_id, conn_type, password, schema = "craw4llm_notify", "http", None, "http"
    extra_dejson: dict[str, Any] = {}  # noqa: RUF012


@pytest.fixture
def hook() -> Iterator[tuple[int, list[dict[str, Any]]]]:
    got: list[dict[str, Any]] = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            content = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            got.append(content | {"path": self.path, "auth": self.headers.get("Authorization")})
            self.send_response(204)
            self.end_headers()

        def log_message(self, *args: Any) -> None:
            pass

    server = http.server.HTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server.server_port, got
    server.shutdown()
    server.server_close()


@pytest.fixture
def mails() -> Iterator[tuple[int, list[email.message.EmailMessage]]]:
    with airflow_trial.Mails() as server:
        yield server.server_address[1], server.got


LOG = "http://airflow/dags/tiny/runs/manual__1/tasks/report"


def context(error: Exception | None = None, record: Any = None, cleared: int = 0) -> dict[str, Any]:
    ti = SimpleNamespace(dag_id="tiny", run_id="manual__1", task_id="report", log_url=LOG, xcom_pull=lambda task_ids: record)
    return {"ti": ti, "dag": None, "dag_run": SimpleNamespace(clear_number=cleared)} | ({"exception": error} if error else {})


def use(monkeypatch: pytest.MonkeyPatch, connection: Any) -> None:
    monkeypatch.setattr(notify, "_connection", lambda name: connection)


@pytest.fixture(autouse=True)
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CRAW4LLM_ROOT", str(tmp_path / "artifacts"))


def test_it_is_off_where_there_is_no_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, None)
    monkeypatch.setattr(notify, "send", lambda *args: pytest.fail("something was sent"))
    RunNotifier("failed")(context(ValueError("x")))


def test_a_failure_says_its_cause_and_where_its_log_is(monkeypatch: pytest.MonkeyPatch, hook: tuple[int, list[dict[str, Any]]]) -> None:
    port, got = hook
    use(monkeypatch, Connection(host="127.0.0.1", port=port, extra_dejson={"path": "/T/B"}, password="key"))
    RunNotifier("failed")(context(ValueError("killed by signal 9 {{ 1 + 1 }}")))
    (message,) = got
    assert message["text"] == f"tiny: report failed: killed by signal 9 {{{{ 1 + 1 }}}}\nlog: {LOG}"
    assert (message["state"], message["path"], message["auth"], message["url"]) == ("failed", "/T/B", "Bearer key", LOG)


def test_a_task_that_was_given_up_has_failed_though_it_left_no_error(
    monkeypatch: pytest.MonkeyPatch, hook: tuple[int, list[dict[str, Any]]]
) -> None:
    """Airflow's DAG processor calls back without `exception` when a task's supervisor is gone."""
    port, got = hook
    use(monkeypatch, Connection(host="127.0.0.1", port=port))
    RunNotifier("failed")(context())
    assert got[0]["state"] == "failed" and "report failed: its process was killed" in got[0]["text"]


def test_a_run_that_fails_is_told_of_once_and_again_when_it_was_cleared(
    monkeypatch: pytest.MonkeyPatch, hook: tuple[int, list[dict[str, Any]]]
) -> None:
    port, got = hook
    use(monkeypatch, Connection(host="127.0.0.1", port=port))
    for cleared in (0, 0, 1, 1):
        RunNotifier("failed")(context(ValueError("x"), cleared=cleared))
    assert len(got) == 2


def test_a_report_says_its_answers(monkeypatch: pytest.MonkeyPatch, hook: tuple[int, list[dict[str, Any]]], tmp_path: Path) -> None:
    port, got = hook
    (tmp_path / "manifest.json").write_text(json.dumps({"notes": {"answers": ["quality beats random by 0.02"]}}))
    use(monkeypatch, Connection(host="127.0.0.1", port=port))
    RunNotifier("success")(context(record={"path": str(tmp_path)}))
    assert "quality beats random by 0.02" in got[0]["text"] and got[0]["state"] == "success"
    assert "results: http://airflow/craw4llm/run?dag_id=tiny&run_id=manual__1\n" in got[0]["text"]


def test_slack_gets_its_webhooks_format_and_nobody_is_called_by_a_text(
    monkeypatch: pytest.MonkeyPatch, hook: tuple[int, list[dict[str, Any]]]
) -> None:
    port, got = hook
    use(monkeypatch, Connection(conn_type="slackwebhook", host=f"http://127.0.0.1:{port}/services", port=None, password="T0/B0/key"))
    RunNotifier("failed")(context(ValueError("<!channel> & <http://x|y>")))
    (message,) = got
    assert set(message) == {"text", "path", "auth"} and (message["path"], message["auth"]) == ("/services/T0/B0/key", None)
    assert "failed: &lt;!channel&gt; &amp; &lt;http://x|y&gt;\n" in message["text"]


def test_a_mail_arrives(monkeypatch: pytest.MonkeyPatch, mails: tuple[int, list[email.message.EmailMessage]]) -> None:
    """By the SMTP provider, to a server of this test; the connection is Airflow's own."""
    port, got = mails
    extra = {"to": "lab@example.org, b@example.org", "from_email": "airflow@example.org", "disable_ssl": True, "disable_tls": True}
    stored = {"conn_type": "smtp", "host": "127.0.0.1", "port": port, "extra": extra}
    monkeypatch.setenv("AIRFLOW_CONN_CRAW4LLM_NOTIFY", json.dumps(stored))
    RunNotifier("failed")(context(ValueError("<b>{{ 1 + 1 }}</b>")))
    (mail,) = got
    assert (mail["Subject"], mail["From"]) == ("tiny: report failed: <b>{{ 1 + 1 }}</b>", "airflow@example.org")
    assert "lab@example.org" in mail["To"] and "b@example.org" in mail["To"]
    body = mail.get_body(("html",))
    assert body is not None and body.get_content().strip() == (
        f"<pre>tiny: report failed: &lt;b&gt;{{{{ 1 + 1 }}}}&lt;/b&gt;\nlog: {LOG}</pre>"
    )


def test_a_notifier_that_cannot_send_fails_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = (
        {"host": "127.0.0.1", "port": 1},
        {"host": "x", "port": 1, "conn_type": "carrier pigeon"},
        {"host": "file:///etc", "port": None},
    )
    for connection in (Connection(**given) for given in wrong):
        use(monkeypatch, connection)
        RunNotifier("success")(context())
