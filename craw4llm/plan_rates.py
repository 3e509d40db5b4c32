"""What stages take per page, byte and link: the constants that `craw4llm plan` reckons with, each with its unit and source.

    rates = rates_with({"score_projected_bytes_per_s": "73e6"})      # the shipped ones, one of them replaced
    rates["corpus_pages_per_s"] -> 27000.0

"measured" names the command of docs/performance.md that gave the figure, on one core of the machine that stands there; "counted" means
that the bytes were counted in the code; "assumed" is neither. Other machines: `craw4llm plan --rate NAME=VALUE`.
"""

from collections.abc import Mapping
from typing import NamedTuple

from craw4llm.errors import ConfigError


class Rate(NamedTuple):
    value: float
    unit: str
    source: str


RATES: dict[str, Rate] = {
    # --- corpus
    "corpus_pages_per_s": Rate(27_000, "pages/s of a core", "measured: benchmarks/corpus_clueweb22.py, txt and outlink, digests included"),
    "corpus_copied_pages_per_s": Rate(8_200, "pages/s of a core", "measured: benchmarks/corpus.py, Parquet of docweb; other sources"),
    "corpus_bytes_per_page": Rate(21.5, "bytes", "measured: benchmarks/corpus.py --graph-pages: page table 13.5, link offsets 8"),
    "corpus_bytes_per_link": Rate(4, "bytes", "counted: a uint32 a target"),
    "delivered_link_bytes_per_page": Rate(6_400, "bytes", "measured: benchmarks/corpus_clueweb22.py, a list of 43 entries"),
    "packed_share": Rate(0.34, "of the bytes", "measured: gzip of every 20th text of docweb (8.8 MB)"),
    "read_bytes_per_s": Rate(279e6, "bytes/s of a core", "measured: benchmarks/corpus_clueweb22.py, unpacked"),
    # --- scores
    "score_library_bytes_per_s": Rate(26e6, "bytes/s of a core", "measured: benchmarks/score.py"),
    "score_exact_bytes_per_s": Rate(81e6, "bytes/s of a core", "measured: benchmarks/score.py"),
    "score_projected_bytes_per_s": Rate(218e6, "bytes/s of a core", "measured: benchmarks/score.py"),
    "score_model_bytes": Rate(800e6, "bytes", "counted: 2 million rows of 100 float32 (DCLM's model), library and exact route"),
    "score_projected_model_bytes": Rate(8e6, "bytes", "counted: 2 million float32, projected route"),
    "score_bytes_per_page": Rate(5, "bytes", "counted: a float32 and a reason"),
    "memo_bytes_per_page": Rate(9, "bytes", "counted: craw4llm/scoring/memo.py; in the folder memo, which may be deleted"),
    "memo_state_bytes_per_page": Rate(5, "bytes", "counted: craw4llm/scoring/memo.py; a mapped file for large corpora"),
    "encoder_flops_per_token": Rate(1.89e8, "FLOPs", "counted: 12 layers of 768 (FineWeb-Edu's classifier), 512 tokens of context"),
    "encoder_flops_per_s": Rate(26.8e12, "FLOPs/s of a GPU", "assumed: 40% of an H100's 67 TFLOP/s in float32, in which it runs"),
    "bytes_per_token": Rate(4.3, "bytes", "assumed: English web text under GPT-NeoX's vocabulary"),
    # --- crawl
    "crawl_pages_per_s": Rate(105_000, "pages crawled/s of a core", "measured: benchmarks/crawl.py --pages 100000000, links not in memory"),
    "discovered_per_crawled": Rate(8.1, "pages", "measured: benchmarks/crawl.py --pages 100000000, its graph (10.5 links a page)"),
    "crawl_bytes_per_discovered": Rate(8, "bytes", "counted: docs/performance.md, memory"),
    "crawl_bytes_per_crawled": Rate(24, "bytes", "counted: 8 a page crawled, at most two frontier entries of 8 a page still to be crawled"),
    "trace_bytes_per_discovered": Rate(12, "bytes", "assumed: of the trace, page, ranks and parent, compressed"),
    # --- selection
    "select_pool_pages_per_s": Rate(5_200_000, "pages/s of a core", "measured once: ordering 16 million pages by score"),
    "select_bytes_per_pool_page": Rate(36, "bytes", "measured once: the same"),
    "select_sign_pages_per_s": Rate(1_000, "pages/s of a core", "measured once: docs/performance.md, Selection (near-copies, of 5.9 KB)"),
    "select_find_pages_per_s": Rate(5_000, "pages/s of one core alone", "measured once: docs/performance.md, Selection"),
    "select_bytes_per_signed_page": Rate(6_000, "bytes", "measured once: docs/performance.md, Selection; of pages compared with"),
    "select_bytes_per_walked_page": Rate(200, "bytes", "counted: an entry of a Python dictionary with its key"),
    # --- tokens
    "tokens_per_s": Rate(2_795_000, "tokens/s of a core", "measured: benchmarks/tokenize.py --quick"),
    "tokenize_serial_share": Rate(0.024, "of the work", "measured: benchmarks/tokenize.py; packing, shuffling, writing by one process"),
    "tokenize_bytes_per_document": Rate(40, "bytes", "counted: craw4llm/tokens/tokenize_stage.py"),
    # --- all
    "process_bytes": Rate(150e6, "bytes", "measured: benchmarks/corpus.py, the interpreter and its libraries"),
    "gpu_flops_per_s": Rate(0.4 * 989.4e12, "FLOPs/s of a GPU", "assumed: 40% of an H100 in bf16; evaluation, training says its own"),
}


def rates_with(given: Mapping[str, str]) -> dict[str, float]:
    """The rates, with `given` in the place of some. Raises ConfigError for a name that is none, and for what is no number above 0."""
    rates = {name: rate.value for name, rate in RATES.items()}
    for name, text in given.items():
        if name not in rates:
            raise ConfigError(f"--rate {name}={text}: there is no such rate; there are {', '.join(RATES)}")
        rates[name] = positive(f"--rate {name}", text)
    return rates


def positive(what: str, text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise ConfigError(f"{what}={text}: expected a number above 0")
    return value
