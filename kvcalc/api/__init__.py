"""The Python API: the same questions as on the command line, with numbers instead of text.

Every function returns the document that the command prints with `--json`, as plain dictionaries and lists.
`kvcalc.documents` has their types. Sizes are in bytes, lengths in tokens, times in seconds. A function uses every
argument or refuses it by its name (`arguments`).
"""
