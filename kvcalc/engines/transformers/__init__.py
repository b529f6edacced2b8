"""Hugging Face Transformers. `engine` has its class."""
