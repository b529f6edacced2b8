"""The weights of a model: one counter per family, a config mapping in, named matrices out."""
