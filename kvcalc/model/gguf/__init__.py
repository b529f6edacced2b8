"""Models in GGUF files: the files, their metadata by architecture, and their weights."""
