"""A deterministic web with planted quality, for tests and for machines where no real pages can be had.

    source = open_synthetic(SyntheticWeb(pages=4000))
    planted_quality(SyntheticWeb(pages=4000))     -> float64[pages], by page id
    training_lines(SyntheticText(lines=2000))     -> ["# ...", "__label__hq the second proof ...", "__label__cc click here ...", ...]

**Quality** in [0, 1] is drawn per host and, around it, per page: most pages are poor, a few are good. **Links** follow it: the share
`homophily` of a page's links goes to pages near it in the order of quality, wherever they are. The rest goes to boilerplate hubs
(home pages, and some others by a power law) and anywhere. So in-degree follows popularity and says nothing about quality. The share
`dead_share` leads to URLs that do not exist.

**Text** shows quality by its words: each sentence is explaining or selling, and a page of quality q explains with probability q. The
share of plain words is the same everywhere. Lengths are log-normal, median about 250 words. EMPTY_SHARE of the pages have no
text, COPY_SHARE are near-duplicates: another page's text with a sentence more.

Each page's text has its own generator, seeded by (seed, page), so that chunks can be made anywhere.
"""

import dataclasses
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from craw4llm.configs import SyntheticText, SyntheticWeb
from craw4llm.corpus.records import Page, Reject, Source
from craw4llm.errors import ConfigError

CHUNK_PAGES = 250
EMPTY_SHARE = 0.02
COPY_SHARE = 0.02
MEDIAN_WORDS, SIGMA_WORDS, MAX_WORDS = 250, 0.6, 1500
NEAR = 0.03  # standard deviation, in the order of quality, of the distance between pages whose link follows quality
HUB_SHARE = 0.5  # of the links that do not follow quality
_STRUCTURE, _TEXT, _TRAINING = 0, 1, 2  # what a generator is for, so that no two share their numbers
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


_EXPLAINING, _SELLING = _style(_EXPLAIN), _style(_SELL)


@dataclasses.dataclass(frozen=True)
class _Web:
    """The structure, by page in the order of making: hosts one after another, each with its home page first."""

    urls: list[str]
    quality: NDArray[np.float64]
    links: list[list[str]]


@dataclasses.dataclass(frozen=True)
class PageChunk:
    """Pages of the synthetic web, made where they are read."""

    seed: int
    start: int
    urls: list[str]
    quality: list[float]
    copied: list[int]  # page whose text is copied, -1 for none, -2 for an empty page
    copied_quality: list[float]
    links: list[list[str]]

    @property
    def label(self) -> str:
        return f"synthetic pages {self.start:,} to {self.start + self.records - 1:,}"

    @property
    def records(self) -> int:
        return len(self.urls)

    def read(self) -> Iterator[Page | Reject]:
        for k, url in enumerate(self.urls):
            page = self.start + k
            if self.copied[k] == -2:
                text = ""
            elif self.copied[k] >= 0:
                extra = _text(_generator(self.seed, _TEXT, page), self.quality[k], 10)
                text = f"{_page_text(self.seed, self.copied[k], self.copied_quality[k])} {extra}"
            else:
                text = _page_text(self.seed, page, self.quality[k])
            yield Page(_FILE, page, url, text, self.links[k])


def open_synthetic(config: SyntheticWeb, reason: str = "") -> Source:
    """The synthetic web as a source. reason: why it stands in for real pages, where it does. Raises ConfigError."""
    web = _web(config)
    rng = _generator(config.seed, _STRUCTURE, 1)
    kind = rng.random(config.pages)
    copied = np.where(kind < EMPTY_SHARE, -2, np.where(kind < EMPTY_SHARE + COPY_SHARE, rng.integers(0, config.pages, config.pages), -1))
    chunks = []
    for start in range(0, config.pages, CHUNK_PAGES):
        part = slice(start, start + CHUNK_PAGES)
        chunks.append(
            PageChunk(
                seed=config.seed,
                start=start,
                urls=web.urls[part],
                quality=web.quality[part].tolist(),
                copied=copied[part].tolist(),
                copied_quality=web.quality[np.maximum(copied[part], 0)].tolist(),
                links=web.links[part],
            )
        )
    why = f", in place of real pages: {reason}" if reason else ""
    return Source(
        chunks=chunks,
        records=config.pages,
        origin=f"a synthetic web of {config.pages:,} made-up pages on {config.hosts:,} hosts with planted quality{why}",
    )


def planted_quality(config: SyntheticWeb) -> NDArray[np.float64]:
    """float64[pages], by page id: the quality that was planted."""
    web = _web(config)
    order = sorted(range(config.pages), key=web.urls.__getitem__)
    return web.quality[order]


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
    pages, hosts = config.pages, config.hosts
    if not 1 <= hosts <= pages:
        raise ConfigError(f"SyntheticWeb: hosts is {hosts}; expected 1 to pages ({pages})")
    for name in ("homophily", "dead_share"):
        if not 0 <= getattr(config, name) <= 1:
            raise ConfigError(f"SyntheticWeb: {name} is {getattr(config, name)}; expected 0 to 1")
    if config.mean_links < 0:
        raise ConfigError(f"SyntheticWeb: mean_links is {config.mean_links}; expected at least 0")
    rng = _generator(config.seed, _STRUCTURE, 0)

    weights = 1 / (1 + np.arange(hosts)) ** 0.7  # a few large hosts, many small ones
    rng.shuffle(weights)
    host = np.concatenate([np.arange(hosts), rng.choice(hosts, size=pages - hosts, p=weights / weights.sum())])
    host.sort()
    home = np.searchsorted(host, np.arange(hosts))  # the first page of each host
    quality = np.clip(rng.beta(1.1, 2.4, hosts)[host] + rng.normal(0, 0.12, pages), 0, 1)

    names = [f"{_words(_HOST)[h % len(_words(_HOST))]}-{h:03d}.example" for h in range(hosts)]
    serial = rng.permutation(pages)  # page ids follow URLs: this keeps them from following quality or popularity
    urls = [f"https://{names[h]}/page/{serial[k]:06d}" for k, h in enumerate(host.tolist())]
    for h in range(hosts):
        urls[home[h]] = f"https://{names[h]}/"

    ranked = np.lexsort((np.arange(pages), quality))  # pages by quality
    rank = np.empty(pages, dtype=np.int64)
    rank[ranked] = np.arange(pages)
    hubs = np.concatenate([home, rng.permutation(pages)[: max(1, pages // 100)]])
    popularity = np.cumsum(1 / (1 + rng.permutation(len(hubs))) ** 0.8)
    n_dead = max(1, int(pages * config.mean_links * config.dead_share / 2))  # dead links have about two uses each

    counts = rng.poisson(config.mean_links, pages)
    links: list[list[str]] = []
    for page in range(pages):
        n = int(counts[page])
        kind, where = rng.random(n), rng.random(n)
        near = np.abs(np.rint(rank[page] + rng.normal(0, NEAR * pages, n)).astype(np.int64))  # reflected at both ends
        near = np.where(near >= pages, np.maximum(2 * (pages - 1) - near, 0), near)
        hub = hubs[np.searchsorted(popularity, where * popularity[-1], side="right").clip(max=len(hubs) - 1)]
        anywhere = (where * pages).astype(np.int64)
        live = config.dead_share + (1 - config.dead_share) * config.homophily
        targets = np.where(kind < live, ranked[near], np.where(kind < live + (1 - live) * HUB_SHARE, hub, anywhere))
        page_links = [urls[home[host[page]]]]
        for target, drawn, place in zip(targets.tolist(), kind.tolist(), where.tolist(), strict=True):
            if drawn < config.dead_share:
                number = int(place * n_dead)
                page_links.append(f"https://{names[number % hosts]}/gone/{number:06d}")
            else:
                page_links.append(urls[target])
        links.append(page_links)
    return _Web(urls, quality, links)


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
