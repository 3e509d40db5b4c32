"""Sets Airflow up for these tests before they import it."""

import airflow_env  # noqa: F401
