"""A deterministic web with planted quality, for tests and for machines where no real pages can be had.

    source = open_synthetic(SyntheticWeb(pages=4000))
    planted_quality(SyntheticWeb(pages=4000))     -> float64[pages], by page id
    training_lines(SyntheticText(lines=2000))     -> ["# ...", "__label__hq the second proof ...", "__label__cc click here ...", ...]

**Quality** in [0, 1] is drawn per host and, around it, per page: most pages are poor, a few are good. **Links** follow it: the share
`homophily` of a page's links goes to pages near it in the order of quality, wherever they are. The rest goes to boilerplate hubs
(home pages, and some others by a power law) and anywhere. So in-degree follows popularity and says nothing about quality. The share
`dead_share` leads to URLs that do not exist.

**Text** shows quality by its words: each sentence is explaining or selling, and a page of quality q explains with probability q. The
share of plain words is the same everywhere. Lengths are log-normal, median about 250 words. Some pages have no text, some are
near-duplicates: another page's text with a sentence more.

**Traps** are hosts with an endless calendar: pages of no worth, each linked to the next and the one before.

Each page's text has its own generator, seeded by (seed, page), so that chunks can be made anywhere. URLs are pairs of numbers until a chunk
is read: about 8 bytes a link and 40 a page.
"""

import dataclasses
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from craw4llm.configs import SyntheticText, SyntheticWeb
from craw4llm.corpus.records import LinkFlag, Page, Reject, Source
from craw4llm.errors import ConfigError

CHUNK_PAGES = 250
MEDIAN_WORDS, SIGMA_WORDS, MAX_WORDS = 250, 0.6, 1500
NEAR = 0.03  # standard deviation, in the order of quality, of the distance between pages whose link follows quality
TRAP_LINK_SHARE = 0.02  # pages that link to a trap
_STRUCTURE, _TEXT, _TRAINING, _TRAPS, _ANCHOR = range(5)  # what a generator is for, so that no two share their numbers
_FILE = "synthetic"

# fmt: off
_EXPLAIN = {
    "noun": """theorem proof method experiment chapter treaty grammar climate energy history century evidence theory lemma measure
        reason definition example cell planet orbit river language sentence verb empire parliament molecule enzyme protein gravity
        voltage circuit algorithm recursion matrix vector integral series triangle fraction probability sample hypothesis variable
        equation harvest migration glacier sediment fossil species habitat forest ocean current symphony sonnet novel essay
        argument premise conclusion axiom philosopher surgeon vaccine membrane neuron synapse telescope spectrum catalyst""",
    "verb": """explains proves describes measures compares derives estimates predicts confirms contradicts supports illustrates extends
        summarises classifies observes records explores translates interprets demonstrates generalises refutes clarifies defines
        traces reconstructs motivates simplifies approximates""",
    "adjective": """careful precise historical gradual linear statistical ancient molecular rigorous empirical formal geological
        classical abstract detailed consistent independent logical numerical continuous finite regional medieval organic sufficient
        necessary plausible systematic thermal reliable""",
    "adverb": """therefore clearly gradually precisely carefully consequently historically roughly independently exactly
        eventually formally usually strictly evidently""",
    "sentence": """
        The {a} {n} {v} the {n} of a {a} {n}.|
        {D}, the {n} {v} why the {n} is {a}.|
        In this chapter a {a} {n} {v} each {n} and each {n}.|
        If the {n} is {a}, then the {n} {v} it {d}.|
        A second {n} {v} the {a} {n}, because every {n} in the {p} is {a}.|
        We first {w} the {n}, and then the {a} {n} follows from the {n}.|
        As the {n} shows, the {p} {d} {v} the {n} of the {n}.|
        Students often ask why a {n} {v} the {p}; the answer is a {a} {n}.|
        The {n} between the {n} and the {n} {v} the {a} {p}.""",
    "infinitive": "define measure compare derive estimate observe classify describe",
}
_SELL = {
    "noun": """coupon checkout discount newsletter deal backlink gallery bonus loan casino ringtone keygen jackpot voucher
        giveaway cookie popup banner clickbait sweepstake wallpaper download torrent codec followers likes hashtag selfie horoscope
        tattoo mattress insurance mortgage warehouse clearance shipping refund cart wishlist subscription membership upgrade trial
        referral affiliate traffic ranking keyword payday lender lottery roulette slots poker replica handbag sneakers sunglasses
        supplement diet detox cleanse""",
    "verb": "buy click share subscribe download grab claim order unlock compare win follow like tweet save join browse tag rate upgrade",
    "adjective": """cheap free best hot exclusive amazing instant limited guaranteed unbelievable secret lowest huge top viral easy
        risk-free premium ultimate discreet genuine discounted fast latest popular sponsored""",
    "adverb": "now today instantly here tonight online cheaply safely always directly",
    "sentence": """
        {V} {a} {n} {d}!|
        {V} here for {a} {n} and {a} {n}, {a} {n}!|
        {A} {n} {a} {n} {n} {d}.|
        Home | {N} | {N} | {N} | {N} | Contact us|
        {V} now, {w} later: {a} {n} for every {p}!|
        Get your {a} {n} {d} and {w} the {a} {n}.|
        Prev | Next | {V} this {n} | {V} the {p}|
        Tags: {n}, {a} {n}, {n} {d}, {n} {p}, {a} {n}.|
        Don't miss our {a} {n}, {w} {d} and {w} the {p}!""",
    "infinitive": "buy click share subscribe download claim order win follow save",
}
_PLAIN = """house road water morning letter table window garden market school story number people family country city place work
    hand night week door picture paper music child friend summer winter street village bread horse ship island mountain bridge"""
_HOST = """amber birch cedar delta ember fjord grove harbor iris juniper kestrel lotus maple nectar orchid pine quartz raven
    sierra thistle umber violet willow yarrow zephyr"""
# fmt: on


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


@dataclasses.dataclass(frozen=True)
class _Style:
    """A way of writing: sentence shapes, and a list of words for each kind of slot in them."""

    shapes: tuple[tuple[str, ...], ...]  # each a sentence in pieces; a piece of one letter in braces is a slot
    slots: dict[str, tuple[str, ...]]


def _style(words: dict[str, str]) -> _Style:
    noun, verb, adjective, adverb = (_words(words[kind]) for kind in ("noun", "verb", "adjective", "adverb"))
    slots = {"n": noun, "v": verb, "a": adjective, "d": adverb, "w": _words(words["infinitive"]), "p": _words(_PLAIN)}
    slots |= {letter.upper(): tuple(word.capitalize() for word in slots[letter]) for letter in ("n", "v", "a", "d")}
    shapes = []
    for line in words["sentence"].split("|\n"):
        pieces = line.strip().replace("{", "\0{").replace("}", "}\0").split("\0")
        shapes.append(tuple(piece for piece in pieces if piece))
    return _Style(tuple(shapes), {f"{{{letter}}}": listed for letter, listed in slots.items()})


_HOSTS = _words(_HOST)
_EXPLAINING, _SELLING = _style(_EXPLAIN), _style(_SELL)


# A URL is (host, number): _HOME, a page's serial number, or _GONE - k for the URL k that does not exist. Hosts behind the last are traps,
# their numbers months.
_HOME, _GONE = -1, -2


@dataclasses.dataclass(frozen=True)
class _Web:
    """The structure, by page in the order of making: hosts one after another, each with its home page first; then the traps.

    host, number: int32[pages], the pages' URLs. link_starts: int64[pages + 1]. link_host, link_number: int32[links]. body: bool[links],
    false for navigation and hubs. link_quality: float32[links], the target's (0 for what does not exist).
    """

    host: NDArray[np.int32]
    number: NDArray[np.int32]
    quality: NDArray[np.float64]
    link_starts: NDArray[np.int64]
    link_host: NDArray[np.int32]
    link_number: NDArray[np.int32]
    body: NDArray[np.bool_]
    link_quality: NDArray[np.float32]


@dataclasses.dataclass(frozen=True)
class PageChunk:
    """Pages of the synthetic web, made where they are read. starts: where each page's links begin in the link arrays."""

    config: SyntheticWeb
    start: int
    host: NDArray[np.int32]
    number: NDArray[np.int32]
    quality: list[float]
    copied: list[int]  # page whose text is copied, -1 for none, -2 for an empty page
    copied_quality: list[float]
    starts: list[int]
    link_host: NDArray[np.int32]
    link_number: NDArray[np.int32]
    body: NDArray[np.bool_]
    link_quality: NDArray[np.float32]

    @property
    def label(self) -> str:
        return f"synthetic pages {self.start:,} to {self.start + self.records - 1:,}"

    @property
    def records(self) -> int:
        return len(self.host)

    def read(self) -> Iterator[Page | Reject]:
        seed, hosts = self.config.seed, self.config.hosts
        urls = [_url(h, k, hosts) for h, k in zip(self.host.tolist(), self.number.tolist(), strict=True)]
        links = [_url(h, k, hosts) for h, k in zip(self.link_host.tolist(), self.link_number.tolist(), strict=True)]
        for k, url in enumerate(urls):
            page = self.start + k
            if self.copied[k] == -2:
                text = ""
            elif self.copied[k] >= 0:
                extra = _text(_generator(seed, _TEXT, page), self.quality[k], 10)
                text = f"{_page_text(seed, self.copied[k], self.copied_quality[k])} {extra}"
            elif self.host[k] >= hosts:
                text = _text(_generator(seed, _TEXT, page), 0.0, 12)
            else:
                text = _page_text(seed, page, self.quality[k])
            low, high = self.starts[k], self.starts[k + 1]
            anchors, flags = self._link_texts(page, low, high) if self.config.link_texts else ((), ())
            yield Page(_FILE, page, url, text, links[low:high], anchors=anchors, link_flags=flags)

    def _link_texts(self, page: int, low: int, high: int) -> tuple[list[str], list[int]]:
        rng = _generator(self.config.seed, _ANCHOR, page)
        anchors = [_anchor(rng, quality) for quality in self.link_quality[low:high].tolist()]
        return anchors, [int(LinkFlag.BODY if body else LinkFlag.BOILERPLATE) for body in self.body[low:high].tolist()]


def open_synthetic(config: SyntheticWeb, reason: str = "") -> Source:
    """The synthetic web as a source. reason: why it stands in for real pages, where it does. Raises ConfigError."""
    web = _web(config)
    rng = _generator(config.seed, _STRUCTURE, 1)
    kind = rng.random(config.pages)
    others = rng.integers(0, config.pages, config.pages)
    copied = np.full(len(web.host), -1)
    copied[: config.pages] = np.where(kind < config.empty_share, -2, np.where(kind < config.empty_share + config.copy_share, others, -1))
    chunks = []
    for start in range(0, len(web.host), CHUNK_PAGES):
        part = slice(start, start + CHUNK_PAGES)
        starts = web.link_starts[start : start + CHUNK_PAGES + 1]
        links = slice(int(starts[0]), int(starts[-1]))
        chunks.append(
            PageChunk(
                config=config,
                start=start,
                host=web.host[part],
                number=web.number[part],
                quality=web.quality[part].tolist(),
                copied=copied[part].tolist(),
                copied_quality=web.quality[np.maximum(copied[part], 0)].tolist(),
                starts=(starts - starts[0]).tolist(),
                link_host=web.link_host[links],
                link_number=web.link_number[links],
                body=web.body[links],
                link_quality=web.link_quality[links],
            )
        )
    why = f", in place of real pages: {reason}" if reason else ""
    traps = f", and {config.traps:,} endless calendars" if config.traps else ""
    return Source(
        chunks=chunks,
        records=len(web.host),
        origin=f"a synthetic web of {config.pages:,} made-up pages on {config.hosts:,} hosts with planted quality{traps}{why}",
    )


def planted_quality(config: SyntheticWeb) -> NDArray[np.float64]:
    """float64[pages and pages of traps], by page id: the quality that was planted."""
    web = _web(config)
    urls = [_url(h, k, config.hosts) for h, k in zip(web.host.tolist(), web.number.tolist(), strict=True)]
    return web.quality[sorted(range(len(urls)), key=urls.__getitem__)]


def training_lines(config: SyntheticText) -> list[str]:
    """Labelled lines in the words of the synthetic web, `__label__hq` and `__label__cc` in turn; first their origin as comments.

    The texts are of their own: no line is a page of a synthetic web.
    """
    if config.lines < 2:
        raise ConfigError(f"SyntheticText: lines is {config.lines}; expected at least 2, one of each label")
    lines = ["# origin: made-up sentences in the words of the synthetic web (craw4llm.corpus.synthetic)"]
    lines.append(f"# {config.lines} lines, seed {config.seed}: hq explains, cc sells")
    for k in range(config.lines):
        rng = _generator(config.seed, _TRAINING, k)
        good = k % 2 == 0
        quality = 0.75 + 0.25 * rng.random() if good else 0.25 * rng.random()
        text = _text(rng, quality, int(rng.integers(60, 250)))
        lines.append(f"__label__{'hq' if good else 'cc'} {text}")
    return lines


def _web(config: SyntheticWeb) -> _Web:
    _check(config)
    pages, hosts = config.pages, config.hosts
    rng = _generator(config.seed, _STRUCTURE, 0)

    weights = 1 / (1 + np.arange(hosts)) ** config.host_skew  # a few large hosts, many small ones
    rng.shuffle(weights)
    host = np.concatenate([np.arange(hosts), rng.choice(hosts, size=pages - hosts, p=weights / weights.sum())])
    host.sort()
    home = np.searchsorted(host, np.arange(hosts))  # the first page of each host
    quality = np.clip(rng.beta(1.1, 2.4, hosts)[host] + rng.normal(0, 0.12, pages), 0, 1)

    number = rng.permutation(pages)  # page ids follow URLs: this keeps them from following quality or popularity
    number[home] = _HOME

    ranked = np.lexsort((np.arange(pages), quality))  # pages by quality
    rank = np.empty(pages, dtype=np.int64)
    rank[ranked] = np.arange(pages)
    hubs = np.concatenate([home, rng.permutation(pages)[: max(1, pages // 100)]])
    popularity = np.cumsum(1 / (1 + rng.permutation(len(hubs))) ** 0.8)
    n_dead = max(1, int(pages * config.mean_links * config.dead_share / 2))  # dead links have about two uses each

    counts = rng.poisson(config.mean_links, pages)
    starts = np.concatenate(([0], np.cumsum(counts + 1)))
    target = np.empty(starts[-1], dtype=np.int64)  # a page; or _GONE - k
    body = np.ones(starts[-1], dtype=np.bool_)
    target[starts[:-1]] = home[host]
    body[starts[:-1]] = False
    live = config.dead_share + (1 - config.dead_share) * config.homophily
    for page in range(pages):
        n = int(counts[page])
        kind, where = rng.random(n), rng.random(n)
        near = np.abs(np.rint(rank[page] + rng.normal(0, NEAR * pages, n)).astype(np.int64))  # reflected at both ends
        near = np.where(near >= pages, np.maximum(2 * (pages - 1) - near, 0), near)
        hub = hubs[np.searchsorted(popularity, where * popularity[-1], side="right").clip(max=len(hubs) - 1)]
        anywhere = (where * pages).astype(np.int64)
        to_hub = (kind >= live) & (kind < live + (1 - live) * config.hub_share)
        targets = np.where(kind < live, ranked[near], np.where(to_hub, hub, anywhere))
        own = slice(starts[page] + 1, starts[page + 1])
        target[own] = np.where(kind < config.dead_share, _GONE - (where * n_dead).astype(np.int64), targets)
        body[own] = ~to_hub
    gone = target <= _GONE
    live_target = np.maximum(target, 0)
    web = _Web(
        host=host.astype(np.int32),
        number=number.astype(np.int32),
        quality=quality,
        link_starts=starts,
        link_host=np.where(gone, (_GONE - target) % hosts, host[live_target]).astype(np.int32),
        link_number=np.where(gone, target, number[live_target]).astype(np.int32),
        body=body,
        link_quality=np.where(gone, 0, quality[live_target]).astype(np.float32),
    )
    return _with_traps(config, _with_navigation(config, web, home))


def _check(config: SyntheticWeb) -> None:
    if not 1 <= config.hosts <= config.pages:
        raise ConfigError(f"SyntheticWeb: hosts is {config.hosts}; expected 1 to pages ({config.pages})")
    for name in ("homophily", "dead_share", "hub_share", "empty_share", "copy_share"):
        if not 0 <= getattr(config, name) <= 1:
            raise ConfigError(f"SyntheticWeb: {name} is {getattr(config, name)}; expected 0 to 1")
    for name, least in (("mean_links", 0), ("host_skew", 0), ("navigation_links", 1), ("traps", 0), ("trap_pages", 1)):
        if getattr(config, name) < least:
            raise ConfigError(f"SyntheticWeb: {name} is {getattr(config, name)}; expected at least {least}")


def _with_navigation(config: SyntheticWeb, web: _Web, home: NDArray[np.int64]) -> _Web:
    """The web with further links to the pages behind each host's home page."""
    more = config.navigation_links - 1
    if not more:
        return web
    of = np.repeat(np.arange(config.pages), more)
    sizes = np.diff(np.append(home, config.pages))[web.host[of]]
    target = home[web.host[of]] + np.tile(np.arange(1, more + 1), config.pages) % sizes
    return _with_links(web, of, web.host[target], web.number[target], web.quality[target], body=False)


def _with_traps(config: SyntheticWeb, web: _Web) -> _Web:
    """The web with calendars, and links to them from some of its pages."""
    if not config.traps:
        return web
    rng = _generator(config.seed, _TRAPS, 0)
    lured = np.flatnonzero(rng.random(config.pages) < TRAP_LINK_SHARE)
    if not len(lured):
        lured = np.array([0])
    entry_host = (config.hosts + rng.integers(0, config.traps, len(lured))).astype(np.int32)
    entry_month = rng.integers(0, config.trap_pages, len(lured)).astype(np.int32)
    web = _with_links(web, lured, entry_host, entry_month, np.zeros(len(lured)), body=True)
    months = config.traps * config.trap_pages
    host = (config.hosts + np.repeat(np.arange(config.traps), config.trap_pages)).astype(np.int32)
    number = np.tile(np.arange(config.trap_pages), config.traps).astype(np.int32)
    beside = np.stack([number + 1, np.maximum(number - 1, 0)], axis=1).astype(np.int32)
    return _Web(
        host=np.concatenate([web.host, host]),
        number=np.concatenate([web.number, number]),
        quality=np.concatenate([web.quality, np.zeros(months)]),
        link_starts=np.concatenate([web.link_starts, web.link_starts[-1] + 2 * np.arange(1, months + 1)]),
        link_host=np.concatenate([web.link_host, np.repeat(host, 2)]),
        link_number=np.concatenate([web.link_number, beside.ravel()]),
        body=np.concatenate([web.body, np.ones(2 * months, dtype=np.bool_)]),
        link_quality=np.concatenate([web.link_quality, np.zeros(2 * months, dtype=np.float32)]),
    )


def _with_links(
    web: _Web,
    of: NDArray[np.int64],
    host: NDArray[np.int32],
    number: NDArray[np.int32],
    quality: NDArray[np.float64],
    *,
    body: bool,
) -> _Web:
    """The web with further links at the end of those of the pages `of`."""
    counts = np.diff(web.link_starts)
    page = np.concatenate([np.repeat(np.arange(len(counts)), counts), of])
    order = np.argsort(page, kind="stable")
    return dataclasses.replace(
        web,
        link_starts=np.concatenate(([0], np.cumsum(np.bincount(page, minlength=len(counts))))),
        link_host=np.concatenate([web.link_host, host])[order],
        link_number=np.concatenate([web.link_number, number])[order],
        body=np.concatenate([web.body, np.full(len(of), body)])[order],
        link_quality=np.concatenate([web.link_quality, quality.astype(np.float32)])[order],
    )


def _url(host: int, number: int, hosts: int) -> str:
    if host >= hosts:
        return f"https://trap-{host - hosts:03d}.example/calendar/{2000 + number // 12}/{number % 12 + 1:02d}"
    name = f"{_HOSTS[host % len(_HOSTS)]}-{host:03d}.example"
    if number == _HOME:
        return f"https://{name}/"
    return f"https://{name}/page/{number:06d}" if number >= 0 else f"https://{name}/gone/{_GONE - number:06d}"


def _anchor(rng: np.random.Generator, quality: float) -> str:
    """Two words in the style that the target's quality makes likely."""
    style = _EXPLAINING if rng.random() < quality else _SELLING
    drawn = rng.random(2)
    words = (style.slots["{a}"], style.slots["{n}"])
    return " ".join(listed[int(u * u * len(listed))] for u, listed in zip(drawn.tolist(), words, strict=True))


def _generator(*key: int) -> np.random.Generator:
    return np.random.Generator(np.random.PCG64(np.random.SeedSequence(key)))


def _page_text(seed: int, page: int, quality: float) -> str:
    rng = _generator(seed, _TEXT, page)
    n_words = int(min(MAX_WORDS, max(20, MEDIAN_WORDS * np.exp(SIGMA_WORDS * rng.standard_normal()))))
    return _text(rng, quality, n_words)


def _text(rng: np.random.Generator, quality: float, n_words: int) -> str:
    """Sentences of about `n_words` words in all, in paragraphs of five; a share of about `quality` of them explains."""
    drawn = rng.random(40 + 4 * n_words).tolist()  # more than the shapes can use
    at = 0
    sentences: list[str] = []
    written = 0
    while written < n_words:
        style = _EXPLAINING if drawn[at] < quality else _SELLING
        shape = style.shapes[int(drawn[at + 1] * len(style.shapes))]
        at += 2
        pieces: list[str] = []
        for piece in shape:
            words = style.slots.get(piece)
            if words is not None:
                # squared: the words at the head of a list are the frequent ones, as in any language
                piece = words[int(drawn[at] * drawn[at] * len(words))]
                at += 1
                if piece[0] in "aeiou" and pieces and pieces[-1].endswith((" a ", "A ")):
                    pieces[-1] = f"{pieces[-1][:-1]}n "
            pieces.append(piece)
        sentence = "".join(pieces)
        written += sentence.count(" ") + 1
        sentences.append(sentence)
    return " ".join(sentences)
