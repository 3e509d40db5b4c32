"""Exit code 0 where a part of Airflow is well: `python healthcheck.py api-server|scheduler|dag_processor|triggerer|worker`.

What the api-server knows of the others' heartbeats is asked over HTTP, which is cheap; Airflow's own commands take 5 s of a processor each
time. A worker is asked itself, through the broker. Standard library only, but for the worker.
"""

import json
import os
import socket
import sys
import urllib.request

API = os.environ.get("CRAW4LLM_API", "http://api-server:8080")


def main() -> int:
    part = sys.argv[1]
    if part == "worker":
        from airflow.providers.celery.executors.celery_executor import app

        name = f"celery@{socket.gethostname()}"
        return 0 if app.control.inspect(destination=[name], timeout=20).ping() else 1
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(f"{API}/api/v2/monitor/health", timeout=10) as answer:
        health = json.load(answer)
    if part == "api-server":
        return 0 if health["metadatabase"]["status"] == "healthy" else 1
    return 0 if health[part]["status"] == "healthy" else 1


if __name__ == "__main__":
    sys.exit(main())
