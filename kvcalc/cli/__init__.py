"""The command line: parse, call, hand to output. No arithmetic here.

Modules with commands do without `from __future__ import annotations`: typer evaluates annotations, and for strings that
costs 3 ms at every start.
"""
