"""Getting the task files: from a source on loopback, verified; and checking a folder."""

import dataclasses
import functools
import http.server
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from craw4llm.errors import InputError
from training.evaluation import data, tasks
from training.evaluation.data import check_tasks, distinct, fetch_tasks
from training.evaluation.tasks import TASKS, Task, git_blob


class Handler(http.server.SimpleHTTPRequestHandler):
    broken = 0  # answers 503 to so many requests first

    def do_GET(self) -> None:
        if Handler.broken:
            Handler.broken -= 1
            self.send_error(503)
        else:
            super().do_GET()

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def table(monkeypatch: pytest.MonkeyPatch) -> dict[str, Task]:
    """The table as it would be if the shipped items were the full files."""
    own = tasks.read_own_items()
    folder = Path(tasks.__file__).parent / "sample_items"
    made = {
        label: dataclasses.replace(task, items=len(own[label].rows), blob=git_blob((folder / task.file_name).read_bytes()))
        for label, task in TASKS.items()
    }
    monkeypatch.setattr(data, "TASKS", made)
    monkeypatch.setattr(data, "WAIT_S", 0.01)
    return made


@pytest.fixture
def source(table: dict[str, Task], tmp_path: Path) -> Iterator[tuple[str, Path]]:
    """A server with the files in llm-foundry's sub-folders: (URL, its folder)."""
    folder = Path(tasks.__file__).parent / "sample_items"
    root = tmp_path / "source"
    for task in table.values():
        path = root / task.file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes((folder / task.file_name).read_bytes())
    Handler.broken = 0
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Handler, directory=str(root))) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}", root
        server.shutdown()


def test_files_are_fetched_verified_and_kept(source: tuple[str, Path], tmp_path: Path):
    url, _ = source
    said: list[str] = []
    fetch_tasks(tmp_path / "to", url + "/", said.append)
    assert len(said) == 22 == len(distinct()) and all("verified" in line and "licence" in line for line in said)
    check_tasks(tmp_path / "to", said.append)
    listed = (tmp_path / "to" / data.SOURCES).read_text().splitlines()
    assert len(listed) == 23 and listed[1].split("\t")[3] == "MIT" and data.COMMIT in listed[1]
    (tmp_path / "to" / "copa.jsonl").write_text("{}")
    said.clear()
    fetch_tasks(tmp_path / "to", url, said.append)
    assert sum("there, verified" in line for line in said) == 21 and any(
        line.startswith("copa.jsonl: ") and "bytes" in line for line in said
    )
    assert not list((tmp_path / "to").glob(".*"))


def test_a_fault_of_the_network_is_tried_again_and_a_refusal_is_not(source: tuple[str, Path], tmp_path: Path):
    url, root = source
    Handler.broken = 2
    fetch_tasks(tmp_path / "to", url, lambda line: None)
    (root / TASKS["squad"].file).unlink()
    with pytest.raises(InputError, match=r"squad\.jsonl answers 404 .*copy llm-foundry's"):
        fetch_tasks(tmp_path / "other", url, lambda line: None)
    assert (tmp_path / "other" / "mmlu.jsonl").is_file()  # what came before stays
    Handler.broken = 3
    with pytest.raises(InputError, match="answers 503"):
        fetch_tasks(tmp_path / "third", url, lambda line: None)


def test_an_altered_file_is_never_written(source: tuple[str, Path], tmp_path: Path):
    url, root = source
    path = root / TASKS["coqa"].file
    path.write_bytes(path.read_bytes()[:-1] + b" ")
    with pytest.raises(InputError, match=r"coqa\.jsonl is git blob [0-9a-f]{40} .* expected [0-9a-f]{40}"):
        fetch_tasks(tmp_path / "to", url, lambda line: None)
    assert not (tmp_path / "to" / "coqa.jsonl").exists()


def test_no_network_says_what_to_do(table: dict[str, Task], tmp_path: Path):
    with pytest.raises(InputError, match=r"cannot be read .*without a network, copy"):
        fetch_tasks(tmp_path / "to", "http://127.0.0.1:9", lambda line: None)


def test_a_folder_is_checked_file_by_file(shared: Path, tmp_path: Path):
    said: list[str] = []
    with pytest.raises(InputError, match=r"21 of 22 files of .*: mmlu_fewshot is limited: 27 usable items of 14042"):
        check_tasks(shared / "eval_samples", said.append)
    assert len(said) == 22 and any(line.startswith("bigbench_repeat_copy_logic.jsonl: complete, 32 items") for line in said)
    with pytest.raises(InputError, match=r"22 of 22 .*copa\.jsonl is missing"):
        check_tasks(tmp_path, said.append)
    with pytest.raises(InputError, match="is no folder"):
        check_tasks(tmp_path / "none", said.append)


def test_the_source_is_pinned():
    assert data.COMMIT.startswith("8c8dd48f") and data.COMMIT in data.SOURCE and len({task.file for task in TASKS.values()}) == 22
