"""Crawl policies compared by the language models they lead to. Start at README.md; stages are in docs/artifacts.md."""

__version__ = "0.1.0"
