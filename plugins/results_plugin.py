"""The page "Crawl → quality" in Airflow's navigation, the report of a run as a tab of the run, and values of a trigger checked at the door.

    /craw4llm/                                all experiments
    /craw4llm/experiment/tiny                 leaderboard, verdicts, the report embedded, recorded runs
    /craw4llm/report/FINGERPRINT              the report itself
    /craw4llm/artifact/STAGE/FINGERPRINT      manifest, curves, files
    /craw4llm/task?dag_id=&run_id=&task_id=   the artifact of a task; the button on every stage's task leads here
    /craw4llm/run?dag_id=&run_id=             the report of a run

Everything needs the login of the UI: the application as a whole declares it. Text from crawled pages is in reports, manifests and tables:
pages are made by templates that escape, files are handed out as downloads that no browser renders, and a report is a document of its own
origin, with no access to this one's cookies, both by the frame's sandbox and by its own Content-Security-Policy.
"""

import itertools
import json
import logging
import secrets
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import quote

import jinja2
from airflow.api_fastapi.auth.managers.models.resource_details import AccessView
from airflow.api_fastapi.core_api.security import get_user, requires_access_view
from airflow.configuration import conf
from airflow.plugins_manager import AirflowPlugin
from fastapi import Depends, FastAPI, Query, Request
from fastapi.responses import FileResponse, HTMLResponse, RedirectResponse, Response
from markupsafe import Markup

import pools
import results
from craw4llm.errors import Craw4LLMError
from craw4llm.experiment import load, names
from doorbell import RingsAfterChanges
from one_writer import OneWriter
from stage_operator import ArtifactLink, artifact_root
from trigger_check import TriggerCheck

log = logging.getLogger(__name__)

PROJECT = Path(__file__).resolve().parent.parent
PREFIX = "/craw4llm"
POOLS = ("cpu", "gpu")
REPORT_POLICY = (
    "sandbox allow-scripts; default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:; font-src data:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'self'"
)

app = FastAPI(
    title="Crawl → quality",
    docs_url=None,
    redoc_url=None,
    openapi_url=None,
    dependencies=[Depends(get_user), Depends(requires_access_view(AccessView.PLUGINS))],
)


def root() -> Path:
    return artifact_root(PROJECT)


def number(value: Any, digits: int = 0) -> str:
    if value is None:
        return "—"
    return f"{value:,}" if isinstance(value, int) else f"{value:.{digits}g}" if digits == 6 else f"{value:,.{digits}f}"


templates = jinja2.Environment(
    loader=jinja2.FileSystemLoader(Path(__file__).with_name("pages")), autoescape=True, undefined=jinja2.StrictUndefined
)
templates.filters["number"] = number
templates.filters["signed"] = lambda value: "—" if value is None else f"{value:+.4f}"
templates.filters["moment"] = lambda text: str(text)[:19].replace("T", " ") + (" UTC" if str(text).endswith("+00:00") else "")
templates.filters["groupby_pair"] = lambda verdicts: itertools.groupby(verdicts, lambda v: (v.comparison, v.heldout))
templates.filters["pretty"] = lambda value: json.dumps(value, indent=2, ensure_ascii=False)


def page(name: str, title: str, path: list[tuple[str, str]], status: int = 200, **values: Any) -> HTMLResponse:
    """A page from a template. path: where one is, as (text, address) from the top."""
    nonce, above = secrets.token_urlsafe(16), airflow_root()
    text = templates.get_template(name).render(title=title, path=path, base=above + PREFIX, root=above, nonce=nonce, **values)
    policy = (
        f"default-src 'none'; style-src 'nonce-{nonce}'; script-src 'nonce-{nonce}'; img-src 'self' data:; frame-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'self'"
    )
    return HTMLResponse(text, status, {"Content-Security-Policy": policy, "X-Content-Type-Options": "nosniff", "Cache-Control": "no-store"})


def airflow_root() -> str:
    """Path that Airflow is served under, without the last slash."""
    base = conf.get("api", "base_url", fallback="")
    return "/" + base.partition("://")[2].partition("/")[2].strip("/") if base.partition("://")[2].partition("/")[2].strip("/") else ""


@app.exception_handler(Craw4LLMError)
def refused(request: Request, error: Craw4LLMError) -> HTMLResponse:
    return page("message.html.j2", "Not found", [], 404, text=str(error))


@app.get("/")
def index() -> HTMLResponse:
    found = []
    for name in results.experiments(root()):
        runs = results.runs(name, root())
        done = next((run for run in runs if run.ready), None)
        report = results.report(done.report, root()) if done else None
        best = next((row for row in report.rows if row.bits_per_byte is not None), None) if report else None
        question = results.about(name, root())[0]
        found.append(
            {"name": name, "question": question, "run": runs[0] if runs else None, "report": report, "best": best, "dag": dag_of(name)}
        )
    found.sort(key=lambda e: (e["run"] is None,))
    return page("index.html.j2", "Crawl → quality", [], experiments=found, warnings=pool_warnings())


@app.get("/experiment/{name}")
def experiment(name: str, report: str = "") -> HTMLResponse:
    if name not in results.experiments(root()):
        raise Craw4LLMError(f"there is no experiment {name[:80]!r}")
    runs = results.runs(name, root())
    chosen = report or next((run.report for run in runs if run.ready), "")
    doc = results.about(name, root())[1]
    dag = dag_of(name)
    return page(
        "experiment.html.j2",
        name,
        [(name, "")],
        doc=doc,
        runs=runs,
        dag=dag,
        reruns=dag == name and name in names() and bool(load(name).schedule),
        report=results.report(chosen, root()) if chosen else None,
    )


@app.get("/report/{fingerprint}")
def report(fingerprint: str) -> Response:
    path = results.file_of(results.artifact("report", fingerprint, root()), "report.html")
    headers = {"Content-Security-Policy": REPORT_POLICY, "X-Content-Type-Options": "nosniff", "Referrer-Policy": "no-referrer"}
    return HTMLResponse(path.read_bytes(), headers=headers)


@app.get("/artifact/{stage}/{fingerprint}")
def artifact(stage: str, fingerprint: str) -> HTMLResponse:
    found = results.artifact(stage, fingerprint, root())
    here = f"{airflow_root()}{PREFIX}/artifact/{stage}/{fingerprint}"
    drawn = [{"title": curve.title, "svg": svg(curve)} for curve in results.curves(found)]
    return page(
        "artifact.html.j2", f"{stage} {fingerprint}", [(stage, ""), (fingerprint, "")], manifest=found.manifest, here=here, curves=drawn,
        scores=results.scores(found),
    )  # fmt: skip


@app.get("/artifact/{stage}/{fingerprint}/file/{name:path}")
def file(stage: str, fingerprint: str, name: str) -> FileResponse:
    """A download: whatever is in it, no browser shows it."""
    path = results.file_of(results.artifact(stage, fingerprint, root()), name)
    headers = {"X-Content-Type-Options": "nosniff", "Content-Security-Policy": "sandbox; default-src 'none'"}
    return FileResponse(path, media_type="application/octet-stream", filename=f"{stage}-{fingerprint}-{path.name}", headers=headers)


@app.get("/task", response_model=None)
def task(dag_id: str, run_id: str, task_id: str, map_index: Annotated[int, Query(ge=-1)] = -1) -> Response:
    record = made_by(dag_id, run_id, task_id, map_index)
    if record is None:
        return page("message.html.j2", task_id, [], text="This task has not made its artifact yet.")
    return RedirectResponse(f"{airflow_root()}{PREFIX}/artifact/{record['stage']}/{record['fingerprint']}")


@app.get("/run", response_model=None)
def run(dag_id: str, run_id: str) -> Response:
    record = made_by(dag_id, run_id, "report", -1)
    if record is None:
        return page("message.html.j2", "Report", [], text="The report of this run is not made yet.")
    found = results.report(record["fingerprint"], root())
    name = next((n for n in results.experiments(root()) if any(r.report == found.fingerprint for r in results.runs(n, root()))), "")
    if name:
        return RedirectResponse(f"{airflow_root()}{PREFIX}/experiment/{quote(name)}?report={found.fingerprint}")
    return RedirectResponse(f"{airflow_root()}{PREFIX}/report/{found.fingerprint}")


def made_by(dag_id: str, run_id: str, task_id: str, map_index: int) -> dict[str, Any] | None:
    """What a task returned, if that names an artifact."""
    from airflow.models.xcom import XComModel
    from airflow.utils.session import create_session

    for wanted in (run_id, run_id.replace(" ", "+")):  # a plus sign that somebody did not quote
        with create_session() as session:
            query = XComModel.get_many(run_id=wanted, key="return_value", task_ids=task_id, dag_ids=dag_id, map_indexes=map_index, limit=1)
            row = session.scalars(query).first()
            if row is not None:
                value = XComModel.deserialize_value(row)
                value = json.loads(value) if isinstance(value, str) else value
                return value if isinstance(value, dict) and {"stage", "fingerprint"} <= set(value) else None
    return None


def dag_of(name: str) -> str:
    """The DAG that runs an experiment; those that the form has kept belong to the form."""
    declared = names()
    return name if name in declared else next((n for n in sorted(declared, key=len, reverse=True) if name.startswith(f"{n}_")), "")


def pool_warnings() -> list[str]:
    """A task whose pool is missing or has no slot waits for ever, without a word."""
    return pools.lacking(dict.fromkeys(POOLS, pools.Need(1)), pools.read())[0]


def svg(curve: results.Curve, width: int = 760, height: int = 270) -> Markup:
    """A line in a frame, with the smallest and largest value at each axis."""
    left, bottom, top, right = 80, 40, 28, 10
    x0, x1, y0, y1 = min(curve.x), max(curve.x), min(curve.y), max(curve.y)

    def place(x: float, y: float) -> str:
        across = left + (x - x0) / ((x1 - x0) or 1) * (width - left - right)
        return f"{across:.1f},{height - bottom - (y - y0) / ((y1 - y0) or 1) * (height - bottom - top):.1f}"

    points = " ".join(place(x, y) for x, y in zip(curve.x, curve.y, strict=True))
    frame = f"M{left} {top}V{height - bottom}H{width - right}"
    return Markup(
        '<svg viewBox="0 0 {w} {h}" width="{w}" height="{h}" role="img" aria-label="{title}" font-size="12" fill="currentColor">'
        '<path d="{frame}" fill="none" stroke="currentColor" stroke-opacity=".4"/>'
        '<polyline points="{points}" fill="none" stroke="#3b78d8" stroke-width="1.5"/>'
        '<text x="{tick}" y="{top}" text-anchor="end">{y1}</text><text x="{tick}" y="{low}" text-anchor="end">{y0}</text>'
        '<text x="{left}" y="{under}">{x0}</text><text x="{end}" y="{under}" text-anchor="end">{x1}</text>'
        '<text x="{middle}" y="{under}" text-anchor="middle">{x_label}</text><text x="{left}" y="16">{y_label}</text></svg>'
    ).format(
        w=width, h=height, title=curve.title, frame=frame, points=points, tick=left - 6, top=top + 8, low=height - bottom, left=left,
        end=width - right, under=height - bottom + 18, middle=(left + width) // 2, x_label=curve.x_label, y_label=curve.y_label,
        y0=tick(y0), y1=tick(y1), x0=tick(x0), x1=tick(x1),
    )  # fmt: skip


def tick(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


class Craw4LLMPlugin(AirflowPlugin):
    name = "craw4llm"
    fastapi_apps: list[dict[str, Any]] = [{"app": app, "url_prefix": PREFIX, "name": "Crawl → quality"}]  # noqa: RUF012
    fastapi_root_middlewares: list[dict[str, Any]] = [  # noqa: RUF012
        {"middleware": TriggerCheck, "name": "craw4llm trigger check"},
        {"middleware": pools.PoolsAnswer, "name": "craw4llm pools"},
        {"middleware": OneWriter, "name": "craw4llm one writer"},
        {"middleware": RingsAfterChanges, "name": "craw4llm doorbell"},
    ]
    external_views: list[dict[str, Any]] = [  # noqa: RUF012
        {
            "name": "Crawl → quality",
            "href": f"{PREFIX}/",
            "destination": "nav",
            "url_route": "crawl-to-quality",
            "nav_top_level": True,
        },
        {
            "name": "Results",
            "href": f"{PREFIX}/run?dag_id={{DAG_ID}}&run_id={{RUN_ID}}",
            "destination": "dag_run",
            "url_route": "crawl-to-quality-run",
        },
    ]
    operator_extra_links: list[Any] = [ArtifactLink()]  # noqa: RUF012
