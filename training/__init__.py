"""From token shards to a checkpoint, its results on held-out pages and 23 tasks, and the report."""
