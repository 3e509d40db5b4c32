"""In how many tasks the parts of a stage are made: what Airflow bears, and what pays.

    grouped(5000) -> 1000            parts that are asked for -> parts that are made, each a mapped task
    worth(47_000) -> 470             seconds of work on one core -> parts of at least LEAST_PART_S each

Parts of a stage are shares, 1/N to N/N, of any N, so fewer parts are larger ones: nothing is lost by grouping them.
"""

# [core] max_map_length is 1,024: Airflow refuses to map over more results of a task than that. Of a list in the DAG file, as ours, it
# refuses none, but keeps them all in the DAG's stored form; so the same limit, as a round number.
MOST_PARTS = 1000
# Airflow spends 2.7 s of a slot on a task, 6.3 on a machine that others keep busy (scripts/scale_rehearsal.py; docs/operations.md, section
# 10): 5 s are 5% of 100.
SLOT_S_PER_TASK = 5.0
LEAST_PART_S = 100.0


def grouped(asked: int) -> int:
    """Parts that are made where `asked` are asked for; 1: the stage's own task does all."""
    return max(1, min(asked, MOST_PARTS))


def worth(core_s: float) -> int:
    """The most parts for so much work of one core that each lasts LEAST_PART_S; 1 where even two would not."""
    return grouped(int(core_s // LEAST_PART_S))
