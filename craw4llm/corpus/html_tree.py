from pathlib import Path
from craw4llm.corpus.records import Source
WEB_JSON="web.json"
def open_web(path: Path) -> Source: raise NotImplementedError
