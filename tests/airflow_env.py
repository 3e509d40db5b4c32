"""A throw-away AIRFLOW_HOME for this test process. Import it before anything of Airflow: Airflow reads its settings when it is imported."""

import atexit
import os
import shutil
import sys
import tempfile
from pathlib import Path

PROJECT = Path(__file__).resolve().parent.parent
HOME = Path(tempfile.mkdtemp(prefix="craw4llm-airflow-"))
atexit.register(shutil.rmtree, HOME, ignore_errors=True)

SETTINGS = {
    "AIRFLOW_HOME": str(HOME),
    "AIRFLOW_CONFIG": str(HOME / "airflow.cfg"),
    "AIRFLOW__CORE__DAGS_FOLDER": str(PROJECT / "dags"),
    "AIRFLOW__CORE__PLUGINS_FOLDER": str(PROJECT / "plugins"),
    "AIRFLOW__CORE__LOAD_EXAMPLES": "False",
    "AIRFLOW__CORE__HOSTNAME_CALLABLE": "socket.gethostname",
    "AIRFLOW__DATABASE__SQL_ALCHEMY_CONN": f"sqlite:///{HOME / 'airflow.db'}",
}
os.environ.update(SETTINGS)
sys.path.append(str(PROJECT / "plugins"))  # as Airflow does when it is imported, which not every test of a plugin does
