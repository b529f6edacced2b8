"""The command line: parse, call, hand to output. No arithmetic here."""
