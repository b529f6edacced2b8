"""Writers: how text from outside (names of files, models and devices, lines of logs) enters a language.

Each module has one language: what a terminal shows, words of a shell, YAML, HTML, cells of a table. No other module
builds text in these languages around a value, and a test looks for those that do.
"""
