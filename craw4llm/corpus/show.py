"""What a person wants to know first of a corpus, and of one of its pages: `craw4llm show corpus` and `show page`.

    print(describe(corpus, seeds))
    print("\\n".join(page_lines(corpus, page)))

The page table is read in row groups, arrays through their memory maps, block by block: a large corpus takes time, not memory. What is held
is three bytes a page (what can be reached), the names of hosts, and a block.
"""

import hashlib
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from numpy.typing import NDArray

from craw4llm.artifact import Artifact, Store
from craw4llm.corpus.clueweb22_corpus import ClueWeb22Corpus
from craw4llm.corpus.page_columns import MAPPED_FROM
from craw4llm.corpus.reader import Corpus
from craw4llm.corpus.records import REASONS, LinkFlag, Signal
from craw4llm.errors import ArtifactError

TOP = 8
EXAMPLES = 5
SHOWN_LINKS = 20
TEXT_CHARS = 300
_PERCENTILES = (0, 10, 50, 90, 99, 100)
_BLOCK_PAGES = 1 << 20
_BLOCK = 1 << 22  # values of an array that are counted at a time


def find_corpora(name: str, root: Path) -> list[Artifact]:
    """Corpora by the path of an artifact's folder, the beginning of a fingerprint, or the name of an experiment with runs in `root`."""
    from craw4llm import browse
    from craw4llm.runner import read_index

    path = Path(name)
    if (path / "manifest.json").is_file():
        folder = path.resolve()
        return [Store(folder.parent.parent).open(folder.parent.name, folder.name)]
    wanted = browse.reachable(read_index(root / "index" / f"{name}.json"))
    corpora = [artifact for artifact in browse.artifacts(root) if artifact.stage == "corpus"]
    found = [a for a in corpora if (a.stage, a.fingerprint) in wanted] or [a for a in corpora if a.fingerprint.startswith(name)]
    if not found:
        known = ", ".join(a.fingerprint for a in corpora) or "none"
        raise ArtifactError(
            f"{name!r} is no corpus: no folder of an artifact, no experiment with a finished corpus in {root}, and no fingerprint of "
            f"one there (known: {known})"
        )
    return found


def describe(corpus: Corpus, seeds: Path | None = None) -> str:
    """Text of some 30 lines. seeds: a seed file; without one, seeds are drawn as a crawl draws them by default."""
    if isinstance(corpus, ClueWeb22Corpus) and corpus.in_place:
        artifact = corpus.artifact
        return (
            f"corpus {artifact.fingerprint}  {artifact.path}\n  {artifact.manifest['notes']['origin']}, links read in place\n"
            f"records    {corpus.n_pages:,}, of them {artifact.count('pages_without_record'):,} empty; nothing else is known before "
            "it is read (links='compiled' reads all)"
        )
    return "\n".join(_lines(corpus, seeds))


def _lines(corpus: Corpus, seeds: Path | None) -> Iterator[str]:
    artifact = corpus.artifact
    count = artifact.count
    notes = artifact.manifest["notes"]
    yield f"corpus {artifact.fingerprint}  {artifact.path}"
    yield f"  {notes.get('origin', 'origin unknown')}"
    records, rejects, skipped = count("records"), count("rejects"), _count(artifact, "skipped")
    yield f"records    {records:,} read = {corpus.n_pages:,} pages + {rejects:,} rejects + {skipped:,} skipped"
    for reason, number in notes.get("rejects_by_reason", {}).items():
        yield f"             reject  {number:>12,}  {reason}: {REASONS.get(reason, '')}"
    for kind, number in notes.get("skipped", {}).items():
        yield f"             skipped {number:>12,}  {kind}"

    table = _Table(corpus)
    yield f"hosts      {count('hosts'):,}, {_count(artifact, 'domains'):,} registered domains; largest: {_top_hosts(corpus)}"
    yield f"languages  {_top(table.languages, corpus.n_pages) or 'not known'}"
    yield f"held out   {count('heldout_pages'):,} pages ({_share(count('heldout_pages'), corpus.n_pages)})"
    yield f"texts      {_size(count('text_bytes'))}; {count('empty_pages'):,} pages without text, {count('cut_pages'):,} cut"
    yield f"             bytes a page      {_percentiles(corpus.n_bytes)}"

    inside, dead = count("links"), count("dead_link_uses")
    yield (
        f"links      {inside:,} to pages, {dead:,} dangling to {count('dead_links'):,} URLs that the corpus has not, "
        f"{count('outside_links'):,} dropped as outside, {count('unusable_links'):,} unusable"
    )
    out_degrees, no_out = _out_degrees(corpus)
    yield f"             out-links a page  {_percentiles(out_degrees)}; none: {_share(no_out, corpus.n_pages)}"
    in_degrees = corpus.indegree[: corpus.n_pages]
    no_in = sum(int(np.count_nonzero(some == 0)) for some in _blocks(in_degrees))
    yield f"             in-links a page   {_percentiles(in_degrees)}; none: {_share(no_in, corpus.n_pages)}"
    flags = artifact.path / "links_flags.npy"
    if flags.exists():
        yield f"             flags             {_bits(_blocks(np.load(flags, mmap_mode='r')), LinkFlag) or 'none set'}"
    if (artifact.path / "link_anchors.zst").exists():
        yield f"             anchors           {_size((artifact.path / 'link_anchors.zst').stat().st_size)} compressed"
    yield from _reach(corpus, seeds)

    yield f"owners ask {_bits(_blocks(corpus.signals), Signal) or 'nothing that the source tells of'}"
    yield f"canonical  {table.canonical:,} pages name a canonical URL, {table.elsewhere:,} of them another than their own"
    yield "examples"
    for page in _examples(corpus):
        text = " ".join(corpus.text(page)[:TEXT_CHARS].split())[:100]
        yield f"  {page:>10}  {corpus.url(page)[:110]}"
        yield f"              {int(corpus.n_bytes[page]):,} bytes{': ' + text if text else ''}"


class _Table:
    """What is counted in one pass over the page table. languages: name -> pages."""

    def __init__(self, corpus: Corpus) -> None:
        self.languages: Counter[str] = Counter()
        self.canonical = self.elsewhere = 0
        if isinstance(corpus, ClueWeb22Corpus):
            self.languages.update(corpus.languages())
            return
        file = pq.ParquetFile(corpus.artifact.file("pages.parquet"))
        for g in range(file.num_row_groups):
            rows = file.read_row_group(g, columns=["url", "language", "canonical"])
            for entry in pc.value_counts(rows["language"]).to_pylist():
                self.languages[entry["values"] or "not known"] += entry["counts"]
            self.canonical += len(rows) - rows["canonical"].null_count
            self.elsewhere += pc.sum(pc.not_equal(rows["canonical"], rows["url"])).as_py() or 0
        if set(self.languages) == {"not known"}:
            self.languages.clear()


def page_lines(corpus: Corpus, page: int) -> list[str]:
    """A page: what its source says, its text's beginning, its links out and in."""
    row = corpus.source_row(page)
    facts = [f"source {row['source']}"]
    facts += [
        f"{label} {row[name]}" for name, label in (("doc_id", "id"), ("language", "language"), ("canonical", "canonical")) if row[name]
    ]
    facts += [f"owner asks {_names(row['signals'], Signal)}"] if row["signals"] else []
    facts += ["text cut"] if row["cut"] else []
    lines = [f"  {', '.join(facts)}"]
    text = " ".join(corpus.text(page)[: 4 * TEXT_CHARS].split())[:TEXT_CHARS]
    lines += [f"  text: {text}{'...' if len(text) == TEXT_CHARS else ''}"] if text else ["  no text"]
    _, targets = corpus.outlinks([page])
    flags, anchors = corpus.link_flags([page]), corpus.anchors([page])
    dead = int((targets >= corpus.n_pages).sum())
    lines.append(f"  {len(targets):,} links out, {dead:,} of them to URLs that the corpus has not")
    for k, target in enumerate(targets[:SHOWN_LINKS].tolist()):
        lines.append(f"    -> {_link(corpus, target, flags, anchors, k)}")
    lines += [f"    and {len(targets) - SHOWN_LINKS:,} more"] if len(targets) > SHOWN_LINKS else []
    if not corpus.has_indegree:
        return [*lines, "  links in are not known: links='in_place' reads no link before it is followed"]
    _, parents = corpus.inlinks([page])
    lines.append(f"  {len(parents):,} links in")
    for parent in parents[:SHOWN_LINKS].tolist():
        _, linked = corpus.outlinks([parent])
        k = int(np.searchsorted(linked, page))
        lines.append(f"    <- {_link(corpus, parent, corpus.link_flags([parent]), corpus.anchors([parent]), k)}")
    lines += [f"    and {len(parents) - SHOWN_LINKS:,} more"] if len(parents) > SHOWN_LINKS else []
    return lines


def _link(corpus: Corpus, target: int, flags: NDArray[np.uint8] | None, anchors: list[str | None] | None, k: int) -> str:
    where = str(target) if target < corpus.n_pages else "dead"
    anchor = f'  "{anchors[k]}"' if anchors and anchors[k] else ""
    said = f"  [{_names(int(flags[k]), LinkFlag)}]" if flags is not None and flags[k] else ""
    return f"{where:>8}  {corpus.url(target)}{anchor}{said}"


def _reach(corpus: Corpus, seeds: Path | None) -> Iterator[str]:
    from craw4llm.crawl.seeds import draw_seeds, read_seeds

    if seeds is not None:
        start, what = read_seeds(seeds, corpus).pages, f"the seeds of {seeds}"
    elif corpus.n_pages >= MAPPED_FROM:  # a crawl's own draw hashes the URL of every page
        start = _some_pages(corpus)
        what = f"{len(start)} pages drawn by their numbers"
    else:
        usable = int(np.count_nonzero(corpus.has_text & ~corpus.heldout_mask[: corpus.n_pages]))
        usable = usable or corpus.n_pages - len(corpus.heldout)  # a graph alone has no texts at all
        start = draw_seeds(corpus, min(50, usable), 0).pages if usable else np.empty(0, dtype=np.uint32)
        what = f"{len(start)} drawn seeds"
    if not len(start):
        yield "reachable  no page can be a seed"
        return
    pages, depth = reachable(corpus, start)
    crawlable = corpus.n_pages - len(corpus.heldout)
    yield f"reachable  {pages:,} pages ({_share(pages, crawlable)} of those not held out) from {what}, at most {depth} links away"


def _some_pages(corpus: Corpus) -> NDArray[np.uint32]:
    """At most 50 pages that are not held out, with text where the corpus has any: the same each time."""
    drawn = np.array([_drawn(f"seed:{k}", corpus.n_pages) for k in range(5000)], dtype=np.int64)
    drawn = drawn[~np.isin(drawn, corpus.heldout)]
    with_text = drawn[corpus.text_bytes(drawn) > 0]
    return np.unique((with_text if len(with_text) else drawn)[:50]).astype(np.uint32)


def reachable(corpus: Corpus, seeds: NDArray[np.uint32]) -> tuple[int, int]:
    """(pages that can be reached without passing a held-out page, seeds included; the largest number of links to one).

    Three bytes a page: whether it was met, whether it is in this front, and in the next.
    """
    met = np.zeros(corpus.n_pages, dtype=np.bool_)
    met[corpus.heldout] = True
    heldout = int(np.count_nonzero(met))
    front, following = np.zeros_like(met), np.zeros_like(met)
    front[seeds] = met[seeds] = True
    depth, waiting = -1, True
    while waiting:
        depth, waiting = depth + 1, False
        for first in range(0, len(front), _BLOCK_PAGES):
            pages = first + np.flatnonzero(front[first : first + _BLOCK_PAGES])
            if not len(pages):
                continue
            _, targets = corpus.outlinks(pages)
            new = targets[targets < corpus.n_pages]
            new = new[~met[new]]
            following[new] = met[new] = True
            waiting = waiting or len(new) > 0
            front[pages] = False
        front, following = following, front
        corpus.release_links()
    return int(np.count_nonzero(met)) - heldout, depth


def _out_degrees(corpus: Corpus) -> "tuple[_Degrees, int]":
    degrees = _Degrees(np.load(corpus.artifact.file("links_offsets.npy"), mmap_mode="r"))
    return degrees, sum(int(np.count_nonzero(some == 0)) for some in _blocks(degrees))


class _Degrees:
    """Differences of neighbouring offsets, made when they are asked for."""

    def __init__(self, offsets: NDArray[np.uint64]) -> None:
        self._offsets = offsets

    def __len__(self) -> int:
        return len(self._offsets) - 1

    def __getitem__(self, rows: slice) -> NDArray[np.uint32]:
        return np.diff(self._offsets[rows.start : rows.stop + 1]).astype(np.uint32)


def _blocks(values: "NDArray[np.integer] | _Degrees") -> Iterator[NDArray[np.integer]]:
    for start in range(0, len(values), _BLOCK):
        yield np.asarray(values[start : min(start + _BLOCK, len(values))])


def _examples(corpus: Corpus) -> list[int]:
    """Pages drawn by a hash of their number, so the same each time."""
    drawn = {_drawn(f"example:{k}", corpus.n_pages) for k in range(EXAMPLES)}
    return sorted(drawn)


def _drawn(name: str, n_pages: int) -> int:
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "big") % n_pages


def _count(artifact: Artifact, name: str) -> int:
    return int(artifact.manifest["counts"].get(name, {}).get("value") or 0)


def _top_hosts(corpus: Corpus) -> str:
    """As `_top`, of hosts, which may be many: only names that can be among the first become strings."""
    pages = np.zeros(len(corpus.hosts), dtype=np.int64)
    for some in _blocks(corpus.host_ids):
        pages += np.bincount(some, minlength=len(pages))
    least = int(np.partition(pages, len(pages) - TOP)[len(pages) - TOP]) if len(pages) > TOP else 0
    larger, equal = np.flatnonzero(pages > least), np.flatnonzero(pages == least)
    names = corpus.hosts.array.take(pa.array(equal))
    first = pc.sort_indices(names)[: TOP - len(larger)].to_numpy() if len(equal) else equal
    chosen = np.concatenate([larger, equal[first]])
    counted = Counter({name or "not known": int(n) for name, n in zip(corpus.hosts.take(chosen), pages[chosen], strict=True)})
    return _top(counted, corpus.n_pages, len(pages))


def _top(counted: Counter[str], total: int, of: int | None = None) -> str:
    """of: how many there are, where `counted` has the first only."""
    of = len(counted) if of is None else of
    ordered = sorted(counted.items(), key=lambda item: (-item[1], item[0]))
    rest = f", {of - TOP} others" if of > TOP else ""
    return ", ".join(f"{name} {_share(number, total)}" for name, number in ordered[:TOP]) + rest


def _percentiles(values: "NDArray[np.integer] | _Degrees") -> str:
    found = percentiles(values, _PERCENTILES)
    return ", ".join(f"{name} {value:,.0f}" for name, value in zip(("min", "10%", "median", "90%", "99%", "max"), found, strict=True))


def percentiles(values: "NDArray[np.integer] | _Degrees", wanted: Sequence[int]) -> list[float]:
    """np.percentile(values, wanted) of values below 2^32, in two passes of counting: by their upper 16 bits, then, where one of the wanted
    ranks lies, by their lower. No copy and no sort."""
    at = np.array([p / 100 * (len(values) - 1) for p in wanted])
    ranks = np.unique(np.concatenate([np.floor(at), np.ceil(at)]).astype(np.int64))
    upper = np.zeros(1 << 16, dtype=np.int64)
    for some in _blocks(values):
        upper += np.bincount(some.astype(np.int64) >> 16, minlength=1 << 16)
    ends = np.cumsum(upper)
    bins = np.searchsorted(ends, ranks, side="right")
    lower = {int(b): np.zeros(1 << 16, dtype=np.int64) for b in bins}
    for some in _blocks(values):
        high = some.astype(np.int64) >> 16
        for b, counts in lower.items():
            counts += np.bincount(some[high == b].astype(np.int64) & 0xFFFF, minlength=1 << 16)
    value_at = {}
    for rank, b in zip(ranks.tolist(), bins.tolist(), strict=True):
        before = int(ends[b - 1]) if b else 0
        value_at[rank] = (b << 16) + int(np.searchsorted(np.cumsum(lower[b]), rank - before, side="right"))
    low = np.array([value_at[int(k)] for k in np.floor(at)], dtype=np.float64)
    high_value = np.array([value_at[int(k)] for k in np.ceil(at)], dtype=np.float64)
    return (low + (high_value - low) * (at - np.floor(at))).tolist()


def _bits(blocks: Iterator[NDArray[np.integer]], kinds: type[LinkFlag] | type[Signal]) -> str:
    found, total = dict.fromkeys(kinds, 0), 0
    for some in blocks:
        total += len(some)
        for kind in kinds:
            found[kind] += int(np.count_nonzero(some & some.dtype.type(int(kind))))
    shown = [(kind, number) for kind, number in found.items() if number]
    return ", ".join(f"{_names(int(kind), kinds)} {number:,} ({_share(number, total)})" for kind, number in shown)


def _names(value: int, kinds: type[LinkFlag] | type[Signal]) -> str:
    return ", ".join(str(kind.name).lower() for kind in kinds if value & kind)


def _share(part: int, whole: int) -> str:
    return f"{part / whole:.1%}" if whole else "0%"


def _size(n_bytes: int) -> str:
    value = float(n_bytes)
    for unit in ("bytes", "kB", "MB", "GB"):
        if value < 1000:
            return f"{value:,.0f} {unit}" if unit == "bytes" else f"{value:,.1f} {unit}"
        value /= 1000
    return f"{value:,.1f} TB"


def find_page(corpus: Corpus, wanted: str) -> int:
    """A page by its URL, its page id, or the source's own id; -1 where the corpus has none of these."""
    page = int(corpus.find([wanted])[0])
    if page < 0 and wanted.isdigit() and int(wanted) < corpus.n_pages:
        return int(wanted)
    if page < 0 and "/" not in wanted:
        return int(corpus.find_doc_ids([wanted])[0])
    return page
