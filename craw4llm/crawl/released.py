"""Mode `released`: the crawl of the released code (cxcscmu/Craw4LLM, `crawl.py crawl`), warts included, to compare with it.

    crawl = ReleasedCrawler(corpus, policy, page_scores, seeds=sampled, budget=Budget(pages=60), batch_pages=6).run(progress)

What differs from mode `paper` (spec: its sections 1.2 and 3.2):

- `batch_pages` seeds are sampled from the lines of the seed file, scored and queued; the first batch is popped from them.
- Whole batches: the crawl ends after the batch that reaches the budget, with up to batch_pages - 1 pages more.
- A look-ahead policy drops targets that the corpus does not hold, and asks for them again whenever they are met: each time a fetch.
- A policy that reads no text queues and crawls them like pages ("ghosts"; the released in-degree of one is 0).
- An iteration that finds nothing new to queue ends the run, even with pages left in the queue: there the released code dies of a division
  by zero, or of an empty list, in the means for its log. The lists up to there are the same.

The fastText score is the released one where the scorer's config says reading="released" (craw4llm.scoring.released). In-degrees count
anchors (repeats and self-links included) in the released code; the link graph of a corpus holds each pair once, so for equal lists the
corpus counts them (ClueWeb22 with indegree="inlink"), or the input `rank` gives the counts. The order of the released random
policy depends on Python's hash seed: its speed can be compared, its pages cannot.
"""

import random
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from craw4llm.corpus.npy import distinct
from craw4llm.corpus.reader import Corpus
from craw4llm.crawl.loop import NOBODY, Crawler, Iteration, Targets, distinct_targets, seen_first
from craw4llm.crawl.seeds import Seeds
from craw4llm.errors import ConfigError, InputError
from craw4llm.scoring.means import mean_score


def sample_seeds(path: Path, corpus: Corpus, count: int, seed: int, *, ghosts: bool) -> Seeds:
    """The released code's sample: `random.sample` of the file's lines after `random.seed(seed)`, in the order drawn.

    ghosts: whether targets without a page may be seeds (a policy that reads no text). InputError for fewer lines than `count`, and for a
    sample with a repeated line, which the released code would crawl and count twice.
    """
    try:
        lines = [line.strip() for line in path.read_text(encoding="utf-8").splitlines()]
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"seeds: {path} cannot be read: {error}") from error
    if len(lines) < count:
        raise InputError(
            f"seeds: {path} has {len(lines)} lines; mode released samples batch_pages = {count} of them, so give at least as many"
        )
    drawn = random.Random(seed).sample(list(enumerate(lines, 1)), count)
    names = [line for _, line in drawn]
    targets = corpus.find_targets(names) if ghosts else corpus.find(names)
    unknown = [entry for entry, target in zip(drawn, targets.tolist(), strict=True) if target < 0]
    if ghosts and unknown:
        raise InputError(
            f"seeds: {path}, line {unknown[0][0]} ({unknown[0][1][:80]!r}) is neither a page nor a target of a link, but a policy that "
            "reads no text would crawl it; remove the line"
        )
    known = targets[targets >= 0]
    if len(distinct(known)) < len(known):
        raise InputError(f"seeds: {path} names a page more than once, which mode released would crawl and count twice; remove the repeats")
    if not len(known):
        raise InputError(f"seeds: none of the {count} lines sampled from {path} is a page of the corpus")
    return Seeds(pages=known.astype(np.uint32), unknown=unknown)


class ReleasedCrawler(Crawler):
    """A Crawler in mode `released`. seeds: the sample, in any order."""

    def _start(self, row: Iteration) -> None:
        if len(self._corpus.heldout):
            raise ConfigError("crawl: mode released knows no held-out pages; give the corpus heldout_fraction=0")
        if self._budget.fetches is not None:
            raise ConfigError("crawl: mode released stops by pages crawled; give budget_pages alone")
        seeds = np.sort(self._seeds)
        self._meet(row, seeds, np.zeros(len(seeds), dtype=np.int64), np.full(len(seeds), NOBODY, dtype=np.uint32))
        self._pop(row)

    def _go_on(self, row: Iteration) -> bool:
        offsets, targets = self._corpus.outlinks(self._batch[self._batch < self._corpus.n_pages])
        linking = np.flatnonzero(self._batch < self._corpus.n_pages)
        row.links = len(targets)
        links = np.flatnonzero(~self._seen.has(targets))
        distinct, first, _ = distinct_targets(targets[links], with_inverse=False)
        source = np.repeat(linking, np.diff(offsets))[links[first]]
        row.new_targets = len(distinct)
        if not self._meet(row, distinct, source, (self._n_crawled - len(self._batch) + source).astype(np.uint32)):
            return False
        self._pop(row)
        return True

    def _meet(self, row: Iteration, targets: Targets, place: NDArray[np.int64], linked_by: NDArray[np.uint32]) -> bool:
        """Scores (and for that fetches) distinct new targets and queues them; whether there was any.

        place: of the linking page in the batch. linked_by: its crawl rank; NOBODY for a seed.
        """
        places = self._places.of(targets)
        if self._look_ahead:
            order = np.argsort(places)
            self._fetch(row, targets[order], linked_by[order])
            live = (targets < self._corpus.n_pages) & ~self._corpus.without_record(targets)  # to the released code both are missing
            targets, place, places = targets[live], place[live], places[live]
        else:
            self._met.append(targets)
            self._linked_by.append(linked_by)
            self._seen.add(targets)
        row.discovered = len(targets)
        if not len(targets):
            return False
        if self._look_ahead:
            self._read(targets)
            row.mean_score_discovered = mean_score(self._look_scores)
        seen = seen_first(targets, max(self._n_crawled - len(self._batch), 0) + place)
        self._frontier.push(places, self._policy.priorities(seen))
        return True

    def _remembered(self, fetched: Targets) -> Targets:
        return fetched[fetched < self._corpus.n_pages] if self._look_ahead else fetched

    def _pop(self, row: Iteration) -> None:
        places, priorities = self._frontier.pop(self._batch_pages)
        targets = self._places.targets(places)
        if not self._look_ahead:
            self._fetch(row, targets)
        self._crawl(row, [targets], [priorities])
