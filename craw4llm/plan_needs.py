"""What each stage of a plan needs: parts, tasks, hours, disk, memory, network. The second half of `craw4llm plan`.

    needs = stage_needs(plan, parts={"score": 500}, rates=rates_with({}))
    needs_text(needs, Machines(cores=16, gpus=8))     a line for stages with the same figures, the sums, what does not pay

Counts are the plan's own (counted where a stage is finished, stated or estimated otherwise, craw4llm.plan); rates are those of
craw4llm.plan_rates. What is not known before, or was never measured, is None, shown as "?", left out of the sums and named there.
"""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from craw4llm.configs import (
    KNOWLEDGE,
    NEEDS_SCORER,
    OTHER_SCORE,
    ClueWeb22,
    CorpusConfig,
    CrawlConfig,
    Encoder,
    Length,
    ScoreConfig,
    ScorerConfig,
    SelectConfig,
    TokenizeConfig,
)
from craw4llm.corpus.clueweb22_files import is_clueweb22
from craw4llm.errors import ConfigError
from craw4llm.externals import locate
from craw4llm.fingerprint import External
from craw4llm.grouping import LEAST_PART_S, SLOT_S_PER_TASK, grouped, worth
from craw4llm.plan import Estimate, estimates
from craw4llm.plan_rates import positive
from craw4llm.runner import Plan
from craw4llm.stage import Stage

Number = float | None
Rates = Mapping[str, float]
MEMORY_BYTES = 2 << 30  # Execution's default of memory_bytes
COUNTS = ("pages", "text_bytes", "links")
SMALL = ("scorer", "tokenizer", "report")  # kinds that take seconds to minutes, and are not reckoned with


@dataclasses.dataclass(frozen=True, kw_only=True)
class Need:
    """Of one stage that is not finished.

    core_s: of all its tasks together; serial_s: of these, what no second core can help with. memory_bytes: of one task, files that are
    mapped and may be dropped not counted. read_bytes, written_bytes: through the shared folder, or the network to it. scored: pages that it
    needs scores of, by (corpus, scorer), with the core and GPU seconds in core_s and gpu_s that they cost.
    """

    id: str
    kind: str
    parts: int = 1
    core_s: Number = None
    serial_s: Number = None
    gpu_s: Number = None
    disk_bytes: Number = None
    memory_bytes: Number = None
    read_bytes: Number = None
    written_bytes: Number = None
    scored: tuple[tuple[tuple[str, str], "Scored"], ...] = ()

    @property
    def tasks(self) -> int:
        """Of Airflow: the parts, and one that puts them together."""
        return self.parts + 1 if self.parts > 1 else 1


@dataclasses.dataclass(frozen=True, kw_only=True)
class Scored:
    """Scores of some pages of a corpus of `of` pages."""

    pages: float
    of: float
    core_s: Number
    gpu_s: Number


@dataclasses.dataclass(frozen=True, kw_only=True)
class Machines:
    """What all stages together have: hours are reckoned with."""

    cores: int = 16
    gpus: int = 8

    def hours(self, need: Need) -> Number:
        """Of a stage that has all of them to itself."""
        if need.core_s is None or need.serial_s is None or need.gpu_s is None:
            return None
        return ((need.core_s - need.serial_s) / self.cores + need.serial_s + need.gpu_s / self.gpus) / 3600


def with_counts(plan: Plan, given: Mapping[str, str]) -> Plan:
    """The plan with `given` counts of its corpora that are not at hand. Raises ConfigError for names and values that cannot be meant, and
    where the corpus is at hand: its own counts hold."""
    if not given:
        return plan
    for name in given:
        if name not in COUNTS:
            raise ConfigError(f"--count {name}={given[name]}: there is no such count; expected {', '.join(COUNTS)}")
    if not any(isinstance(node.stage.config, CorpusConfig) and node.stage.key in plan.absent for node in plan.nodes):
        raise ConfigError("--count: the corpus is at hand, and its own counts hold; leave the option out")
    return dataclasses.replace(plan, counts={name: int(positive(f"--count {name}", text)) for name, text in given.items()})


def stage_needs(plan: Plan, *, parts: Mapping[str, int], rates: Rates) -> list[Need]:
    """The needs of the stages that are not finished, in the order of the plan. parts: kind of a stage -> parts that are asked for."""
    known = estimates(plan)
    return [_need(node.id, node.stage, known, parts, rates) for node in plan.missing(plan.nodes)]


def totals(needs: Sequence[Need]) -> dict[str, Any]:
    """Sums over the stages: tasks, core_s, gpu_s, disk_bytes, read_bytes, written_bytes; `unknown`: field -> ids of the stages left out.

    A page is scored once a scorer, whoever asks first (the memo), so core_s and gpu_s are less than the sum of the stages' own where
    several stages read scores of the same scorer. Pages of different crawls are reckoned as different ones until the corpus is exhausted.
    """
    found: dict[str, Any] = {"tasks": sum(need.tasks for need in needs)}
    unknown: dict[str, list[str]] = {}
    for field in ("core_s", "gpu_s", "disk_bytes", "read_bytes", "written_bytes"):
        values = [(need.id, getattr(need, field)) for need in needs if need.kind not in SMALL]
        found[field] = sum(value for _, value in values if value is not None)
        if left_out := [name for name, value in values if value is None]:
            unknown[field] = left_out
    for field in ("core_s", "gpu_s"):
        by_pair: dict[tuple[str, str], list[Scored]] = {}
        for need in needs:
            for pair, scored in need.scored if getattr(need, field) is not None else ():
                by_pair.setdefault(pair, []).append(scored)
        for several in by_pair.values():
            pages, of = sum(s.pages for s in several), several[0].of
            if pages > of:
                found[field] -= sum(getattr(s, field) for s in several) * (1 - of / pages)
    return found | {"unknown": unknown}


def longest_chain(plan: Plan, needs: Sequence[Need], machines: Machines) -> float:
    """Hours of the longest chain of stages, each with all machines to itself; what is not known counts as nothing."""
    own = {need.id: machines.hours(need) or 0.0 for need in needs}
    ends: dict[str, float] = {}
    for node in plan.nodes:
        ends[node.id] = own.get(node.id, 0.0) + max((ends[up] for up in node.upstream), default=0.0)
    return max(ends.values(), default=0.0)


def advice(needs: Iterable[Need]) -> list[str]:
    """Stages whose parts are too short for what a task costs Airflow, a line a kind and size."""
    found: dict[str, None] = {}
    for need in needs:
        if need.parts > 1 and need.core_s is not None and need.serial_s is not None and need.gpu_s is not None:
            work = need.core_s - need.serial_s + need.gpu_s
            if work / need.parts < LEAST_PART_S:
                found[
                    f"{need.kind}: {need.parts:,} parts of {work / need.parts:.3g} s of work each; Airflow takes about "
                    f"{SLOT_S_PER_TASK:g} s of a slot a task, so at most {worth(work):,} parts pay"
                ] = None
    return list(found)


def needs_record(plan: Plan, needs: Sequence[Need], machines: Machines) -> dict[str, Any]:
    """The needs as plain JSON values; seconds, bytes, hours."""
    rows = []
    for need in needs:
        row = {f.name: getattr(need, f.name) for f in dataclasses.fields(need) if f.name != "scored"}
        rows.append(row | {"tasks": need.tasks, "hours": machines.hours(need)})
    return {
        "stages": rows,
        "totals": totals(needs),
        "cores": machines.cores,
        "gpus": machines.gpus,
        "longest_chain_hours": longest_chain(plan, needs, machines),
        "advice": advice(needs),
        "table": needs_table(needs, machines),
    }


def needs_table(needs: Sequence[Need], machines: Machines) -> list[tuple[str, ...]]:
    """A header and rows as a person reads them, stages with the same figures in one."""
    header = ("stages", "parts", "tasks", "core h", "GPU h", "h", "disk GB", "memory GB", "read GB", "written GB")
    lines: dict[tuple[str, ...], list[str]] = {}
    for need in needs:
        if need.kind in SMALL:
            continue
        hours = (need.core_s, need.gpu_s)
        cells = (
            f"{need.parts:,}",
            f"{need.tasks:,}",
            *(_cell(None if value is None else value / 3600) for value in hours),
            _cell(machines.hours(need)),
            *(
                _cell(None if value is None else value / 1e9)
                for value in (need.disk_bytes, need.memory_bytes, need.read_bytes, need.written_bytes)
            ),
        )
        lines.setdefault((need.kind, *cells), []).append(need.id)
    return [header, *((_named(key[0], ids), *key[1:]) for key, ids in lines.items())]


def needs_text(plan: Plan, needs: Sequence[Need], machines: Machines) -> str:
    """The table, and the sums."""
    table = needs_table(needs, machines)
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    text = [f"Needs of each stage that is to do, with {machines.cores} cores and {machines.gpus} GPUs for all:"]
    for row in table:
        text.append("  " + "  ".join(c.rjust(w) if k else c.ljust(w) for k, (c, w) in enumerate(zip(row, widths, strict=True))))
    found = totals(needs)
    text += [
        f"  all: {found['tasks'] + 1:,} tasks (the plan's own too), {_cell(found['core_s'] / 3600)} core hours (scores shared by stages "
        f"once), {_cell(found['gpu_s'] / 3600)} GPU hours, disk {_cell(found['disk_bytes'] / 1e9)} GB, read "
        f"{_cell(found['read_bytes'] / 1e9)} GB, written {_cell(found['written_bytes'] / 1e9)} GB",
        f"  time: at least {_cell(max(longest_chain(plan, needs, machines), _all_hours(found, machines)))} h (longest chain "
        f"{_cell(longest_chain(plan, needs, machines))} h, all work over all machines {_cell(_all_hours(found, machines))} h); "
        f"Airflow's own: {_cell(found['tasks'] * SLOT_S_PER_TASK / 3600)} h of a slot",
    ]
    if small := [need.id for need in needs if need.kind in SMALL]:
        text.append(f"  not reckoned, seconds to minutes each: {', '.join(small)}")
    if unknown := [f"{field} of {', '.join(ids) if len(ids) < 4 else f'{len(ids)} stages'}" for field, ids in found["unknown"].items()]:
        text.append(f"  not known before, and in no sum: {'; '.join(unknown)}")
    return "\n".join([*text, *(f"  parts: {line}" for line in advice(needs))])


def _all_hours(found: Mapping[str, Any], machines: Machines) -> float:
    return max(float(found["core_s"]) / machines.cores, float(found["gpu_s"]) / machines.gpus) / 3600


# --- by kind of stage


def _need(name: str, stage: Stage, known: Mapping[str, Estimate], parts: Mapping[str, int], rates: Rates) -> Need:
    kind = stage.config.stage
    more: dict[str, Any] = {"id": name, "kind": kind, "parts": grouped(parts.get(kind, 1))}
    config, own = stage.config, known[stage.key]
    if isinstance(config, CorpusConfig):
        return _corpus(config, own, rates, more)
    if kind in ("train", "evaluate"):
        return _on_gpus(stage, known, rates, more)
    corpus = stage.inputs.get("corpus")
    pages = _pages(known[corpus.key]) if corpus is not None else None
    if corpus is None or pages is None:
        return Need(**more)
    text = _count(known[corpus.key], "text_bytes")
    if isinstance(config, ScoreConfig):
        return _score(stage, pages, text, rates, more)
    if isinstance(config, CrawlConfig):
        return _crawl(config, stage, known, pages, text, rates, more)
    if isinstance(config, SelectConfig):
        return _select(config, stage, known, pages, text, rates, more)
    if isinstance(config, TokenizeConfig):
        return _tokenize(config, stage, known, pages, text, rates, more)
    return Need(**more)


def _corpus(config: CorpusConfig, own: Estimate, rates: Rates, more: Mapping[str, Any]) -> Need:
    """Of a source that is not at hand: as if it were ClueWeb22's records, whose texts are read where they lie; of others the texts are
    copied."""
    pages = _pages(own)
    if pages is None:
        return Need(**more)
    text, links = _count(own, "text_bytes"), _count(own, "links")
    in_place = _in_place(config.source, at_hand="records" in own)
    core_s = pages / rates["corpus_pages_per_s" if in_place else "corpus_copied_pages_per_s"]
    packed_text = _times(text, rates["packed_share"])
    tables = _plus(pages * rates["corpus_bytes_per_page"], _times(links, rates["corpus_bytes_per_link"]))
    disk = tables if in_place else _plus(tables, packed_text)
    return Need(
        **more,
        core_s=core_s,
        serial_s=0.0,
        gpu_s=0.0,
        disk_bytes=disk,
        memory_bytes=rates["process_bytes"] + MEMORY_BYTES,
        read_bytes=_plus(packed_text, pages * rates["delivered_link_bytes_per_page"] * rates["packed_share"]),
        written_bytes=disk,
    )


def _in_place(source: object, *, at_hand: bool) -> bool:
    """Whether texts are read from the source's own files."""
    return isinstance(source, ClueWeb22) or (isinstance(source, External) and (not at_hand or is_clueweb22(locate(source))))


def _score(stage: Stage, pages: float, text: Number, rates: Rates, more: Mapping[str, Any]) -> Need:
    scored = _scored(stage.inputs["scorer"], pages, pages, text, rates)
    return Need(
        **more,
        core_s=scored.core_s,
        serial_s=_times(scored.core_s, 0.0),
        gpu_s=scored.gpu_s,
        disk_bytes=pages * (rates["score_bytes_per_page"] + rates["memo_bytes_per_page"]),
        memory_bytes=_scorer_memory(stage, pages, rates),
        read_bytes=_times(text, rates["packed_share"]),
        written_bytes=pages * (rates["score_bytes_per_page"] + rates["memo_bytes_per_page"]),
        scored=_pairs(stage, {"scorer": scored}),
    )


def _crawl(
    config: CrawlConfig, stage: Stage, known: Mapping[str, Estimate], pages: float, text: Number, rates: Rates, more: Mapping[str, Any]
) -> Need:
    crawled = _count(known[stage.key], "crawled_pages")
    if crawled is None:
        return Need(**more)
    crawled = min(crawled, pages)
    discovered = min(pages, crawled * rates["discovered_per_crawled"])
    read = discovered if KNOWLEDGE[config.policy] == "target_text" else crawled
    scored = {}
    if config.policy in NEEDS_SCORER and "scorer" in stage.inputs:
        scored["scorer"] = _scored(stage.inputs["scorer"], read, pages, text, rates)
    for name in stage.inputs:
        if OTHER_SCORE.fullmatch(name):
            scored[name] = _scored(stage.inputs[name], read, pages, text, rates)
    loop_s = crawled / rates["crawl_pages_per_s"]
    links = _count(known[stage.inputs["corpus"].key], "links")
    moving = 1 if KNOWLEDGE[config.policy] != "live" or config.policy in ("random", "breadth_first") else 2
    memory = (
        rates["process_bytes"]
        + moving * pages / 8
        + discovered * rates["crawl_bytes_per_discovered"] * moving
        + crawled * rates["crawl_bytes_per_crawled"]
    )
    trace = discovered * rates["trace_bytes_per_discovered"]
    texts = _times(text, read / pages * rates["packed_share"]) if scored else 0.0
    return Need(
        **more,
        core_s=_plus(loop_s, *(s.core_s for s in scored.values())),
        serial_s=loop_s,
        gpu_s=_plus(0.0, *(s.gpu_s for s in scored.values())),
        disk_bytes=trace + sum(s.pages for s in scored.values()) * rates["memo_bytes_per_page"],
        memory_bytes=_plus(memory, _scorer_memory(stage, pages, rates) if scored else 0.0),
        read_bytes=_plus(texts, crawled * 16, _times(links, crawled / pages * rates["corpus_bytes_per_link"])),
        written_bytes=trace + sum(s.pages for s in scored.values()) * rates["memo_bytes_per_page"],
        scored=_pairs(stage, scored),
    )


def _select(
    config: SelectConfig, stage: Stage, known: Mapping[str, Estimate], pages: float, text: Number, rates: Rates, more: Mapping[str, Any]
) -> Need:
    pool: Number = pages
    if config.pool in ("crawled", "fetched"):
        crawl = known[stage.inputs["crawl"].key]
        pool = config.prefix_pages if config.pool == "crawled" else None
        pool = pool or (_count(crawl, "crawled_pages" if config.pool == "crawled" else "fetches"))
    elif config.pool == "listed":
        pool = config.prefix_pages
    kept = _count(known[stage.key], "kept_pages")
    if pool is None or kept is None:
        return Need(**more)
    scored = {}
    if "scorer" in stage.inputs:
        scored["scorer"] = _scored(stage.inputs["scorer"], pool, pages, text, rates)
    looks = {config.exact_duplicates, config.near_duplicates, config.heldout_copies} != {"off"}
    signs = config.near_duplicates != "off" or config.heldout_copies != "off"
    walked = kept if looks or config.decontaminate is not None or config.keep_tokens is not None else 0.0
    order_s = pool / rates["select_pool_pages_per_s"]
    find_s = walked / rates["select_find_pages_per_s"] if signs else 0.0
    sign_s: Number = walked / rates["select_sign_pages_per_s"] if signs else 0.0
    if walked and not signs:
        sign_s = _times(text, walked / pages / rates["read_bytes_per_s"])
    corpus = stage.inputs["corpus"].config
    compared = kept if config.near_duplicates != "off" else 0.0
    if config.heldout_copies != "off" and isinstance(corpus, CorpusConfig):
        compared += corpus.heldout_fraction * pages
    memory = (
        rates["process_bytes"]
        + pool * rates["select_bytes_per_pool_page"]
        + walked * rates["select_bytes_per_walked_page"]
        + compared * rates["select_bytes_per_signed_page"]
    )
    read_pages = walked + (pool if scored else 0.0)
    column = pages * 4 if "scores" in stage.inputs else 0.0
    return Need(
        **more,
        core_s=_plus(order_s, find_s, sign_s, *(s.core_s for s in scored.values())),
        serial_s=order_s + find_s,
        gpu_s=_plus(0.0, *(s.gpu_s for s in scored.values())),
        disk_bytes=kept * 12,
        memory_bytes=_plus(memory, _scorer_memory(stage, pages, rates) if scored else 0.0),
        read_bytes=_plus(_times(text, read_pages / pages * rates["packed_share"]) if read_pages else 0.0, column),
        written_bytes=kept * 12 + sum(s.pages for s in scored.values()) * rates["memo_bytes_per_page"],
        scored=_pairs(stage, scored),
    )


def _tokenize(
    config: TokenizeConfig, stage: Stage, known: Mapping[str, Estimate], pages: float, text: Number, rates: Rates, more: Mapping[str, Any]
) -> Need:
    corpus, own = stage.inputs["corpus"].config, known[stage.key]
    if config.pages == "heldout":
        share = corpus.heldout_fraction if isinstance(corpus, CorpusConfig) else None
        documents, read = _times(pages, share), _times(text, share)
        tokens = None if read is None else read / rates["bytes_per_token"]
        disk = _times(tokens, 2.0)
    else:
        documents = _count(known[stage.inputs["selection"].key], "kept_pages")
        tokens, disk = _count(own, "tokens"), _count(own, "disk_bytes")
        read = None if text is None or documents is None else text * documents / pages
    core_s = None if tokens is None else tokens / rates["tokens_per_s"]
    return Need(
        **more,
        core_s=core_s,
        serial_s=_times(core_s, rates["tokenize_serial_share"]),
        gpu_s=0.0,
        disk_bytes=disk,
        memory_bytes=_plus(rates["process_bytes"], _times(documents, rates["tokenize_bytes_per_document"])),
        read_bytes=_plus(_times(read, rates["packed_share"]), _times(disk, 2.0)),  # the parts, and the shards once more
        written_bytes=_times(disk, 2.0),
    )


def _on_gpus(stage: Stage, known: Mapping[str, Estimate], rates: Rates, more: Mapping[str, Any]) -> Need:
    """train says its GPU hours itself; evaluate's are those of its tokens through the model."""
    own = known[stage.key]
    if stage.config.stage == "train":
        tokens, shards = _count(own, "train_tokens"), known[stage.inputs["tokens"].key]
        width = _ratio(_count(shards, "disk_bytes"), _count(shards, "tokens")) or 2.0
        gpu_s = _times(_count(own, "gpu_hours"), 3600.0)
        disk = _count(own, "disk_bytes")
        return Need(**more, core_s=0.0, serial_s=0.0, gpu_s=gpu_s, disk_bytes=disk, read_bytes=_times(tokens, width), written_bytes=disk)
    parameters = _count(known[stage.inputs["checkpoint"].key], "parameters")
    suite = _count(own, "eval_tokens")
    if suite is None:
        suite = _plus(_count(own, "suite_tokens"), _heldout_tokens(stage, known, rates))
    gpu_s = None if suite is None or parameters is None else 2 * parameters * suite / rates["gpu_flops_per_s"]
    return Need(**more, core_s=0.0, serial_s=0.0, gpu_s=gpu_s, disk_bytes=0.0, read_bytes=_times(parameters, 4.0), written_bytes=0.0)


def _heldout_tokens(stage: Stage, known: Mapping[str, Estimate], rates: Rates) -> Number:
    heldout = stage.inputs.get("heldout")
    if heldout is None:
        return 0.0
    if (counted := _count(known[heldout.key], "tokens")) is not None:
        return counted
    corpus = heldout.inputs["corpus"]
    share = corpus.config.heldout_fraction if isinstance(corpus.config, CorpusConfig) else None
    return _times(_times(_count(known[corpus.key], "text_bytes"), share), 1 / rates["bytes_per_token"])


# --- scores


def _scored(scorer: Stage, pages: float, of: float, text: Number, rates: Rates) -> Scored:
    """What it costs to score `pages` of the `of` pages of a corpus."""
    config, share = scorer.config, pages / of
    read = _times(text, share)
    reading_s = _times(read, 1 / rates["read_bytes_per_s"])
    core_s: Number = None
    gpu_s: Number = 0.0
    if isinstance(config, ScorerConfig):
        if config.kind in ("fasttext", "train_fasttext"):
            core_s = _plus(reading_s, _times(read, 1 / rates[f"score_{config.route}_bytes_per_s"]))
        elif isinstance(config.source, Length):
            core_s = reading_s
        elif isinstance(config.source, Encoder):
            core_s, tokens = reading_s, _times(read, 1 / rates["bytes_per_token"])
            longest = pages * config.source.max_tokens
            gpu_s = _times(
                None if tokens is None else min(tokens, longest), rates["encoder_flops_per_token"] / rates["encoder_flops_per_s"]
            )
    return Scored(pages=pages, of=of, core_s=core_s, gpu_s=gpu_s)


def _scorer_memory(stage: Stage, pages: float, rates: Rates) -> Number:
    """A process with the scorer and the memo's state of all pages."""
    config = stage.inputs["scorer"].config if "scorer" in stage.inputs else None
    if not isinstance(config, ScorerConfig) or config.kind not in ("fasttext", "train_fasttext"):
        return None
    model = rates["score_projected_model_bytes" if config.route == "projected" else "score_model_bytes"]
    return rates["process_bytes"] + model + pages * rates["memo_state_bytes_per_page"]


def _pairs(stage: Stage, scored: Mapping[str, Scored]) -> tuple[tuple[tuple[str, str], Scored], ...]:
    corpus = stage.inputs["corpus"].key
    return tuple(((corpus, stage.inputs[name].key), s) for name, s in scored.items())


# --- numbers that may be missing, and words


def _count(facts: Estimate, name: str) -> Number:
    value = facts.get(name, (None, ""))[0]
    return None if value is None else float(value)


def _pages(corpus: Estimate) -> Number:
    """As counted or stated; before that, the records of the source, which may hold repeats."""
    pages = _count(corpus, "pages")
    return _count(corpus, "records") if pages is None else pages


def _plus(*values: Number) -> Number:
    found = [value for value in values if value is not None]
    return sum(found) if len(found) == len(values) else None


def _times(value: Number, factor: Number) -> Number:
    return None if value is None or factor is None else value * factor


def _ratio(value: Number, by: Number) -> Number:
    return value / by if value is not None and by else None


def _cell(value: Number) -> str:
    if value is None:
        return "?"
    if value == 0:
        return "-"
    return f"{value:,.0f}" if value >= 100 else f"{value:.2g}" if value < 10 else f"{value:.1f}"


def _named(kind: str, ids: Sequence[str]) -> str:
    return ids[0] if len(ids) == 1 else f"{len(ids)} x {kind}: {_few(ids, 2)}"


def _few(ids: Sequence[str], shown: int = 4) -> str:
    return ", ".join(ids[:shown]) + (f" and {len(ids) - shown} more" if len(ids) > shown else "")
