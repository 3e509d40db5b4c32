#!/usr/bin/env python
"""Tries on a running Airflow what tests with stand-ins cannot show: parts, approval by a click, pools, word of a run's end, a schedule, a
backfill, news of a corpus.

    python scripts/airflow_trial.py [STEP ...] [--keep FOLDER]     some ten minutes on two quiet cores; CHROMIUM names the browser

Starts a server of its own (LocalExecutor, a free port, a temporary home) with three small experiments on one corpus file, and goes through
them as a person would. Prints a table: what was tried, what came of it. Exits with 1 where something is not as wanted.
"""

import argparse
import collections
import contextlib
import email
import email.policy
import html
import http.server
import json
import os
import random
import shutil
import signal
import socketserver
import subprocess
import sys
import tempfile
import threading
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Self

import pyarrow as pa
import pyarrow.parquet as pq
from airflow_kills import PATIENCE, PROJECT, Server, wait_for

PAGES, HOSTS = 400, 10
PARTS = {"corpus": 3, "score": 2, "tokenize": 2}
RUN_WITHIN_S = 420
PERSON_S = 3.0
STEPS = ("pools", "approval", "word", "backfill", "schedule", "news")  # approval: and parts; word, news need what the others have made
AT_ONCE = 8  # answers given within a second of their request
EXPERIMENT = '''"""Written by scripts/airflow_trial.py."""

from craw4llm.configs import CorpusConfig, CrawlConfig, ScoreConfig, ScorerConfig, SelectConfig, SyntheticText, TokenizerConfig
from craw4llm.experiment import Arms, experiment
from craw4llm.fingerprint import External
from craw4llm.stage import Stage
from training.chain import Chain, tokens_of
from training.configs import ReportConfig


@experiment({declared})
def {name}(replicate: int = 0, *, train_tokens: int = {tokens}) -> Arms:
    """One arm on a small corpus."""
    web = Stage(CorpusConfig(source=External(name="corpus", path={corpus!r}), heldout_fraction=0.05))
    bpe = Stage(TokenizerConfig(vocab_size=512), corpus=web)
    trace = Stage(CrawlConfig(policy="random", budget_pages=40, batch_pages=10, seed_count=5), "random/crawl", corpus=web)
    rater = Stage(ScorerConfig(kind="train_fasttext", source=SyntheticText(lines=400)))
    chain = Chain(
        corpus=web, tokenizer=bpe, heldout=tokens_of(web, bpe, "toy"), size="toy", token_budget=train_tokens, tasks=None, vocab_size=512,
        batch_tokens=512, precision="fp32", suite="none",
    )
    arms = {{"random": chain.results(Stage(SelectConfig(pool="crawled"), corpus=web, crawl=trace), replicate)}}
    reported = {{"corpus": web, "scorer": rater, "scores": Stage(ScoreConfig(), corpus=web, scorer=rater), "crawl/random": trace}}
    return Arms(arms=arms, reported=reported, report=ReportConfig(title="{name}", question="Does it run?", reference="random"))
'''
TOKENS = {"parted": 5120, "often": 6144, "rarely": 7168, "told": 9216}  # each has models of its own
DECLARED = {
    "told": "",
    "parted": f"parts={PARTS!r}, approve_above_gpu_hours=-1.0",
    "often": 'schedule="* * * * *", until_replicates=2',
    "rarely": 'schedule="0 0 1 1 *", until_replicates=3',
}


def write_corpus(path: Path, seed: int) -> None:
    """A Parquet file (url, text, outlinks) in several row groups; another seed gives other texts and links."""
    draw = random.Random(seed)
    urls = [f"https://host{n % HOSTS}.example/page/{n}" for n in range(PAGES)]
    words = ["".join(draw.choice("abcdefghijklmnopqrstuvwxyz") for _ in range(draw.randint(2, 9))) for _ in range(800)]
    texts = [" ".join(draw.choice(words) for _ in range(draw.randint(60, 300))) for _ in urls]
    table = pa.table({"url": urls, "text": texts, "outlinks": [draw.sample(urls, draw.randint(2, 10)) for _ in urls]})
    pq.write_table(table, path.with_suffix(".new"), row_group_size=50)
    path.with_suffix(".new").replace(path)


class Trial:
    """A server, and the table of what came of each thing that was tried."""

    def __init__(self, place: Path) -> None:
        self.place, self.faults = place, 0
        self.corpus = place / "corpus.parquet"
        write_corpus(self.corpus, seed=1)
        experiments = place / "experiments"
        experiments.mkdir()
        for name, declared in DECLARED.items():
            (experiments / f"{name}.py").write_text(
                EXPERIMENT.format(name=name, declared=declared, tokens=TOKENS[name], corpus=str(self.corpus))
            )
        self.experiments = experiments
        self.server = Server(place, 1.0, experiments=experiments)
        wanted = {"parted", "told", "often_reruns", "rarely_reruns"}
        wait_for(lambda: wanted <= {d["dag_id"] for d in self.server.call("GET", "/api/v2/dags")["dags"]}, 120)

    def row(self, what: str, found: Any, wanted: Any) -> None:
        fault = found != wanted
        self.faults += fault
        print(f"{'NOT AS WANTED' if fault else 'as wanted':<14} {what:<66} {found}{f'   WANTED {wanted}' if fault else ''}", flush=True)

    # --- the API

    def call(self, method: str, path: str, content: Any = None) -> Any:
        return self.server.call(method, f"/api/v2{path}", content)

    def trigger(self, dag: str, **conf: Any) -> str:
        return str(self.call("POST", f"/dags/{dag}/dagRuns", {"logical_date": None, "conf": conf})["dag_run_id"])

    def runs(self, dag: str) -> list[dict[str, Any]]:
        return list(self.call("GET", f"/dags/{dag}/dagRuns?order_by=run_after&limit=100")["dag_runs"])

    def tasks(self, dag: str, run: str) -> list[dict[str, Any]]:
        return list(self.call("GET", f"/dags/{dag}/dagRuns/{urllib.parse.quote(run)}/taskInstances?limit=200")["task_instances"])

    def states(self, dag: str, run: str) -> dict[str, int]:
        return dict(collections.Counter(str(task["state"]) for task in self.tasks(dag, run)))

    def state_of(self, dag: str, run: str, task: str) -> str:
        return next((str(t["state"]) for t in self.tasks(dag, run) if t["task_id"] == task), "")

    def end_of(self, dag: str, run: str) -> str:
        path = f"/dags/{dag}/dagRuns/{urllib.parse.quote(run)}"
        return str(wait_for(lambda: (s := self.call("GET", path)["state"]) in ("success", "failed") and s, RUN_WITHIN_S))

    def claimed(self, dag: str, run: str) -> int | None:
        """The replicate of a run; None where it was skipped."""
        if self.state_of(dag, run, "claim") != "success":
            return None
        path = f"/dags/{dag}/dagRuns/{urllib.parse.quote(run)}/taskInstances/claim/xcomEntries/return_value?deserialize=true"
        return int(self.call("GET", path)["value"]["replicate"])

    def pause(self, dag: str, paused: bool) -> None:
        self.call("PATCH", f"/dags/{dag}", {"is_paused": paused})

    # --- what is tried

    def approval(self, page: Any) -> str:
        """An expensive run waits; Reject stops it; Approve lets it go on. By clicks. Returns the id of the run that went on."""
        refused = self.trigger("parted", train_tokens=7680)
        self.asked(refused)
        self.row("a run above the GPU hours waits for a person", self.states("parted", refused).get("success", 0), 0)
        self.click(page, refused, "Reject")
        self.row("Reject, by a click: the run ends", self.end_of("parted", refused), "success")
        states = self.states("parted", refused)
        self.row("... and nothing of it was done", states, {"success": 1, "skipped": sum(states.values()) - 1})
        self.row("... no artifact was made", digests(self.server.root), {})
        accepted = self.trigger("parted")
        self.asked(accepted)
        self.click(page, accepted, "Approve")
        self.row("Approve, by a click: the run goes on to its end", self.end_of("parted", accepted), "success")
        tries = {task["try_number"] for task in self.tasks("parted", accepted)}
        self.row("... and was not asked again", tries, {1})
        return accepted

    def asked(self, run: str) -> None:
        """Waits for the request of a run, and as long as a person takes to read it."""
        wait_for(lambda: self.state_of("parted", run, "plan") in ("deferred", "awaiting_input", "failed"), 120)
        time.sleep(PERSON_S)

    def answer(self, run: str, word: str) -> None:
        path = f"/dags/parted/dagRuns/{urllib.parse.quote(run)}/taskInstances/plan/-1/hitlDetails"
        self.call("PATCH", path, {"chosen_options": [word], "params_input": {}})

    def at_once(self) -> None:
        """Answers in the moment that the request is there: the process that has asked is still ending."""
        tries, ends, waits = [], [], []
        for number in range(AT_ONCE):
            run = self.trigger("parted", train_tokens=8192 + 512 * number)

            def answered(run: str = run) -> bool:
                with contextlib.suppress(OSError):  # there is no request yet
                    self.answer(run, "Reject")
                    return True
                return False

            wait_for(answered, 120, every_s=0.02)
            began = time.monotonic()
            ends.append(self.end_of("parted", run))
            waits.append(time.monotonic() - began)
            tries += [task["try_number"] for task in self.tasks("parted", run) if task["task_id"] == "plan"]
        self.row(f"{AT_ONCE} answers within a moment of the request: ends of the runs", set(ends), {"success"})
        self.row("... nobody was asked again", set(tries), {1})
        print(f"               ... seconds from an answer to the end of its run: {min(waits):.1f} to {max(waits):.1f}", flush=True)

    def pools(self) -> None:
        """A pool that no task can enter is named by the run's first task, which fails; one whose slots are taken is named."""
        self.call("PATCH", "/pools/gpu", {"pool": "gpu", "slots": 0, "description": "models", "include_deferred": False})
        said = self.plan_of(run := self.trigger("told"))
        self.row("a pool of 0 slots: the run", self.end_of("told", run), "failed")
        self.row("... its first task names it", "The pool 'gpu' has 0 slots: 2 tasks of this run will not start" in said, True)
        self.delete("/pools/gpu")
        said = self.plan_of(run := self.trigger("told"))
        self.row("a missing pool: the run", self.end_of("told", run), "failed")
        self.row("... its first task names it", "The pool 'gpu' is missing: 2 tasks of this run will not start" in said, True)
        self.call("POST", "/pools", {"name": "gpu", "slots": 2, "description": "models"})

    def plan_of(self, run: str, dag: str = "told") -> str:
        """The log of a run's first task, when that is over."""
        wait_for(lambda: self.state_of(dag, run, "plan") in ("success", "failed", "skipped"), 120)
        path = f"/dags/{dag}/dagRuns/{urllib.parse.quote(run)}/taskInstances/plan/logs/1?full_content=true"
        return json.dumps(self.call("GET", path), ensure_ascii=False).replace("\\\\", "\\")

    def delete(self, path: str) -> None:
        request = urllib.request.Request(f"http://127.0.0.1:{self.server.port}/api/v2{path}", method="DELETE")
        request.add_header("Authorization", f"Bearer {self.server.token}")
        urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request, timeout=30 * PATIENCE).close()

    def word(self) -> None:
        """A run that ends well and one that fails, told by each kind of connection to a receiver of this script; none without one."""
        with Receiver() as web, Mails() as mail:
            ways = {
                "http": {"host": "127.0.0.1", "port": web.server_address[1], "schema": "http", "extra": '{"path": "/hook"}'},
                "slackwebhook": {"host": f"http://127.0.0.1:{web.server_address[1]}/services", "password": "T/B/X"},
                "smtp": {
                    "host": "127.0.0.1", "port": mail.server_address[1],
                    "extra": '{"to": "a@example.org", "from_email": "b@example.org", "disable_ssl": true, "disable_tls": true}',
                },
            }  # fmt: skip
            for kind in ("", *ways):
                if kind:
                    content = {"connection_id": "craw4llm_notify", "conn_type": kind, **ways[kind]}
                    self.call("POST", "/connections", content)
                good = self.trigger("told")
                self.row(f"word by {kind or 'no connection'}: a run that ends well", self.end_of("told", good), "success")
                moved = self.corpus.with_suffix(".away")
                self.corpus.rename(moved)
                bad = self.trigger("told")
                self.row("... and one that fails", self.end_of("told", bad), "failed")
                moved.rename(self.corpus)
                if not kind:
                    self.row("... nothing was told", (web.got, mail.got), ([], []))
                    continue
                wait_for(lambda: len(web.got) + len(mail.got) >= 2, 30)
                time.sleep(2)
                texts = [*(got["text"] for got in web.got), *(got.get_body(("html",)).get_content() for got in mail.got)]
                texts = [html.unescape(text) for text in texts]
                link = f"http://127.0.0.1:{self.server.port}/dags/told/runs/"
                self.row("... told are", len(texts), 2)
                self.row(
                    "... the answers, with a link",
                    all(w in texts[0] for w in ("told: the report is ready.\n", "/craw4llm/run?", link)),
                    True,
                )
                cause = ("told: plan failed:", "inputs are missing:\ncorpus: ", "does not exist", f"log: {link}")
                self.row("... the cause, with the link of the task's log", all(w in texts[1] for w in cause), True)
                print("".join(f"               | {line}\n" for text in texts for line in text.splitlines()), end="", flush=True)
                web.got.clear()
                mail.got.clear()
                self.delete("/connections/craw4llm_notify")

    def click(self, page: Any, run: str, word: str) -> None:
        """Answers the request of a run in the UI."""
        page.goto(f"http://127.0.0.1:{self.server.port}/dags/parted/runs/{urllib.parse.quote(run)}/tasks/plan/required_actions")
        button = page.get_by_role("button", name=word, exact=True).first
        try:
            button.wait_for()
            if word == "Approve" and (folder := os.environ.get("CRAW4LLM_SCREENSHOTS")):
                page.wait_for_timeout(3000)  # the grid beside it comes later
                page.screenshot(path=str(Path(folder) / "airflow_approval.png"))
            button.click()
            page.wait_for_timeout(1500)
        except Exception:
            page.screenshot(path=str(self.place / f"{word}.png"))
            raise

    def parts(self, run: str) -> None:
        """Corpus, scores and tokens in parts, on several workers; the same bytes as by one command."""
        tasks = self.tasks("parted", run)
        counted = collections.Counter(t["task_id"] for t in tasks if t["map_index"] >= 0)
        kinds = {"corpus": "corpus", "score": "score", "random.heldout": "tokenize", "random.tokenize": "tokenize"}
        wanted = {f"{name}_parts": PARTS[kind] for name, kind in kinds.items()}
        self.row("mapped tasks of the parts", dict(counted), wanted)
        self.row("states of all tasks", set(self.states("parted", run)), {"success"})
        other = self.place / "command_line"
        command = [sys.executable, "-m", "craw4llm", "run", "parted", "--root", str(other)]
        environment = os.environ | {"CRAW4LLM_EXPERIMENTS": str(self.experiments)}
        subprocess.run(command, cwd=PROJECT, env=environment, capture_output=True, check=True)
        by_command, by_airflow = digests(other), digests(self.server.root)
        self.row("fingerprints are the command line's", sorted(by_airflow) == sorted(by_command), True)
        self.row(f"digests of {len(by_command)} artifacts are the command line's", by_airflow == by_command, True)

    def backfill(self) -> None:
        """Two runs of a backfill at the same time, beside the schedule's last one; then two triggers in the same second."""
        dag, before = "rarely_reruns", self.models()
        self.pause(dag, False)
        self.call(
            "POST", "/backfills",
            {"dag_id": dag, "from_date": "2024-01-01T00:00:00Z", "to_date": "2025-01-01T00:00:00Z", "max_active_runs": 2},
        )  # fmt: skip
        runs = wait_for(lambda: len(found := [r for r in self.runs(dag) if r["run_type"] == "backfill"]) == 2 and found, 60)
        for run in runs:
            self.end_of(dag, run["dag_run_id"])
        claimed = [self.claimed(dag, r["dag_run_id"]) for r in runs]
        self.row("a backfill of two runs: replicates of their own", None not in claimed and len(set(claimed)), 2)
        made: list[str] = []
        threads = [threading.Thread(target=lambda: made.append(self.trigger(dag))) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        states = [self.end_of(dag, run) for run in made]
        self.row("two triggers at once: states of the runs", states, ["success", "success"])
        claimed = [self.claimed(dag, r["dag_run_id"]) for r in self.runs(dag)]
        self.row("... replicates of all runs so far", sorted(n for n in claimed if n is not None), [0, 1, 2])
        self.row("models trained for the three replicates", self.models() - before, 3)

    def schedule(self) -> None:
        """A run a minute: a replicate each, until there are enough; then runs skip."""
        dag = "often_reruns"
        self.pause(dag, False)

        def over() -> list[dict[str, Any]]:
            done = [r for r in self.runs(dag) if r["run_type"] == "scheduled" and r["state"] in ("success", "failed")]
            return done if len(done) >= 3 else []

        runs = wait_for(over, 2 * RUN_WITHIN_S)[:3]
        self.pause(dag, True)
        self.row("three scheduled runs: states", [r["state"] for r in runs], ["success"] * 3)
        self.row("... replicates", [self.claimed(dag, r["dag_run_id"]) for r in runs], [0, 1, None])
        states = self.states(dag, runs[2]["dag_run_id"])
        self.row("... the third skips", {name: n for name, n in states.items() if name != "skipped"}, {"success": 1})
        log = self.call(
            "GET", f"/dags/{dag}/dagRuns/{urllib.parse.quote(runs[2]['dag_run_id'])}/taskInstances/claim/logs/1?full_content=true"
        )
        self.row("... and says why", "2 replicates are finished, 2 were asked for" in json.dumps(log), True)

    def news(self) -> None:
        """The corpus file changes: the run that reads it publishes the new artifact, and the experiments that declare it rerun."""
        dag, before = "rarely_reruns", self.models()
        write_corpus(self.corpus, seed=2)
        run = self.trigger("parted")
        self.asked(run)
        self.answer(run, "Approve")
        self.row("approved by the API: the run on the new corpus", self.end_of("parted", run), "success")
        reruns = wait_for(lambda: [r for r in self.runs(dag) if r["run_type"] == "asset_triggered"], 120)
        self.row("the changed corpus causes a rerun", self.end_of(dag, reruns[0]["dag_run_id"]), "success")
        self.row("... of the first replicate", self.claimed(dag, reruns[0]["dag_run_id"]), 0)
        self.row("... whose model is trained anew, as the other experiment's", self.models() - before, 2)
        time.sleep(20)
        self.row("... and causes no further", len([r for r in self.runs(dag) if r["run_type"] == "asset_triggered"]), 1)
        again = self.trigger(dag)
        self.end_of(dag, again)
        self.row("the next run takes the next replicate", self.claimed(dag, again), 1)

    def models(self) -> int:
        return len([name for name in digests(self.server.root) if name.startswith("train/")])


def digests(root: Path) -> dict[str, str]:
    """stage/fingerprint -> digest of all finished artifacts."""
    found = {}
    for path in sorted(root.glob("*/*/manifest.json")):
        if not path.parent.name.startswith(".") and path.parts[-3] not in ("index", "logs"):
            found[f"{path.parts[-3]}/{path.parts[-2]}"] = json.loads(path.read_text())["digest"]
    return found


class Serving(socketserver.BaseServer):
    """A server that serves in a thread for as long as its `with` block runs."""

    def __enter__(self) -> Self:
        threading.Thread(target=self.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *error: Any) -> None:
        self.shutdown()
        self.server_close()


class Receiver(Serving, http.server.ThreadingHTTPServer):
    """A web server that takes every message; `got`: what came, as JSON."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.server.got.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *args: Any) -> None:
            pass

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), self.Handler)
        self.got: list[dict[str, str]] = []


class Mails(Serving, socketserver.ThreadingTCPServer):
    """An SMTP server that takes every mail; `got`: what came."""

    class Handler(socketserver.StreamRequestHandler):
        def handle(self) -> None:
            self.say("220 here")
            while line := self.rfile.readline():
                word = line.split()[0].upper()
                if word == b"DATA":
                    self.say("354 go on")
                    lines = iter(self.rfile.readline, b".\r\n")
                    text = b"".join(each.removeprefix(b".") if each.startswith(b"..") else each for each in lines)
                    self.server.got.append(email.message_from_bytes(text, policy=email.policy.default))
                self.say("221 bye" if word == b"QUIT" else "250 ok")
                if word == b"QUIT":
                    return

        def say(self, line: str) -> None:
            self.wfile.write(line.encode() + b"\r\n")

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), self.Handler)
        self.got: list[Any] = []


@contextlib.contextmanager
def browser(server: Server) -> Iterator[Any]:
    """A page of somebody who has logged in."""
    from playwright.sync_api import sync_playwright

    program = os.environ.get("CHROMIUM") or shutil.which("chromium") or shutil.which("google-chrome")
    with sync_playwright() as driver:
        opened = driver.chromium.launch(executable_path=program, args=["--no-sandbox", "--disable-gpu", "--disable-background-networking"])
        page = opened.new_page(viewport={"width": 1280, "height": 800}, color_scheme="light")
        page.set_default_timeout(60_000 * PATIENCE)
        page.goto(f"http://127.0.0.1:{server.port}")
        page.fill("input[name=username]", "admin")
        page.fill("input[type=password]", json.loads((server.home / "passwords.json").read_text())["admin"])
        page.keyboard.press("Enter")
        page.wait_for_url(lambda url: "login" not in url)
        yield page
        opened.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="an empty folder for home and artifacts, which stays")
    parser.add_argument("steps", nargs="*", metavar="STEP", help=f"some of {', '.join(STEPS)} (default: all, in this order)")
    given = parser.parse_args()
    steps = given.steps or STEPS
    if unknown := set(steps) - set(STEPS):
        parser.error(f"no step {', '.join(sorted(unknown))}; there are: {', '.join(STEPS)}")
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(143))
    with contextlib.ExitStack() as stack:
        place = given.keep or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="craw4llm-trial-")))
        place.mkdir(parents=True, exist_ok=True)
        trial = Trial(place.resolve())
        stack.callback(trial.server.stop)
        if "pools" in steps:
            trial.pools()
        if "approval" in steps:
            with browser(trial.server) as page:
                trial.parts(trial.approval(page))
            trial.at_once()
        if "word" in steps:
            trial.word()
        if "backfill" in steps:
            trial.backfill()
        if "schedule" in steps:
            trial.schedule()
        if "news" in steps:
            trial.news()
        print(f"{trial.faults} not as wanted")
    sys.exit(1 if trial.faults else 0)


if __name__ == "__main__":
    main()
