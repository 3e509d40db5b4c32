"""The task files: getting them from their public source, and checking a folder of them.

    fetch_tasks(Path("data/tasks"), say=print)      downloads what is missing or wrong
    check_tasks(Path("data/tasks"))                 one line per file; InputError naming what is missing, short or altered

Source: github.com/mosaicml/llm-foundry, `scripts/eval/local_data`, at the commit that `training.evaluation.tasks` was made from.
A file is taken only if its git object id is the table's, so every byte is verified; `SOURCES.tsv` beside the files names each data
set's origin and licence. The project ships none of these files.
"""

import http.client
import os
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path

from craw4llm.errors import InputError
from training.evaluation.tasks import TASKS, Task, find_task_file, git_blob, parse_task_file

COMMIT = "8c8dd48f72168c5d51e2f7b151595892a8fba43d"
SOURCE = f"https://raw.githubusercontent.com/mosaicml/llm-foundry/{COMMIT}/scripts/eval/local_data"
SOURCES = "SOURCES.tsv"
TRIES = 3
WAIT_S = 2.0
TIMEOUT_S = 60.0
MAX_BYTES = 64 << 20  # no task file is a third of this


def distinct() -> list[Task]:
    """One entry per file: HellaSwag is used twice."""
    return list({task.file: task for task in TASKS.values()}.values())


def fetch_tasks(to: Path, source: str = SOURCE, say: Callable[[str], None] = print) -> None:
    """Puts every task file into `to`, flat; right ones are kept. Raises InputError for a file that cannot be had or is not the table's."""
    to.mkdir(parents=True, exist_ok=True)
    for task in distinct():
        path = to / task.file_name
        if path.is_file() and git_blob(path.read_bytes()) == task.blob:
            say(f"{task.file_name}: there, verified")
            continue
        url = f"{source.rstrip('/')}/{task.file}"
        content = _download(url)
        blob = git_blob(content)
        if blob != task.blob:
            raise InputError(
                f"tasks: {url} is git blob {blob} ({len(content):,} bytes), expected {task.blob}; the source has changed or something on "
                "the way has: get the file from llm-foundry's repository at that commit"
            )
        new = path.with_name(f".{path.name}.{os.getpid()}")
        new.write_bytes(content)
        new.replace(path)
        say(f"{task.file_name}: {len(content):,} bytes, verified; {task.source}; licence: {task.licence}")
    lines = ["file\titems\tdata set\tlicence of the data\tgit blob\tURL"]
    lines += [f"{t.file_name}\t{t.items}\t{t.source}\t{t.licence}\t{t.blob}\t{SOURCE}/{t.file}" for t in distinct()]
    (to / SOURCES).write_text("\n".join(lines) + "\n")


def check_tasks(folder: Path, say: Callable[[str], None] = print) -> None:
    """Says the state of every task file of a folder. Raises InputError naming all that are missing, limited or altered."""
    if not folder.is_dir():
        raise InputError(f"tasks: {folder} is no folder; expected one with the files of llm-foundry's scripts/eval/local_data")
    faults = []
    for task in distinct():
        path = find_task_file(folder, task)
        if path is None:
            state = f"{task.file_name} is missing"
        else:
            try:
                file = parse_task_file(task, str(path), path.read_bytes(), own=False)
                state = file.why
            except InputError as error:
                state = str(error)
        if state:
            faults.append(state)
        say(f"{task.file_name}: {state or f'complete, {task.items:,} items'}; licence: {task.licence}")
    if faults:
        raise InputError(f"tasks: {len(faults)} of {len(distinct())} files of {folder} are not llm-foundry's: {'; '.join(faults)}")


def _download(url: str) -> bytes:
    """The bytes behind a URL. Faults of the network are tried again, refusals are not."""
    for attempt in range(1, TRIES + 1):
        try:
            with urllib.request.urlopen(url, timeout=TIMEOUT_S) as answer:
                content: bytes = answer.read(MAX_BYTES + 1)
            if len(content) > MAX_BYTES:
                raise InputError(f"tasks: {url} is larger than {MAX_BYTES:,} bytes; expected a task file")
            return content
        except urllib.error.HTTPError as error:
            if error.code < 500 or attempt == TRIES:
                raise InputError(f"tasks: {url} answers {error.code} {error.reason}; {_REMEDY}") from error
        except (OSError, http.client.HTTPException, ValueError) as error:
            if attempt == TRIES or isinstance(error, ValueError):
                reason = getattr(error, "reason", error)
                raise InputError(f"tasks: {url} cannot be read ({reason}); {_REMEDY}") from error
        time.sleep(WAIT_S * attempt)
    raise AssertionError("unreachable")


_REMEDY = "without a network, copy llm-foundry's scripts/eval/local_data here and give that folder as `tasks`"
