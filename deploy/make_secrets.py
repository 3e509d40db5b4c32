"""Makes the secrets of a deployment, once: `python make_secrets.py FOLDER`. What is there is kept.

    FOLDER/airflow/   fernet_key, jwt_secret, api_secret_key, database_url, broker_url, result_backend, passwords.json (the login)
    FOLDER/postgres/  password
    FOLDER/redis/     redis.conf (with its password)

Each folder is for one service alone. Nothing is ever defaulted: every value is drawn here, and a folder that is only half there is refused.
Standard library only.
"""

import base64
import json
import os
import secrets
import sys
from pathlib import Path

MARK = "complete"


def main() -> None:
    root = Path(sys.argv[1])
    folders = [root / name for name in ("airflow", "postgres", "redis")]
    there = [folder for folder in folders if (folder / MARK).exists()]
    if len(there) == len(folders):
        print("secrets: kept")
        return
    if there:
        missing = ", ".join(folder.name for folder in folders if folder not in there)
        sys.exit(
            f"secrets: {missing} is missing, the others are there: they belong together. Put it back from your back-up, or delete all."
        )
    postgres, redis = secrets.token_urlsafe(32), secrets.token_urlsafe(32)
    database = os.environ.get("POSTGRES_ADDRESS", "postgres:5432")
    broker = os.environ.get("REDIS_ADDRESS", "redis:6379")
    user = os.environ.get("ADMIN_USER", "admin")
    files = {
        "airflow/fernet_key": base64.urlsafe_b64encode(secrets.token_bytes(32)).decode(),
        "airflow/jwt_secret": secrets.token_urlsafe(64),
        "airflow/api_secret_key": secrets.token_urlsafe(32),
        "airflow/database_url": f"postgresql+psycopg2://airflow:{postgres}@{database}/airflow",
        "airflow/result_backend": f"db+postgresql+psycopg2://airflow:{postgres}@{database}/airflow",
        "airflow/broker_url": f"redis://:{redis}@{broker}/0",
        "airflow/passwords.json": json.dumps({user: secrets.token_urlsafe(12)}),
        "postgres/password": postgres,
        # One server keeps what is queued, so it must reach the disk; and it must refuse rather than forget when memory is full.
        "redis/redis.conf": f"requirepass {redis}\nappendonly yes\nmaxmemory-policy noeviction\n",
    }
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        # postgres and redis read theirs under a user of their own; nothing else mounts those folders
        mode = 0o600 if name.startswith("airflow/") else 0o644
        handle = os.open(root / name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, mode)
        with os.fdopen(handle, "w") as stream:
            stream.write(text)
    for folder in folders:
        folder.chmod(0o700 if folder.name == "airflow" else 0o755)
        (folder / MARK).touch()
    print("secrets: made")


if __name__ == "__main__":
    main()
