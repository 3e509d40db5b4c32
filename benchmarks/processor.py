"""Processor seconds of benchmarks that work in child processes too."""

import resource

from craw4llm.corpus.extraction import end_children


def cpu() -> float:
    """Processor seconds of this process and of its children, which are ended so that they count."""
    end_children()
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(one.ru_utime + one.ru_stime for one in used)
