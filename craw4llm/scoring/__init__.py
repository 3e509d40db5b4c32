"""Scores: a page's score is a function of its text (or URL) and the scorer alone."""
