"""Tokens a second of the tokenize stage; all of it is in benchmarks/tokenization.py.

    python benchmarks/tokenize.py [--quick] [--repeats 3]

A script's folder comes first on Python's path, so a file of this name would take the place of the standard library's `tokenize` for every
script in here. When it is imported under that name, it hands over to the standard library's.
"""

import sys

if __name__ == "__main__":
    import runpy
    from pathlib import Path

    here = sys.path.pop(0)
    runpy.run_path(str(Path(here) / "tokenization.py"), run_name="benchmark")["main"]()
elif __name__ == "tokenize":
    import importlib.util
    import os

    spec = importlib.util.spec_from_file_location("tokenize", os.path.join(os.path.dirname(os.__file__), "tokenize.py"))
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["tokenize"] = module
    spec.loader.exec_module(module)
