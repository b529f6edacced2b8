"""Pasted commands and manifests: the programs that they start, with their words, variables and images."""
