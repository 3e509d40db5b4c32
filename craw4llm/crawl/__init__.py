"""The crawl: frontier, policies, loop, trace, seeds."""
