"""One reader per model family: a config mapping in, a ModelSpec out."""
