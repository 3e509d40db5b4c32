"""The configs of the data stages, in the order of the chain. Frozen dataclasses only: importing this is cheap (no numpy).

    source -> corpus -> scores -> crawl(policy) -> selection -> tokens -> (training.configs: checkpoint -> results -> report)

What each stage writes is in docs/artifacts.md.
"""

import re
from typing import ClassVar, Literal, get_args

from craw4llm.corpus.clueweb22_files import check_streams
from craw4llm.dataclass import dataclass
from craw4llm.errors import ConfigError
from craw4llm.fingerprint import External
from craw4llm.stage import Config

Policy = Literal[
    "quality",
    "indegree",
    "pagerank",
    "harmonic",
    "breadth_first",
    "random",
    "seen_indegree",
    "parent_first",
    "parent_mean",
    "parent_max",
    "parent_min",
    "predicted",
]
Knowledge = Literal["target_text", "full_graph", "live"]
Dangling = Literal["dead", "outside"]
Obeyed = Literal["no_train", "noai", "noarchive", "noindex", "nosnippet", "tdm_reserved"]  # craw4llm.corpus.records.Signal
Column = Literal[
    "url", "text", "outlinks", "anchors", "link_flags", "doc_id", "language", "canonical", "signals", "score", "package"
]  # of Parquet and JSON lines: docs/corpus.md
Found = Literal["off", "report", "drop"]  # what is done about copies

# What a policy may know when it orders the frontier (docs/artifacts.md, "Policies"). `target_text` costs a fetch per discovered page.
KNOWLEDGE: dict[str, Knowledge] = {
    "quality": "target_text",
    "indegree": "full_graph",
    "pagerank": "full_graph",
    "harmonic": "full_graph",
    "breadth_first": "live",
    "random": "live",
    "seen_indegree": "live",
    "parent_first": "live",
    "parent_mean": "live",
    "parent_max": "live",
    "parent_min": "live",
    "predicted": "live",
}
NEEDS_RANK = frozenset({"pagerank", "harmonic"})
OTHER_SCORE = re.compile(r"score_[a-z0-9_]+")  # names of a crawl's inputs that are further scorers
NEEDS_SCORER = frozenset({"quality", "parent_first", "parent_mean", "parent_max", "parent_min", "predicted"})


@dataclass(frozen=True, kw_only=True)
class SyntheticWeb:
    """A deterministic web with planted page quality that links follow (craw4llm.corpus.synthetic).

    homophily: share of a page's links that prefer targets of like quality; the rest go anywhere on the web.
    dead_share: share of links that lead to URLs that do not exist.
    host_skew: hosts have 1 / rank^host_skew of the pages; 0: all the same. hub_share: of the links that do not follow quality, the share
    that goes to hubs (home pages, and some others by a power law). navigation_links: links of every page into its own host, the first to
    its home page. empty_share, copy_share: pages without text, and near-copies of another page.
    traps: further hosts with a calendar of `trap_pages` pages each, without worth, each linked to the next, the last to days that do not
    exist; two pages in a hundred link to one. link_texts: links have anchor texts, in words that show the target's quality, and flags.
    """

    pages: int = 4000
    hosts: int = 80
    mean_links: float = 12.0
    homophily: float = 0.7
    dead_share: float = 0.08
    host_skew: float = 0.7
    hub_share: float = 0.5
    navigation_links: int = 1
    empty_share: float = 0.02
    copy_share: float = 0.02
    traps: int = 0
    trap_pages: int = 365
    link_texts: bool = False
    seed: int = 0


@dataclass(frozen=True, kw_only=True)
class SyntheticText:
    """Labelled text in the words of the synthetic web, for training a scorer where no other text is at hand."""

    lines: int = 2000
    seed: int = 0


@dataclass(frozen=True, kw_only=True)
class Length:
    """Length of a page's text. unit "tokens" needs the input `tokenizer` (end-of-text not counted); words are split at white space."""

    unit: Literal["chars", "bytes", "words", "tokens"] = "chars"


@dataclass(frozen=True, kw_only=True)
class UrlFeature:
    """A number read from the canonical URL alone: its length in characters, the parts of its path, its digits, its query parameters."""

    feature: Literal["length", "depth", "digits", "parameters"] = "depth"


@dataclass(frozen=True, kw_only=True)
class GraphMeasure:
    """A centrality over the whole link graph, dead links included (input `corpus`).

    damping, tolerance: of PageRank, which is iterated until the L1 change of an iteration is under `tolerance`.
    registers: of HyperBall (a power of two), for the harmonic centrality; the standard error of each distance count is
        1.04 / sqrt(registers).
    """

    damping: float = 0.85
    tolerance: float = 1e-6
    registers: int = 64


@dataclass(frozen=True, kw_only=True)
class Ensemble:
    """A weighted sum of other scorers, which are inputs of any name. A page that one of them does not score has no score.

    weights: (input name, weight). normalise: each score is first put through (x - mean) / deviation ("zscore") or
    (x - low) / (high - low) ("minmax"). constants: (input name, mean or low, deviation or high); without them they are fitted to
    `fit_pages` pages of the input `corpus`, drawn by hash.
    """

    weights: tuple[tuple[str, float], ...]
    normalise: Literal["none", "zscore", "minmax"] = "none"
    constants: tuple[tuple[str, float, float], ...] = ()
    fit_pages: int = 10_000


@dataclass(frozen=True, kw_only=True)
class Encoder:
    """A sentence encoder with a regression head (the FineWeb-Edu kind): a folder that transformers reads as a sequence classifier.

    output: index of the model's output that is the score. max_tokens: the rest of a longer page is not read.
    batch_rows, pad_to: pages go through the model in batches of exactly so many rows, padded to a multiple of `pad_to` tokens, so that a
    page's score does not depend on its neighbours; both shape the arithmetic, so they are part of the identity.
    """

    model: External
    output: int = 0
    max_tokens: int = 512
    batch_rows: int = 8
    pad_to: int = 64


@dataclass(frozen=True, kw_only=True)
class EntryPoint:
    """A scorer of an installed package, found in the entry-point group `craw4llm.scorers` (craw4llm.scoring.plugins).

    version: what the package must declare, so that a change of its code is a new scorer. options: handed to it.
    """

    name: str
    version: str
    options: tuple[tuple[str, str], ...] = ()


ScorerSource = External | SyntheticText | Length | UrlFeature | GraphMeasure | Ensemble | Encoder | EntryPoint


@dataclass(frozen=True, kw_only=True)
class HtmlLimits:
    """What reading one HTML page may take; a page that takes more is a reject with its reason (craw4llm.corpus.extraction).

    page_bytes: HTML after HTTP decoding. page_seconds: processor time. memory_bytes: address space.
    """

    page_bytes: int = 5_000_000
    page_seconds: float = 20.0
    memory_bytes: int = 1 << 30


@dataclass(frozen=True, kw_only=True)
class WarcArchive:
    """WARC files with what Common Crawl derives from them (craw4llm.corpus.warc). A WARC file or folder as a plain source has the defaults.

    files: one file, or a folder of WARC, WET and WAT files. text: where the folder has a WET record of a page too, its text is the page's
        main content ("html"), or the record's ("wet"). links: likewise the page's ("html") or the WAT record's ("wat").
    Pages of WET files whose WARC file is not there have the text of the WET record, and the links of the WAT record where there is one.
    """

    files: External
    text: Literal["html", "wet"] = "html"
    links: Literal["html", "wat"] = "html"


@dataclass(frozen=True, kw_only=True)
class ClueWeb22:
    """A ClueWeb22 folder as delivered (txt, outlink and, where counted, inlink); texts stay where they are.

    streams: what the collection is: languages ("en", "zh_chs") or beginnings of streams ("en0": the released code's en00 to en09;
        "en00": English of category B). Only these files are read, and links elsewhere leave the collection. (): all that is delivered.
    links: "compiled" reads every record once, into page table and link graph. "in_place" reads nothing but the offsets: each page's links
        are read when a crawl follows them. For one crawl of a small share of the pages; no in-degrees, no held-out pages, no dead links.
    indegree: distinct linking pages of the collection ("links"), or the anchors in the inlink records ("inlink": repeats, self-links and
        pages that were not delivered count, as in the released code).
    targets: links are resolved by the document ids in them ("ids"), or by their URLs ("urls"); "auto": by ids where a first look finds
        any. min_resolved: with a smaller share of links to pages or ids of the collection the build fails.
    """

    folder: External
    streams: tuple[str, ...] = ()
    links: Literal["compiled", "in_place"] = "compiled"
    indegree: Literal["links", "inlink"] = "links"
    targets: Literal["auto", "ids", "urls"] = "auto"
    min_resolved: float = 0.05


@dataclass(frozen=True, kw_only=True)
class UrlRules:
    """What is one page, beyond the URL standard's canonical form (craw4llm.corpus.urls).

    query: parameters are "kept" as written, or "sorted" by name. drop_tracking: parameters of the shipped list (utm_source, gclid, ...)
    are taken out.
    """

    query: Literal["kept", "sorted"] = "kept"
    drop_tracking: bool = False


@dataclass(frozen=True, kw_only=True)
class CorpusConfig(Config):
    """-> page table, texts, link graph, held-out ids.

    source: a file or folder in one of the forms of docs/corpus.md; WarcArchive or ClueWeb22, with their choices; or
        SyntheticWeb.
    html: limits for reading one HTML page (HTML tree and WARC).
    columns: (name that the corpus uses, name in the source) for Parquet and JSON lines whose fields are called otherwise.
    heldout_fraction: share of the pages drawn by hash of their URL, before any policy: never crawlable, never selected.
    heldout_by: the hash is of each page's URL, or of its host, so that a host is held out whole.
    heldout_min_chars: a page with less text is never drawn as held-out.
    dangling_links: links to URLs that the corpus does not hold are "dead" (requested once, counted as a fetch) or "outside"
        (not followed, as the paper filters links that leave its collection).
    max_text_chars: the rest of a longer text is cut off, and counted.
    url_rules: what counts as one URL. duplicates: of several records of one URL, the "first" or the "last" in the source's order is the
        page; the others are rejects.
    nofollow: links that their page marks nofollow, ugc or sponsored, and all links of a page whose owner says so, are followed like any
        other, or dropped and counted.
    obey: pages whose owner asks for one of these (a robots meta element or header, an AI preference) are left out, and counted.
    max_reject_share: with a larger share of unusable records (repeats of a URL not counted) the build fails.
    """

    stage: ClassVar[str] = "corpus"
    version: ClassVar[int] = 3  # 3: links of pages whose <base> has no path
    source: External | SyntheticWeb | WarcArchive | ClueWeb22
    html: HtmlLimits = HtmlLimits()
    columns: tuple[tuple[str, str], ...] = ()
    heldout_fraction: float = 0.01
    heldout_by: Literal["page", "host"] = "page"
    heldout_min_chars: int = 200
    dangling_links: Dangling = "dead"
    max_text_chars: int = 100_000
    url_rules: UrlRules = UrlRules()
    duplicates: Literal["first", "last"] = "first"
    nofollow: Literal["follow", "drop"] = "follow"
    obey: tuple[Obeyed, ...] = ()
    max_reject_share: float = 0.5

    def check(self) -> None:
        if not 0 <= self.heldout_fraction < 1:
            raise self.refuse("heldout_fraction", "at least 0 and under 1")
        if self.heldout_by not in ("page", "host"):
            raise self.refuse("heldout_by", "page or host")
        if self.dangling_links not in get_args(Dangling):
            raise self.refuse("dangling_links", "dead or outside")
        if self.max_text_chars < 1:
            raise self.refuse("max_text_chars", "at least 1")
        if self.html.page_bytes < 1 or not 0 < self.html.page_seconds <= 3600 or self.html.memory_bytes < 64 << 20:
            raise self.refuse("html", "page_bytes of at least 1, page_seconds above 0 and up to 3600, memory_bytes of at least 64 MiB")
        if isinstance(self.source, WarcArchive) and (self.source.text not in ("html", "wet") or self.source.links not in ("html", "wat")):
            raise self.refuse("source", "text html or wet, and links html or wat")
        if self.url_rules.query not in ("kept", "sorted"):
            raise self.refuse("url_rules", 'query "kept" or "sorted"')
        if self.duplicates not in ("first", "last"):
            raise self.refuse("duplicates", "first or last")
        if self.nofollow not in ("follow", "drop"):
            raise self.refuse("nofollow", "follow or drop")
        if not set(self.obey) <= set(get_args(Obeyed)) or list(self.obey) != sorted(set(self.obey)):
            raise self.refuse("obey", f"names in alphabetical order, of {', '.join(get_args(Obeyed))}")
        if not 0 <= self.max_reject_share < 1:
            raise self.refuse("max_reject_share", "at least 0 and under 1")
        unknown = {name for name, _ in self.columns} - set(get_args(Column))
        if unknown or len({name for name, _ in self.columns}) < len(self.columns):
            raise self.refuse("columns", f"pairs (name, name in the source), each name once, of {', '.join(get_args(Column))}")
        if isinstance(self.source, ClueWeb22):
            self._check_clueweb22(self.source)

    def _check_clueweb22(self, source: ClueWeb22) -> None:
        wrong = check_streams(source.streams)
        if wrong is None and list(source.streams) != sorted(set(source.streams)):
            wrong = f"{', '.join(source.streams)} are given; expected each once, in alphabetical order"
        if wrong is not None:
            raise ConfigError(f"corpus: streams: {wrong}")
        if source.links not in ("compiled", "in_place") or source.indegree not in ("links", "inlink"):
            raise self.refuse("source", "links compiled or in_place, indegree links or inlink")
        if source.targets not in ("auto", "ids", "urls") or not 0 <= source.min_resolved <= 1:
            raise self.refuse("source", "targets auto, ids or urls, and min_resolved from 0 to 1")
        dead_or_held = self.heldout_fraction or self.dangling_links != "outside"
        if source.links == "in_place" and (dead_or_held or source.indegree != "links" or source.targets == "urls"):
            raise ConfigError(
                "corpus: links='in_place' knows no held-out pages, dead links or in-degrees and resolves by ids alone; give "
                "heldout_fraction=0, dangling_links='outside', indegree='links', or links='compiled'"
            )


@dataclass(frozen=True, kw_only=True)
class ScorerConfig(Config):
    """[corpus] [tokenizer] [other scorers] -> a scorer: score(page) depends on the page's text (or URL, or place in the graph) alone.

    kind "fasttext": a given supervised fastText model; the score is P(label), clipped to [0, 1].
    kind "train_fasttext": a model trained here from labelled lines (`__label__x text`), bigrams, one thread, fixed seed. Lines
        that begin with `#` say where the text comes from and go into the manifest.
    kind "table": scores read from a Parquet file with the columns `url` and `column`.
    kind "length": `Length`. "url": `UrlFeature`. "indegree", "pagerank", "harmonic": `GraphMeasure`. "ensemble": `Ensemble`.
        "encoder": `Encoder`. "python": `EntryPoint`.

    route: how a fastText model is computed. "library": by the fastText library, any model. "exact": own code, the library's bits, twice
        as fast. "projected": own code, one number per word, 6 times as fast or more, within 1e-6 of the library. The last two are for
        softmax models of two labels. Scores that differ in the last bit order pages differently: the route is part of the identity.
    reading: how a fastText model reads a page. "clean": craw4llm.scoring.scorer. "released": as the released code does, its scores
        unclipped, an empty page scored like any other; "released_normalized": with its text_normalize.
    """

    stage: ClassVar[str] = "scorer"
    version: ClassVar[int] = 2  # 2: last bits of the exact route
    variadic: ClassVar[bool] = True
    kind: Literal[
        "fasttext", "train_fasttext", "table", "length", "url", "indegree", "pagerank", "harmonic", "ensemble", "encoder", "python"
    ]
    source: ScorerSource
    route: Literal["library", "exact", "projected"] = "library"
    reading: Literal["clean", "released", "released_normalized"] = "clean"
    label: str = "__label__hq"
    column: str = "score"
    dim: int = 32
    epochs: int = 5
    learning_rate: float = 0.2
    word_ngrams: int = 2
    buckets: int = 100_000
    seed: int = 1

    def check(self) -> None:
        if self.kind not in _SOURCE_OF:
            raise self.refuse("kind", f"one of {', '.join(_SOURCE_OF)}")
        if not isinstance(self.source, _SOURCE_OF[self.kind]):
            allowed = " or ".join(kind.__name__ for kind in _SOURCE_OF[self.kind])
            raise self.refuse("source", f"{allowed} for kind {self.kind!r}")
        if isinstance(self.source, GraphMeasure):
            registers = self.source.registers
            if not 0 <= self.source.damping < 1 or not 0 < self.source.tolerance < 1:
                raise self.refuse("source", "a damping of at least 0 and under 1, and a tolerance between 0 and 1")
            if registers < 16 or registers > 1 << 16 or registers & (registers - 1):
                raise self.refuse("source", "a power of two of registers, from 16 to 65,536")
        if isinstance(self.source, Ensemble):
            names = [name for name, _ in self.source.weights]
            known = [name for name, _, _ in self.source.constants]
            if not names or len(set(names)) < len(names) or "corpus" in names:
                raise self.refuse("source", "weights of one scorer or more, each named once, none named `corpus`")
            if known and (self.source.normalise == "none" or sorted(known) != sorted(names)):
                raise self.refuse("source", "constants for every weight, with a normalisation")
            for name, low, high in self.source.constants:
                if (high <= 0) if self.source.normalise == "zscore" else (high <= low):
                    raise self.refuse("source", f"a deviation above 0, or a high above the low, for {name}")
        if self.route not in ("library", "exact", "projected") or (self.route != "library" and not self.kind.endswith("fasttext")):
            raise self.refuse("route", "library, exact or projected for a fastText model, library for other scorers")
        if self.reading not in ("clean", "released", "released_normalized"):
            raise self.refuse("reading", "clean, released or released_normalized")
        if self.reading != "clean" and not self.kind.endswith("fasttext"):
            raise self.refuse("reading", "clean, but for a fastText model")
        if self.reading == "released_normalized" and self.route != "library":
            raise self.refuse("reading", "clean or released, but for the route library")

    def check_inputs(self, names: frozenset[str]) -> None:
        needs: set[str] = set()
        if self.kind in ("indegree", "pagerank", "harmonic"):
            needs = {"corpus"}
        elif isinstance(self.source, Length) and self.source.unit == "tokens":
            needs = {"tokenizer"}
        elif isinstance(self.source, Ensemble):
            fitted = self.source.normalise != "none" and not self.source.constants
            needs = {name for name, _ in self.source.weights} | ({"corpus"} if fitted else set())
        if needs != names:
            raise ConfigError(f"scorer: kind {self.kind!r} takes the inputs {sorted(needs)}; given are {sorted(names)}")


# kind of a scorer -> what its source may be
_SOURCE_OF: dict[str, tuple[type, ...]] = {
    "fasttext": (External,),
    "train_fasttext": (External, SyntheticText),
    "table": (External,),
    "length": (Length,),
    "url": (UrlFeature,),
    "indegree": (GraphMeasure,),
    "pagerank": (GraphMeasure,),
    "harmonic": (GraphMeasure,),
    "ensemble": (Ensemble,),
    "encoder": (Encoder,),
    "python": (EntryPoint,),
}


@dataclass(frozen=True, kw_only=True)
class ScoreConfig(Config):
    """corpus, scorer -> one float32 score for every page of the corpus (NaN: no score, with a reason)."""

    stage: ClassVar[str] = "score"
    inputs: ClassVar[tuple[str, ...]] = ("corpus", "scorer")


@dataclass(frozen=True, kw_only=True)
class CrawlConfig(Config):
    """corpus [, scorer] [, rank] [, match] [, lengths] [, score_*] -> what was discovered, fetched and crawled, in order.

    rank: for the policies pagerank and harmonic, the scorer of that kind over the same corpus. lengths: for budget_tokens, a scorer of kind
    "length" in tokens. Inputs named `score_<name>` are further scorers: what they say of the fetched pages is kept beside the crawl.

    Mode "paper": Algorithm 1 of Craw4LLM (arXiv 2502.13347). All seeds are crawled first; then batches of the `batch_pages`
    best frontier pages. The crawl goes on until it has covered *every* budget that is given, and ends exactly there:

    budget_pages: pages crawled. budget_fetches: fetches (requests: pages whose text was read, plus dead links).
    match_fetches: as many fetches as the crawl given as the input `match` made. budget_tokens: tokens of the pages crawled, one
        end-of-text a page included.
    Mode "released" is the crawl of the released code with its warts (craw4llm.crawl.released); its --seed is `rng_seed`, 42 there.

    seeds: a file with one URL a line; without it `seed_count` pages drawn by a hash of (seed_set, URL).
    rng_seed: of the random policy, and of what `predicted` explores. explore_share: share of the targets that `predicted` crawls as soon as
        it meets them.
    pages_per_host, pages_per_domain: at most so many pages crawled of a host, or of a registered domain (None: no cap); seeds count, but
        are crawled whatever the caps say. restart_seeds: when nothing is left to crawl, so many further pages of the draw of seeds are the
        next seeds, again and again (0: the crawl ends there).
    """

    stage: ClassVar[str] = "crawl"
    variadic: ClassVar[bool] = True
    inputs: ClassVar[tuple[str, ...]] = ("corpus",)
    optional_inputs: ClassVar[tuple[str, ...]] = ("scorer", "rank", "match", "lengths")
    policy: Policy
    budget_pages: int | None = None
    budget_fetches: int | None = None
    budget_tokens: int | None = None
    match_fetches: bool = False
    batch_pages: int = 50
    mode: Literal["paper", "released"] = "paper"
    seeds: External | None = None
    seed_count: int = 50
    seed_set: int = 0
    rng_seed: int = 0
    explore_share: float = 0.05
    pages_per_host: int | None = None
    pages_per_domain: int | None = None
    restart_seeds: int = 0

    def check(self) -> None:
        if not 0 <= self.explore_share < 1:
            raise self.refuse("explore_share", "at least 0 and under 1")
        if self.policy not in get_args(Policy):
            raise self.refuse("policy", f"one of {', '.join(get_args(Policy))}")
        if self.mode not in ("paper", "released"):
            raise self.refuse("mode", "paper or released")
        if self.mode == "released":
            if self.policy not in ("quality", "indegree", "random"):
                raise self.refuse("policy", "quality, indegree or random in mode released: the released code has no other")
            if self.seeds is None:
                raise self.refuse("seeds", "a file of seeds in mode released")
            if self.budget_pages is None or self.budget_fetches is not None or self.budget_tokens is not None or self.match_fetches:
                raise self.refuse("budget_pages", "a budget in pages crawled alone in mode released")
            for field in ("pages_per_host", "pages_per_domain", "restart_seeds"):
                if getattr(self, field):
                    raise self.refuse(field, "none in mode released: the released code has no such thing")
        budgets = ("budget_pages", "budget_fetches", "budget_tokens")
        for field in (*budgets, "pages_per_host", "pages_per_domain"):
            if getattr(self, field) is not None and getattr(self, field) < 1:
                raise self.refuse(field, "at least 1")
        if all(getattr(self, field) is None for field in budgets) and not self.match_fetches:
            raise self.refuse("budget_pages", "a budget: budget_pages, budget_fetches, budget_tokens or match_fetches")
        if self.restart_seeds < 0:
            raise self.refuse("restart_seeds", "0 or more")
        if self.batch_pages < 1:
            raise self.refuse("batch_pages", "at least 1")
        if self.seeds is None and self.seed_count < 1:
            raise self.refuse("seed_count", "at least 1")

    def check_inputs(self, names: frozenset[str]) -> None:
        others = sorted(name for name in names - {*self.inputs, *self.optional_inputs} if not OTHER_SCORE.fullmatch(name))
        if others or "corpus" not in names:
            takes = "corpus, [scorer], [rank], [match], [lengths] and [score_<name>] with a name of small letters, digits and _"
            raise ConfigError(f"crawl: given the inputs {', '.join(sorted(names)) or 'none'}; it takes {takes}")
        if (self.budget_tokens is not None) != ("lengths" in names):
            raise self.refuse("budget_tokens", "a number of tokens exactly when the input `lengths` is given")
        if self.policy in NEEDS_SCORER and "scorer" not in names:
            raise self.refuse("policy", "a policy that needs no scores, or the input `scorer`")
        counts = self.mode == "released" and self.policy == "indegree"  # may be given the anchor counts of the inlink files
        if not counts and (self.policy in NEEDS_RANK) != ("rank" in names):
            raise self.refuse("policy", f"{' or '.join(sorted(NEEDS_RANK))} exactly when the input `rank` is given")
        if self.match_fetches != ("match" in names):
            raise self.refuse("match_fetches", "true exactly when the input `match` is given")


@dataclass(frozen=True, kw_only=True)
class SelectConfig(Config):
    """corpus [, scorer] [, crawl] [, scores] [, match] [, tokenizer] [, other] -> kept page ids.

    pool: "crawled" or "fetched" pages of the input `crawl`; the whole "corpus" (the oracle; needs the input `scores`); or the pages
        "listed" in `ids`: a file with one URL or document id a line, or a folder of the released code's iter_*.docids.txt.
    prefix_pages / prefix_fetches: only the first so many pages crawled (or listed), or fetches made; match_fetches: as many fetches as
        the crawl given as the input `match` made. A prefix longer than the crawl is an error.
    keep: "all" of the pool in its order; the `keep_pages` with the highest score ("top"; over the corpus: the strict oracle); all with a
        score of at least `min_score`, best first ("threshold"); or a seeded uniform sample of `keep_pages` from the `top_fraction` of the
        whole corpus with the highest score ("sample_top": the paper's oracle).
    keep_tokens: instead of keep_pages, and with "all": pages in order until they have so many tokens (end-of-text included) under the
        input `tokenizer`; the page that reaches the number is kept whole.
    exact_duplicates, near_duplicates: of pages kept before, "off", "report" or "drop". Exact: the text but for case and white space.
        Near: craw4llm.selection.near_copies, with near_threshold, near_permutations and near_shingle_words; about 6 KB of memory a page.
    heldout_copies: the same of pages that are copies, exact or near, of a held-out page.
    decontaminate: a folder of evaluation files (JSON lines, a file a task); pages that share a run of `ngram_words` words with an item
        are dropped.
    Held-out, unscored (for all but "all") and empty pages are dropped and counted. Ties break by page id. With the input `scores`,
    precision and recall against the corpus's best `top_fraction` are counted; with `other`, a selection, the pages shared with it.
    """

    stage: ClassVar[str] = "select"
    version: ClassVar[int] = 2
    inputs: ClassVar[tuple[str, ...]] = ("corpus",)
    optional_inputs: ClassVar[tuple[str, ...]] = ("scorer", "crawl", "scores", "match", "tokenizer", "other")
    pool: Literal["crawled", "fetched", "corpus", "listed"]
    prefix_pages: int | None = None
    prefix_fetches: int | None = None
    match_fetches: bool = False
    ids: External | None = None
    keep: Literal["all", "top", "threshold", "sample_top"] = "all"
    keep_pages: int | None = None
    keep_tokens: int | None = None
    min_score: float | None = None
    top_fraction: float = 0.1
    sample_seed: int = 0
    exact_duplicates: Found = "report"
    near_duplicates: Found = "report"
    heldout_copies: Found = "drop"
    near_threshold: float = 0.8
    near_permutations: int = 128
    near_shingle_words: int = 5
    decontaminate: External | None = None
    ngram_words: int = 13

    def check(self) -> None:
        if self.pool not in ("crawled", "fetched", "corpus", "listed"):
            raise self.refuse("pool", "crawled, fetched, corpus or listed")
        if self.keep not in ("all", "top", "threshold", "sample_top"):
            raise self.refuse("keep", "all, top, threshold or sample_top")
        if self.keep_tokens is not None and (self.keep_tokens < 1 or self.keep == "threshold" or self.keep_pages is not None):
            raise self.refuse("keep_tokens", "at least 1, without keep_pages and not with keep='threshold'")
        if self.keep in ("top", "sample_top") and self.keep_tokens is None and (self.keep_pages is None or self.keep_pages < 1):
            raise self.refuse("keep_pages", f"at least 1 with keep={self.keep!r}")
        if self.keep in ("all", "threshold") and self.keep_pages is not None:
            raise self.refuse("keep_pages", f"none with keep={self.keep!r}")
        if (self.keep == "threshold") != (self.min_score is not None):
            raise self.refuse("min_score", "a score exactly with keep='threshold'")
        if not 0 < self.top_fraction <= 1:
            raise self.refuse("top_fraction", "above 0 and at most 1")
        if self.pool == "corpus" and self.keep == "all":
            raise self.refuse("keep", "'top', 'threshold' or 'sample_top' for the pool 'corpus'")
        if self.pool != "corpus" and self.keep == "sample_top":
            raise self.refuse("keep", "'all', 'top' or 'threshold' for a pool from a crawl")
        prefixes = [self.prefix_pages is not None, self.prefix_fetches is not None, self.match_fetches]
        if sum(prefixes) > 1 or (self.pool == "corpus" and any(prefixes)):
            raise self.refuse("prefix_pages", "at most one prefix, and none for the pool 'corpus'")
        if self.pool == "listed" and (self.prefix_fetches is not None or self.match_fetches):
            raise self.refuse("prefix_fetches", "none for a list of ids, which does not say what was fetched")
        if (self.pool == "listed") != (self.ids is not None):
            raise self.refuse("ids", "a file or folder of ids exactly with pool='listed'")
        for field in ("exact_duplicates", "near_duplicates", "heldout_copies"):
            if getattr(self, field) not in get_args(Found):
                raise self.refuse(field, "off, report or drop")
        check_similarity(self)

    def check_inputs(self, names: frozenset[str]) -> None:
        if ("crawl" in names) != (self.pool in ("crawled", "fetched")):
            raise self.refuse("pool", "'corpus' or 'listed', or the input `crawl` for the pools 'crawled' and 'fetched'")
        if self.pool == "corpus" and "scores" not in names:
            raise self.refuse("pool", "the input `scores` for the pool 'corpus'")
        if self.pool != "corpus" and self.keep != "all" and not names & {"scorer", "scores"}:
            raise self.refuse("keep", "'all', or the input `scorer` or `scores`")
        if self.match_fetches != ("match" in names):
            raise self.refuse("match_fetches", "true exactly when the input `match` is given")
        if (self.keep_tokens is not None) != ("tokenizer" in names):
            raise self.refuse("keep_tokens", "a number of tokens exactly when the input `tokenizer` is given")


@dataclass(frozen=True, kw_only=True)
class OverlapConfig(Config):
    """corpus, selection -> what the kept pages share with evaluation items, per task, and groups of copies among them.

    tasks: a folder of evaluation files (JSON lines, a file a task). ngram_words: length of a shared run of words.
    near_*: as in SelectConfig.
    """

    stage: ClassVar[str] = "overlap"
    inputs: ClassVar[tuple[str, ...]] = ("corpus", "selection")
    tasks: External
    ngram_words: int = 13
    near_threshold: float = 0.8
    near_permutations: int = 128
    near_shingle_words: int = 5

    def check(self) -> None:
        check_similarity(self)


def check_similarity(config: SelectConfig | OverlapConfig) -> None:
    """Raises ConfigError for parameters of near-copies and runs of words that cannot be meant."""
    if not 0 < config.near_threshold <= 1:
        raise config.refuse("near_threshold", "above 0 and at most 1")
    if config.near_permutations < 16:
        raise config.refuse("near_permutations", "at least 16")
    for field in ("near_shingle_words", "ngram_words"):
        if getattr(config, field) < 1:
            raise config.refuse(field, "at least 1")


@dataclass(frozen=True, kw_only=True)
class TokenizerConfig(Config):
    """[corpus] -> a tokenizer: a given `tokenizer.json`, or a byte-level BPE trained on the corpus (held-out pages left out).

    vocab_size, train_bytes: of the BPE; it is trained on pages in the order of a hash of their URL until `train_bytes` are read.
    end_of_text: the special token that ends a document. The trained BPE gives it id 0.
    """

    stage: ClassVar[str] = "tokenizer"
    optional_inputs: ClassVar[tuple[str, ...]] = ("corpus",)
    source: External | None = None
    vocab_size: int = 4096
    train_bytes: int = 20_000_000
    end_of_text: str = "<|endoftext|>"

    def check(self) -> None:
        if self.vocab_size < 257 or self.vocab_size > 65536:
            raise self.refuse("vocab_size", "257 to 65,536")

    def check_inputs(self, names: frozenset[str]) -> None:
        if (self.source is None) != ("corpus" in names):
            raise self.refuse("source", "a tokenizer.json, or the input `corpus` to train a tokenizer on")


@dataclass(frozen=True, kw_only=True)
class TokenizeConfig(Config):
    """corpus, tokenizer [, selection] -> MDS shards of samples of `sample_tokens` token ids.

    pages "selection": the kept pages in the order of the selection, packed across documents, the samples shuffled by
        `shuffle_seed`. pages "heldout": the held-out pages by id, not shuffled, with the place of each page kept.
    sample_tokens: context length of the model plus one (2,049 in the paper's recipe).
    max_page_chars: only so many characters from the start of each page (small experiments evaluate on many pages, not on long ones).
    specials: what the spelling of a special token in a page becomes: plain "text", or its id ("ids": the reference's behaviour, which lets
        a page end its own document).
    compression: of the shards; compressed ones are read into memory whole.
    """

    stage: ClassVar[str] = "tokenize"
    inputs: ClassVar[tuple[str, ...]] = ("corpus", "tokenizer")
    optional_inputs: ClassVar[tuple[str, ...]] = ("selection",)
    pages: Literal["selection", "heldout"] = "selection"
    sample_tokens: int = 2049
    shuffle_seed: int = 42
    last_sample: Literal["drop", "pad"] = "drop"
    max_page_chars: int | None = None
    specials: Literal["text", "ids"] = "text"
    compression: Literal["none", "zstd"] = "none"

    def check(self) -> None:
        if self.specials not in ("text", "ids"):
            raise self.refuse("specials", "text or ids")
        if self.compression not in ("none", "zstd"):
            raise self.refuse("compression", "none or zstd")
        if self.sample_tokens < 2:
            raise self.refuse("sample_tokens", "at least 2")
        if self.max_page_chars is not None and self.max_page_chars < 1:
            raise self.refuse("max_page_chars", "at least 1, or None")

    def check_inputs(self, names: frozenset[str]) -> None:
        if (self.pages == "selection") != ("selection" in names):
            raise self.refuse("pages", "'selection' with the input `selection`, 'heldout' without it")
