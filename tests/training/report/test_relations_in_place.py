"""What a report says of scores and links where the corpus has no in-degrees (ClueWeb22 with links in place)."""

from types import SimpleNamespace

import numpy as np

from craw4llm.configs import ClueWeb22, CorpusConfig
from craw4llm.fingerprint import External
from craw4llm.stage import Stage
from tests.craw4llm.corpus.clueweb22_writer import Doc, write_clueweb22
from training.report.stage import draw_links, relations_of, relations_table


def test_relations_without_in_degrees(tmp_path, build):
    ids = [f"clueweb22-en0000-00-{k:05d}" for k in range(40)]
    docs = [Doc(one, f"http://a.example/{k}", "text", [ids[(k + j) % 40] for j in (1, 2, 3)]) for k, one in enumerate(ids)]
    folder = External(name="corpus", path=str(write_clueweb22(tmp_path / "w", docs)))
    scores = SimpleNamespace(by_page=np.linspace(0, 1, 40))
    said = {}
    for links in ("compiled", "in_place"):
        config = CorpusConfig(source=ClueWeb22(folder=folder, links=links), heldout_fraction=0.0, dangling_links="outside")
        study = SimpleNamespace(corpus=build(Stage(config)), pagerank=None, scorer=None, arms={}, replicates=(), heldout=None)
        found = relations_of(study, scores)
        said[links] = {record["relation"]: record for record in relations_table(found).records()}
        draw_links(found)
    lost = said["in_place"].pop("score against in-degree")
    assert lost["pages"] == 0 and lost["spearman"] is None and lost["remark"].startswith("not available because")
    assert {name: {**record, "remark": ""} for name, record in said["compiled"].items() if "hop" in name} == said["in_place"]
    assert said["compiled"]["score against in-degree"]["pages"] == 40
