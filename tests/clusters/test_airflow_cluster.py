"""scripts/airflow_cluster.py: a trial outlasts an api-server that a busy machine keeps from answering."""

import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import airflow_cluster
import pytest
from airflow_cluster import Cluster


class Busy(BaseHTTPRequestHandler):
    """Answers no question twice, and then every one."""

    asked = 0

    def do_GET(self) -> None:
        type(self).asked += 1
        if type(self).asked <= 2:
            self.close_connection = True
            return
        found = self.path.endswith("/run")
        self.send_response(200 if found else 404)
        self.end_headers()
        self.wfile.write(b'{"state": "success"}')

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    Busy.asked = 0
    server = ThreadingHTTPServer(("127.0.0.1", 0), Busy)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    cluster = Cluster(tmp_path, executor="LocalExecutor")
    cluster.address = f"http://127.0.0.1:{server.server_port}"
    cluster.parts["api-server"] = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    yield cluster
    cluster.parts["api-server"].kill()
    cluster.parts["api-server"].wait()
    server.shutdown()
    server.server_close()


def test_a_server_that_does_not_answer_is_asked_again(cluster: Cluster) -> None:
    assert cluster.wait_for_run("tiny", "run", 60) == "success" and Busy.asked == 3


def test_one_that_says_no_is_not(cluster: Cluster) -> None:
    Busy.asked = 2
    with pytest.raises(OSError, match="404"):
        cluster.run_state("tiny", "another")
    assert Busy.asked == 3


def test_nor_one_that_has_ended_or_never_answers(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    Busy.asked = -1000
    monkeypatch.setattr(airflow_cluster, "READY_WITHIN_S", 2.0)
    with pytest.raises(OSError, match="closed connection"):
        cluster.run_state("tiny", "run")
    before = Busy.asked
    cluster.parts["api-server"].kill()
    cluster.parts["api-server"].wait()
    with pytest.raises(OSError, match="closed connection"):
        cluster.run_state("tiny", "run")
    assert Busy.asked == before + 1
