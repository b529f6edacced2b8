"""The documents that answer a question, each in a file of its own."""
