"""The results page: what it shows is the report's, strangers see nothing, and crawled text in it is inert."""

import csv
import html
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import airflow_env
import pytest
from airflow.api_fastapi.core_api.security import get_user
from airflow.utils.db import initdb
from fastapi.testclient import TestClient

import results
import results_plugin

FINGERPRINT = "0123456789ab"
HOSTILE = '<script>alert(1)</script><img src=x onerror=alert(2)> javascript:alert(3) =HYPERLINK("http://x")'


class Admin:
    """A user whom the check of rights lets pass."""

    def get_id(self) -> str:
        return "1"


def manifest(stage: str, fingerprint: str, **more: Any) -> dict[str, Any]:
    content: dict[str, Any] = {
        "schema": 1, "stage": stage, "version": 1, "fingerprint": fingerprint, "config": {}, "inputs": {}, "counts": {}, "notes": {},
        "wall_time_s": 1.0, "finished": "2026-11-30T00:00:00+00:00", "machine": {"host": "h"}, "digest": "d" * 64, "files": [],
    }  # fmt: skip
    return content | more


def put(root: Path, stage: str, fingerprint: str, files: dict[str, str] | None = None, **more: Any) -> Path:
    folder = root / stage / fingerprint
    for name, text in (files or {}).items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    listed = [{"path": name, "size_bytes": len(text), "sha256": "", "volatile": False} for name, text in (files or {}).items()]
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "manifest.json").write_text(json.dumps(manifest(stage, fingerprint, files=listed, **more)))
    return folder


def table(rows: list[dict[str, Any]]) -> str:
    import io

    out = io.StringIO()
    writer = csv.DictWriter(out, list(rows[0]))
    writer.writeheader()
    writer.writerows(rows)
    return out.getvalue()


ARM = {
    "comparison": "Equal pages crawled", "replicates": 2, "pages_crawled": 400, "fetches": 1420, "mean_score_kept": 0.94, "core_v1": "",
    "core_v2": "", "missing": "",
}  # fmt: skip
ARMS = [
    ARM | {"arm": "quality/equal_pages", "bits_per_byte_mean": 2.5142},
    ARM | {"arm": HOSTILE, "bits_per_byte_mean": 2.4942, "missing": HOSTILE},
]
PAIR = {
    "heldout": "all", "comparison": "Equal pages crawled", "arm": "random/equal_pages", "against": "quality/equal_pages",
    "verdict": "better",
    "difference_bits_per_byte": -0.02, "interval_low": -0.043, "interval_high": -0.003, "replicates": 2,
}  # fmt: skip
SUMMARY = {
    "schema": 1, "measure": {"name": "bits_per_byte"}, "answers": [{"heading": "At equal pages", "text": HOSTILE}],
    "arms": [
        {
            "rank": 1, "arm": "random/equal_pages", "comparison": "Equal pages crawled", "replicates": [0, 1], "missing": "",
            "costs": {"pages_crawled": 400, "fetches": 400},
            "metrics": {"bits_per_byte": {"mean": 2.4942, "low": 2.48, "high": 2.51}, "core_v1": {"mean": 0.1748}},
        },
        {
            "rank": None, "arm": "oracle", "comparison": "Oracle", "replicates": 0, "missing": "no results", "costs": {}, "metrics": {},
        },
    ],
    "verdicts": [
        {
            "metric": "bits_per_byte", "heldout": "all", "comparison": "Equal pages", "arm": "random/equal_pages",
            "against": "quality/equal_pages", "verdict": "can't tell", "difference": -0.02, "low": -0.043, "high": 0.003, "replicates": 2,
        },
        {"metric": "core_v1"},
    ],
}  # fmt: skip


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("CRAW4LLM_ROOT", str(tmp_path))
    counts = {"pairs_decided": {"value": 1, "unit": "pairs"}, "pairs_undecided": {"value": 0, "unit": "pairs"}}
    files = {
        "report.html": f"<h1>report</h1>{HOSTILE}",
        "tables/arms.csv": table(ARMS),
        "tables/pairs.csv": table([PAIR]),
        "x.csv": HOSTILE,
    }
    put(
        tmp_path, "report", FINGERPRINT, files, counts=counts, config={"title": HOSTILE, "question": "q"},
        notes={"answers": [f"At: {HOSTILE}"]},
    )  # fmt: skip
    stage = {"stage": "report", "fingerprint": FINGERPRINT}
    run = {
        "parameters": {"corpus": HOSTILE},
        "replicates": 2,
        "report": FINGERPRINT,
        "arms": {"0": {"quality": {"report": stage}}},
        "shared": {},
    }
    (tmp_path / "index").mkdir()
    (tmp_path / "index" / "tiny.json").write_text(json.dumps({"experiment": "tiny", "runs": [run]}))
    return tmp_path


@pytest.fixture
def client(root: Path) -> Iterator[TestClient]:
    initdb()
    app = results_plugin.app
    app.dependency_overrides = {d.dependency: lambda: Admin() for d in app.router.dependencies}
    yield TestClient(app, follow_redirects=False)
    app.dependency_overrides = {}


PAGES = ("/", "/experiment/tiny", f"/report/{FINGERPRINT}", f"/artifact/report/{FINGERPRINT}", f"/artifact/report/{FINGERPRINT}/file/x.csv")


def test_the_whole_application_needs_a_login(root: Path) -> None:
    assert get_user in [d.dependency for d in results_plugin.app.router.dependencies]
    client = TestClient(results_plugin.app, follow_redirects=False, raise_server_exceptions=False)
    for path in (*PAGES, "/task?dag_id=a&run_id=b&task_id=c", "/run?dag_id=a&run_id=b"):
        assert client.get(path).status_code == 401, path
    assert client.get("/openapi.json").status_code == client.get("/docs").status_code == 404


@pytest.mark.parametrize("path", ["/", "/experiment/tiny", f"/artifact/report/{FINGERPRINT}"])
def test_crawled_text_is_text(client: TestClient, path: str) -> None:
    answer = client.get(path)
    assert answer.status_code == 200
    tags = set(re.findall(r"<(script|img)\b[^>]*>", answer.text))
    assert "img" not in tags and "alert(1)</script>" not in answer.text
    assert html.escape(HOSTILE, quote=False)[:30] in answer.text or "&lt;script&gt;" in answer.text
    assert not re.search(r"(href|src)=[\"']?\s*javascript:", answer.text, re.I)
    policy = answer.headers["content-security-policy"]
    nonce = re.search(r"script-src 'nonce-([^']+)'", policy)
    assert nonce and "default-src 'none'" in policy and "unsafe" not in policy
    assert all(f'nonce="{nonce[1]}"' in tag for tag in re.findall(r"<script[^>]*>", answer.text))


def test_a_report_has_an_origin_of_its_own(client: TestClient) -> None:
    answer = client.get(f"/report/{FINGERPRINT}")
    assert answer.text.startswith("<h1>report</h1>")
    policy = answer.headers["content-security-policy"]
    assert policy.startswith("sandbox allow-scripts;") and "allow-same-origin" not in policy and "default-src 'none'" in policy
    assert '<iframe sandbox="allow-scripts"' in client.get("/experiment/tiny").text


def test_a_file_is_a_download_and_only_what_the_manifest_lists_can_be_had(client: TestClient) -> None:
    answer = client.get(f"/artifact/report/{FINGERPRINT}/file/x.csv")
    assert answer.headers["content-disposition"].startswith("attachment") and answer.headers["x-content-type-options"] == "nosniff"
    for path in ("../../../index/tiny.json", "..%2f..%2findex%2ftiny.json", "/etc/passwd", "nothing"):
        assert client.get(f"/artifact/report/{FINGERPRINT}/file/{path}").status_code == 404, path
    for path in (
        "/artifact/report/zz",
        "/artifact/..%2f/0123456789ab",
        "/report/0123456789ac",
        "/experiment/nope",
        "/experiment/tiny?report=zz",
    ):
        assert client.get(path).status_code == 404, path


def test_the_leaderboard_is_the_reports(client: TestClient, root: Path) -> None:
    found = results.report(FINGERPRINT, root)
    assert [(row.rank, row.bits_per_byte, row.core_v1) for row in found.rows] == [(1, 2.4942, None), (2, 2.5142, None)]
    text = client.get("/experiment/tiny").text
    assert "2.4942" in text and "-0.0430 to -0.0030" in text and ">better\n" in text


def test_a_report_with_a_summary_is_read_from_it(client: TestClient, root: Path) -> None:
    (root / "report" / FINGERPRINT / "summary.json").write_text(json.dumps(SUMMARY))
    found = results.report(FINGERPRINT, root)
    assert [(row.rank, row.arm, row.replicates, row.low, row.core_v1) for row in found.rows] == [
        (1, "random/equal_pages", 2, 2.48, 0.1748), (None, "oracle", 0, None, None),
    ]  # fmt: skip
    assert [v.verdict for v in found.verdicts] == ["can't tell"]
    text = client.get("/experiment/tiny").text
    assert "2.4800 to 2.5100" in text and "no results" in text and "+0.0030" in text


def test_verdicts_stand_under_their_comparison_and_moments_are_readable(client: TestClient, root: Path) -> None:
    text = client.get("/experiment/tiny").text
    assert '<tr class="group"><th colspan="6">Equal pages crawled</tr>' in text and "finished 2026-11-30 00:00:00 UTC" in text
    assert "<small>Which crawl policy gives the better tiny" in client.get("/").text, "the question itself, not the word"


def test_a_tasks_artifact_shows_its_curves(client: TestClient, root: Path) -> None:
    lines = "".join(json.dumps({"step": i, "loss": 9.0 - i / 1000, "learning_rate": 0.1}) + "\n" for i in range(3000))
    put(root, "train", FINGERPRINT, {"metrics.jsonl": lines, "empty.jsonl": ""})
    curves = results.curves(results.artifact("train", FINGERPRINT, root))
    assert [c.title for c in curves] == ["training loss", "learning rate"] and len(curves[0].x) <= results.CURVE_POINTS
    assert curves[0].y[0] == pytest.approx(8.998) and curves[0].y[-1] == pytest.approx(6.003)
    assert client.get(f"/artifact/train/{FINGERPRINT}").text.count("<polyline") == 2


def test_a_run_that_has_no_report_yet_says_so(client: TestClient) -> None:
    for path in ("/run?dag_id=tiny&run_id=manual__1", "/task?dag_id=tiny&run_id=manual__1&task_id=corpus"):
        answer = client.get(path)
        assert answer.status_code == 200 and "not made" in answer.text.replace("has not made", "not made")


def test_a_missing_pool_is_said(client: TestClient) -> None:
    assert "The pool &#39;gpu&#39; is missing" in client.get("/").text


def test_the_plugin_offers_page_tab_links_and_check() -> None:
    plugin = results_plugin.Craw4LLMPlugin
    assert [(view["destination"], view["name"]) for view in plugin.external_views] == [("nav", "Crawl → quality"), ("dag_run", "Results")]
    assert plugin.fastapi_root_middlewares[0]["middleware"].__name__ == "TriggerCheck"
    ignored = (airflow_env.PROJECT / "plugins" / ".airflowignore").read_text().split()
    modules = {path.name for path in (airflow_env.PROJECT / "plugins").glob("*.py")}
    assert modules - set(ignored) == {"results_plugin.py"}, "Airflow imports every other file of the folder as a plugin"
