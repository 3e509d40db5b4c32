"""What each crawl found and what that cost: at the same pages crawled, at the same requests, and what it takes to match the reference.

    at    = yardsticks(study, costs, (1500, 3000))      the points at which crawls are compared
    table = policies_table(study, traces, scores, at)   one row a crawl and point
    pairs = crawl_pairs(table, "quality")               verdicts over replicates (sets of seeds), by paired differences

A point is a number N of pages crawled, with the fetches that the reference's crawl made for them; the best N pages of what a policy
fetched are compared at as many fetches.
"""

import dataclasses
import math
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence

import numpy as np
import pyarrow.parquet as pq
import scipy.stats

from craw4llm.artifact import Artifact
from craw4llm.corpus.reader import Corpus
from craw4llm.corpus.urls import host_of
from craw4llm.crawl.trace import Trace as CrawlTrace
from training.report.analysis import gini, t_interval
from training.report.curves import Ids, Scores, Trace, mean_of_best, mean_of_first
from training.report.lineage import Study, policy_knows
from training.report.tables import Costs, Table, Value, table
from training.report.verdict import Floats, Pair

TOP_HOSTS = 3
MEASURES = {  # column of `policies` -> (heading, unit)
    "mean_score_at_pages": ("Equal pages crawled, mean score of the pages crawled", "mean score"),
    "mean_score_best_at_fetches": ("Equal fetches, mean score of the best pages fetched", "mean score"),
    "top_decile_share_at_pages": ("Equal pages crawled, share of the top tenth crawled", "of the top tenth"),
    "top_decile_share_at_fetches": ("Equal fetches, share of the top tenth fetched", "of the top tenth"),
}


@dataclasses.dataclass(frozen=True)
class Yardstick:
    """A point at which crawls are compared. fetches: replicate -> those of the reference's crawl; a reference that was crawled once is
    the measure of all replicates."""

    pages: int
    keep: int
    fetches: Mapping[int, int]

    def fetches_of(self, replicate: int) -> int | None:
        if replicate in self.fetches:
            return self.fetches[replicate]
        return next(iter(self.fetches.values())) if len(self.fetches) == 1 else None


def yardsticks(study: Study, costs: Mapping[str, Costs], at_pages: Sequence[int]) -> list[Yardstick]:
    """From `at_pages` and the crawls of the reference's policy; without it from the reference arm, or where that has no crawl or no
    results, from the first arm that has."""
    if at_pages:
        policy = study.arms[study.reference].policy if study.reference in study.arms else study.reference
        crawls = study.crawls.get(policy, {})
        found = []
        for pages in sorted(at_pages):
            fetches = {
                r: CrawlTrace(crawl).prefix(pages=pages).fetches
                for r, crawl in sorted(crawls.items())
                if crawl.count("crawled_pages") >= pages
            }
            if fetches:
                found.append(Yardstick(pages, pages, fetches))
        return found
    for name in [study.reference, *study.arms]:
        run = study.arms[name].first if name in study.arms else None
        cost = costs.get(name)
        if run is not None and cost is not None and cost.fetches is not None and cost.pages_crawled is not None:
            return [Yardstick(cost.pages_crawled, int(run.selection.count("kept_pages")), {0: cost.fetches})]
    return []


def policies_table(study: Study, traces: Sequence[Trace], scores: Scores | None, at: Sequence[Yardstick]) -> Table:
    """One row a crawl and yardstick (one a crawl where there is none): its quality at the same pages crawled and at the same fetches."""
    points: Sequence[Yardstick | None] = at or [None]
    return table("policies", (_policy_row(study.crawls[t.policy][t.replicate], t, scores, point) for point in points for t in traces))


def _policy_row(crawl: Artifact, t: Trace, scores: Scores | None, at: Yardstick | None) -> dict[str, Value]:
    """None where the crawl does not reach so far."""
    rows = t.in_crawl_order
    wanted = at.fetches_of(t.replicate) if at else None
    at_pages = at.pages if at is not None and at.pages <= len(rows) else None
    at_fetches = wanted if wanted is not None and wanted <= t.fetches else None
    top = scores.top if scores is not None and scores.top.any() else None
    mean = best = None
    if t.scored and at_pages is not None:
        _, y = mean_of_first(t.score[rows], np.array([at_pages]))
        mean = float(y[0]) if len(y) else None
    if t.scored and at is not None and at_fetches is not None:
        _, y = mean_of_best(t.fetch_rank, t.score, at.keep, np.array([at_fetches]))
        best = float(y[0]) if len(y) else None
    crawled_top = None if top is None or at_pages is None else int(top[t.page[rows[:at_pages]]].sum())
    fetched_top = None if top is None or at_fetches is None else int(top[t.page[t.fetch_rank < at_fetches]].sum())
    size = int(top.sum()) if top is not None else 0
    return {
        "policy": t.policy,
        "replicate": t.replicate,
        "policy_knows": policy_knows(str(crawl.config["policy"])),
        "discovered": crawl.count("discovered"),
        "pages_crawled": crawl.count("crawled_pages"),
        "fetched_pages": crawl.count("fetched_pages"),
        "dead_links": crawl.count("dead_links"),
        "fetches": crawl.count("fetches"),
        "compared_at": at.pages if at else None,
        "at_pages": at_pages,
        "mean_score_at_pages": mean,
        "top_decile_share_at_pages": None if crawled_top is None else crawled_top / size,
        "top_decile_precision_at_pages": None if crawled_top is None or not at_pages else crawled_top / at_pages,
        "at_fetches": at_fetches,
        "best_pages": at.keep if at is not None and at_fetches is not None else None,
        "mean_score_best_at_fetches": best,
        "top_decile_share_at_fetches": None if fetched_top is None else fetched_top / size,
        "stop": str(crawl.manifest["notes"].get("stop", "")),
        "crawl": crawl.fingerprint,
    }


def policy_means(policies: Table) -> Table:
    """One row a policy and yardstick: means over replicates (sets of seeds) with 95% t intervals. None where a replicate lacks a value."""
    groups: dict[tuple[Value, str], list[dict[str, Value]]] = {}
    for row in policies.records():
        groups.setdefault((row["compared_at"], str(row["policy"])), []).append(row)
    made = []
    for (at, policy), rows in groups.items():
        record: dict[str, Value] = {"compared_at": at, "policy": policy, "policy_knows": rows[0]["policy_knows"], "replicates": len(rows)}
        for column in ("at_fetches", *MEASURES, "top_decile_precision_at_pages", "discovered", "fetches", "pages_crawled"):
            values = [row[column] for row in rows]
            known = [float(v) for v in values if isinstance(v, int | float)]
            whole = len(known) == len(rows)
            between = t_interval(known) if whole else None
            record[column] = statistics.fmean(known) if whole else None
            if column in MEASURES:
                record[f"{column}_low"], record[f"{column}_high"] = between or (None, None)
        made.append(record)
    order = {at: k for k, at in enumerate(dict.fromkeys(record["compared_at"] for record in made))}

    def key(record: Mapping[str, Value]) -> tuple[int, float, str]:
        best = record["mean_score_best_at_fetches"]
        return order[record["compared_at"]], -float(best) if isinstance(best, int | float) else math.inf, str(record["policy"])

    return table("policy_means", sorted(made, key=key))


def crawl_pairs(policies: Table, reference: str) -> list[tuple[int, str, Pair]]:
    """(yardstick in pages, measure, pair) of every policy against the reference: the mean of the paired differences over the
    replicates that both have, with Student's 95% interval. One replicate decides nothing."""
    cells: dict[tuple[int, str], dict[tuple[str, int], float]] = {}
    names: list[str] = []
    for row in policies.records():
        names.append(str(row["policy"]))
        for measure in MEASURES:
            value = row[measure]
            if isinstance(row["compared_at"], int) and isinstance(row["replicate"], int) and isinstance(value, int | float):
                cells.setdefault((row["compared_at"], measure), {})[str(row["policy"]), row["replicate"]] = float(value)
    found = []
    for (at, measure), values in cells.items():
        for policy in dict.fromkeys(names):
            if policy != reference:
                found.append((at, measure, paired(policy, reference, values, MEASURES[measure][1])))
    return found


def paired(a: str, b: str, values: Mapping[tuple[str, int], float], unit: str) -> Pair:
    """Two policies over the replicates (sets of seeds) that both have."""
    common = tuple(sorted(r for name, r in values if name == a and (b, r) in values))
    named: dict[str, object] = {"unit": unit, "sampled": "sets of seeds", "higher_is_better": True}
    if not common:
        return Pair(a=a, b=b, missing="no crawl of both reaches so far", **named)  # type: ignore[arg-type]
    differences = [values[a, r] - values[b, r] for r in common]
    mean = statistics.fmean(differences)
    between = t_interval(differences)
    if between is None:
        return Pair(a=a, b=b, difference=mean, replicates=common, **named)  # type: ignore[arg-type]
    low, high = between
    more = None
    if low <= 0 <= high:
        sd = statistics.stdev(differences)
        more = next((m for m in range(1, 101) if (_half(sd, len(common) + m) < abs(mean))), None)
    return Pair(a=a, b=b, difference=mean, low=low, high=high, replicates=common, seeds_known=True, more=more, **named)  # type: ignore[arg-type]


def _half(sd: float, n: int) -> float:
    return float(scipy.stats.t.ppf(0.975, n - 1)) * sd / math.sqrt(n)


def needs_table(study: Study, traces: Sequence[Trace], at: Sequence[Yardstick]) -> Table:
    """What each policy needs until its best N pages are as good as the first N crawled by the reference: pages crawled, fetches and pages
    discovered, each None where its crawl ends before. The paper's "crawled" and "visited" (section 4) for every policy."""
    reference = study.arms[study.reference].policy if study.reference in study.arms else study.reference
    by_policy = {(t.policy, t.replicate): t for t in traces}
    records: list[dict[str, Value]] = []
    for point in at:
        for t in traces:
            own = by_policy.get((reference, t.replicate)) or next((o for o in traces if o.policy == reference), None)
            if own is None or not own.scored or not t.scored or len(own.in_crawl_order) < point.pages:
                continue
            target = _target(own.score[own.in_crawl_order[: point.pages]], point.keep)
            if target is None:
                continue
            crawl = study.crawls[t.policy][t.replicate]
            ordered = t.score[t.in_crawl_order]
            crawled = _first(np.arange(1, len(ordered) + 1), ordered, point.keep, target)
            fetched = _first(t.fetch_rank + 1, t.score, point.keep, target)
            if t.policy == reference:
                crawled, fetched = point.pages, point.fetches_of(t.replicate)
            records.append(
                {
                    "compared_at": point.pages,
                    "policy": t.policy,
                    "replicate": t.replicate,
                    "target_mean_score": target,
                    "pages_crawled_needed": crawled,
                    "fetches_needed": fetched,
                    "discovered_by_then": _discovered(crawl, fetched) if fetched is not None else None,
                    "crawl_pages": len(ordered),
                    "crawl_fetches": t.fetches,
                }
            )
    return table("needs", records)


def _target(score: Floats, keep: int) -> float | None:
    """What the reference's first pages amount to: the mean of their best `keep` scores; where it crawled just so many, of all that have
    one."""
    scored = int(np.isfinite(score).sum())
    return _best_mean(score, scored if len(score) == keep and scored else keep)


def _best_mean(score: Floats, keep: int) -> float | None:
    """Mean of the best `keep` scores; for fewer than `keep`, None."""
    finite = score[np.isfinite(score)]
    if len(finite) < keep:
        return None
    return float(np.partition(finite, len(finite) - keep)[-keep:].mean())


def _first(amount: Ids, score: Floats, keep: int, target: float) -> int | None:
    """The smallest amount (of pages or fetches, one a page, ascending) at which the best `keep` pages so far have a mean of `target`, which
    they never lose again; None if they do not get there."""

    def reached(pages: int) -> bool:
        value = _best_mean(score[:pages], keep)
        return value is not None and value >= target - 1e-12

    if not len(score) or not reached(len(score)):
        return None
    low, high = 0, len(score)  # not reached with `low` pages, reached with `high`
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if reached(middle) else (middle, high)
    return int(amount[high - 1])


def _discovered(crawl: Artifact, fetches: int) -> int | None:
    """Pages discovered up to the end of the iteration in which this fetch was made."""
    rows = pq.read_table(crawl.file("iterations.parquet"), columns=["discovered", "fetched", "dead"])
    total = np.cumsum(rows["fetched"].to_numpy().astype(np.int64) + rows["dead"].to_numpy().astype(np.int64))
    place = min(int(np.searchsorted(total, fetches)), len(total) - 1)
    return int(np.cumsum(rows["discovered"].to_numpy().astype(np.int64))[place])


@dataclasses.dataclass(frozen=True)
class Burden:
    """What a prefix of a crawl asked of the hosts. by_host: host -> requests, dead links among them; None where a page or dead link has no
    URL to tell its host by (graphs without URLs, document ids)."""

    requests: int
    text_bytes: int
    by_host: Mapping[str, int] | None

    @property
    def concentration(self) -> float | None:
        return gini(np.array(list(self.by_host.values()), dtype=np.int64)) if self.by_host is not None else None

    @property
    def top(self) -> list[tuple[str, int]]:
        return sorted((self.by_host or {}).items(), key=lambda item: (-item[1], item[0]))[:TOP_HOSTS]


def burden_of(corpus: Corpus, crawl: Artifact, t: Trace, fetches: int) -> Burden:
    """The first so many fetches of a crawl. Bytes are those of the pages' text: how much HTML came with it is not in a corpus."""
    pages = t.page[t.fetch_rank < fetches]
    by_host: Counter[str] = Counter(corpus.host_pages(pages))
    dead = pq.read_table(crawl.file("dead_links.parquet"), columns=["url", "fetch_rank"])
    ranks = dead["fetch_rank"].to_numpy().astype(np.int64)
    for url in dead["url"].filter(ranks < fetches).to_pylist():
        by_host[host_of(url) if "://" in url else ""] += 1
    known = dict(by_host) if "" not in by_host else None
    return Burden(int(sum(by_host.values())), int(corpus.text_bytes(pages).astype(np.int64).sum()), known)


def burden_table(study: Study, costs: Mapping[str, Costs], by_print: Mapping[str, Trace], at: Sequence[Yardstick]) -> Table:
    """One row an arm that was crawled; without arms, one a policy at the last yardstick (its first replicate)."""
    corpus = Corpus(study.corpus)
    records: list[dict[str, Value]] = []
    for name, arm in study.arms.items():
        run, cost = arm.first, costs.get(name)
        if run is None or run.crawl is None or cost is None or cost.fetches is None:
            continue
        burden = burden_of(corpus, run.crawl, by_print[run.crawl.fingerprint], cost.fetches)
        records.append(_burden_row(name, burden, int(run.selection.count("kept_pages")), int(run.tokens.count("tokens"))))
    if study.crawls_only and at:
        point = at[-1]
        for policy, by_replicate in sorted(study.crawls.items()):
            replicate, crawl = min(by_replicate.items())
            fetches = point.fetches_of(replicate)
            if fetches is not None and fetches <= int(crawl.count("fetches")):
                burden = burden_of(corpus, crawl, by_print[crawl.fingerprint], fetches)
                records.append(_burden_row(policy, burden, point.keep, None))
    return table("burden", records)


def _burden_row(name: str, burden: Burden, kept: int, tokens: int | None) -> dict[str, Value]:
    per_page = kept or None
    hosts = len(burden.by_host) if burden.by_host is not None else None
    return {
        "arm": name,
        "requests": burden.requests,
        "text_bytes": burden.text_bytes,
        "hosts": hosts,
        "kept_pages": kept,
        "kept_tokens": tokens,
        "requests_per_kept_page": burden.requests / per_page if per_page else None,
        "bytes_per_kept_page": burden.text_bytes / per_page if per_page else None,
        "hosts_per_kept_page": hosts / per_page if per_page and hosts is not None else None,
        "requests_per_1000_kept_tokens": 1000 * burden.requests / tokens if tokens else None,
        "bytes_per_kept_token": burden.text_bytes / tokens if tokens else None,
        "hosts_per_1000_kept_tokens": 1000 * hosts / tokens if tokens and hosts is not None else None,
        "gini_over_hosts": burden.concentration,
        "top_host_share": burden.top[0][1] / burden.requests if burden.top else None,
        "top_hosts": ", ".join(f"{host} {count}" for host, count in burden.top),
    }
