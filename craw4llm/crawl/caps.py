"""Caps: at most so many pages crawled of a host, or of a registered domain (example.co.uk). Off by default.

    caps = Caps(corpus, per_host=1000, per_domain=None)
    caps.full(targets)                   which of them lie on a host that has had its share: they are not looked at
    caps.admit(targets, is_live)         popped targets in order: which may be requested; the pages among them are counted

Host and domain stand in the URL, so a live crawler knows them before the fetch. A dead link is no page and uses up nothing, but is not
requested either where its host is full. Seeds are crawled whatever the caps say, and count.
"""

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from craw4llm.corpus.names import Names
from craw4llm.corpus.reader import Corpus
from craw4llm.errors import ConfigError

Targets = NDArray[np.uint32]
Groups = NDArray[np.int32]


class Caps:
    """per_host, per_domain: pages; None: no cap."""

    def __init__(self, corpus: Corpus, *, per_host: int | None, per_domain: int | None) -> None:
        from craw4llm.corpus.urls import domain_of, host_of  # brings the list of public suffixes

        if not corpus.n_hosts:
            raise ConfigError(
                f"crawl: pages_per_host and pages_per_domain need the hosts of all pages, which the corpus {corpus.artifact.fingerprint} "
                "does not know (links='in_place' reads no page beforehand); build it with links='compiled', or set no cap"
            )
        dead_hosts = [host_of(url) if "/" in url else url for url in corpus.dead_urls.to_pylist()]  # a document id has no host
        self._caps: list[tuple[Groups, NDArray[np.int64], int]] = []
        if per_host is not None:
            self._caps.append(self._cap(corpus.hosts, corpus.host_ids, dead_hosts, per_host))
        if per_domain is not None:
            dead_domains = [domain_of(host) for host in dead_hosts]
            self._caps.append(self._cap(corpus.domains, corpus.domain_ids, dead_domains, per_domain))

    def full(self, targets: Targets) -> NDArray[np.bool_]:
        """bool[len(targets)]: whether the cap of its host or domain is reached."""
        found = np.zeros(len(targets), dtype=np.bool_)
        for groups, counts, cap in self._caps:
            found |= counts[groups[targets]] >= cap
        return found

    def admit(self, targets: Targets, is_live: NDArray[np.bool_]) -> NDArray[np.bool_]:
        """bool[len(targets)]: in the order given, those whose caps are not reached when their turn comes."""
        admitted = ~self.full(targets)
        for row in np.flatnonzero(admitted).tolist():
            groups = [(counts, of[targets[row]], cap) for of, counts, cap in self._caps]
            admitted[row] = all(counts[group] < cap for counts, group, cap in groups)
            if admitted[row] and is_live[row]:
                for counts, group, _ in groups:
                    counts[group] += 1
        return admitted

    def count(self, pages: Targets) -> None:
        """These pages were crawled: seeds, or what a checkpoint holds."""
        for groups, counts, _ in self._caps:
            counts += np.bincount(groups[pages], minlength=len(counts))

    @staticmethod
    def _cap(names: Names, of_pages: Groups, of_dead: list[str], cap: int) -> tuple[Groups, NDArray[np.int64], int]:
        dead = names.ids(pa.array(of_dead, pa.large_string()))
        further: dict[str, int] = {}  # hosts that have dead links only
        for row in np.flatnonzero(dead < 0).tolist():
            dead[row] = further.setdefault(of_dead[row], len(names) + len(further))
        return np.concatenate([of_pages, dead]), np.zeros(len(names) + len(further), dtype=np.int64), cap
