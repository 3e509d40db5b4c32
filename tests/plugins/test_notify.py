"""Word of a run's end goes where a connection says, says what happened, and never fails a run."""

import http.server
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import notify
from notify import RunNotifier


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


def context(error: Exception | None = None, record: Any = None) -> dict[str, Any]:
    ti = SimpleNamespace(
        dag_id="tiny", run_id="manual__1", task_id="report", log_url="http://airflow/log", xcom_pull=lambda task_ids: record
    )
    return {"ti": ti, "dag": None} | ({"exception": error} if error else {})


def use(monkeypatch: pytest.MonkeyPatch, connection: Any) -> None:
    monkeypatch.setattr(notify, "_connection", lambda name: connection)


def test_it_is_off_where_there_is_no_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, None)
    monkeypatch.setattr(notify, "send", lambda *args: pytest.fail("something was sent"))
    RunNotifier()(context(ValueError("x")))


def test_a_failure_says_its_cause_and_where_its_log_is(monkeypatch: pytest.MonkeyPatch, hook: tuple[int, list[dict[str, Any]]]) -> None:
    port, got = hook
    use(monkeypatch, Connection(host="127.0.0.1", port=port, extra_dejson={"path": "/T/B"}, password="key"))
    RunNotifier()(context(ValueError("killed by signal 9 {{ 1 + 1 }}")))
    (message,) = got
    assert message["text"] == "tiny: report failed: killed by signal 9 {{ 1 + 1 }}\nlog: http://airflow/log"
    assert (message["state"], message["path"], message["auth"], message["url"]) == ("failed", "/T/B", "Bearer key", "http://airflow/log")


def test_a_report_says_its_answers(monkeypatch: pytest.MonkeyPatch, hook: tuple[int, list[dict[str, Any]]], tmp_path: Path) -> None:
    port, got = hook
    (tmp_path / "manifest.json").write_text(json.dumps({"notes": {"answers": ["quality beats random by 0.02"]}}))
    use(monkeypatch, Connection(host="127.0.0.1", port=port))
    RunNotifier()(context(record={"path": str(tmp_path)}))
    assert "quality beats random by 0.02" in got[0]["text"] and got[0]["state"] == "success"


def test_a_notifier_that_cannot_send_fails_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    for connection in (Connection(host="127.0.0.1", port=1), Connection(host="x", port=1, conn_type="carrier pigeon")):
        use(monkeypatch, connection)
        RunNotifier()(context(ValueError("x")))
