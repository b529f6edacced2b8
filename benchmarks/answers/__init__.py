"""Random questions of every kind, asked of the kvcalc on the path, and their answers compared.

Only the command line and the public Python API are used, so any checkout can be asked.
"""
