"""Makes the secrets of a deployment, once: `python make_secrets.py FOLDER`. What is there is kept.

    FOLDER/airflow/   fernet_key, jwt_secret, api_secret_key, database_url, broker_url, result_backend, passwords.json (the login)
    FOLDER/worker/    broker_url, result_backend: all that a worker, and so a stage, can read
    FOLDER/postgres/  password
    FOLDER/redis/     redis.conf (with its password)

Each folder is for one kind of service alone. Nothing is ever defaulted: every value is drawn here, and a set that is only half there is
refused. Results of tasks go through Redis, so that a worker needs no password of the database. Standard library only.
"""

import base64
import json
import os
import secrets
import sys
from collections.abc import Mapping
from pathlib import Path

MARK = "complete"
DRAWN = ("airflow", "postgres", "redis")
MODES = {"airflow": (0o700, 0o600), "worker": (0o700, 0o600)}  # folder, files; PostgreSQL and Redis read theirs as users of their own
OTHERS = (0o755, 0o644)


def main() -> None:
    root = Path(sys.argv[1])
    there = [name for name in DRAWN if (root / name / MARK).exists()]
    if there and len(there) < len(DRAWN):
        missing = ", ".join(name for name in DRAWN if name not in there)
        sys.exit(
            f"secrets: {missing} is missing, the others are there: they belong together. Put it back from your back-up, or delete all."
        )
    if not there:
        write(root, draw())
    if not (root / "worker" / MARK).exists():  # it holds copies; a deployment from before it existed had results in the database
        write(root, queue((root / "airflow" / "broker_url").read_text()))
    elif there:
        print("secrets: kept")
        return
    for name in (*DRAWN, "worker"):
        if (root / name).stat().st_uid == os.geteuid():
            (root / name).chmod(MODES.get(name, OTHERS)[0])
        (root / name / MARK).touch()
    print("secrets: made")


def draw() -> dict[str, str]:
    postgres, redis = secrets.token_urlsafe(32), secrets.token_urlsafe(32)
    database = os.environ.get("POSTGRES_ADDRESS", "postgres:5432")
    broker = os.environ.get("REDIS_ADDRESS", "redis:6379")
    user = os.environ.get("ADMIN_USER", "admin")
    return {
        "airflow/fernet_key": base64.urlsafe_b64encode(secrets.token_bytes(32)).decode(),
        "airflow/jwt_secret": secrets.token_urlsafe(64),
        "airflow/api_secret_key": secrets.token_urlsafe(32),
        "airflow/database_url": f"postgresql+psycopg2://airflow:{postgres}@{database}/airflow",
        "airflow/broker_url": f"redis://:{redis}@{broker}/0",
        "airflow/passwords.json": json.dumps({user: secrets.token_urlsafe(12)}),
        "postgres/password": postgres,
        # One server keeps what is queued, so it must reach the disk; and it must refuse rather than forget when memory is full.
        "redis/redis.conf": f"requirepass {redis}\nappendonly yes\nmaxmemory-policy noeviction\n",
    }


def queue(broker_url: str) -> dict[str, str]:
    results = broker_url.rsplit("/", 1)[0] + "/1"
    return {"airflow/result_backend": results, "worker/broker_url": broker_url, "worker/result_backend": results}


def write(root: Path, files: Mapping[str, str]) -> None:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        handle = os.open(root / name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, MODES.get(name.partition("/")[0], OTHERS)[1])
        with os.fdopen(handle, "w") as stream:
            stream.write(text)


if __name__ == "__main__":
    main()
