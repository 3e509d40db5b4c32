"""The one place that imports mosaicml-streaming, and only when something is written.

    streaming().MDSWriter(...)

`import streaming` imports its image data sets and with them torchvision, which this project neither needs nor installs: an empty
module takes the place of `streaming.vision`. The import takes seconds (torch and transformers come with it), so nothing here
happens at import time, and reading shards does not need it (`craw4llm.tokens.shards`).
"""

import sys
import types
from typing import Any


def streaming() -> Any:
    """The package `streaming`, imported at the first call."""
    if "streaming" not in sys.modules:
        sys.modules.setdefault("streaming.vision", types.ModuleType("streaming.vision"))
    import streaming as package

    return package
