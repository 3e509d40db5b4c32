"""Code that goes into an exported folder, so that `transformers` loads it without this project."""
