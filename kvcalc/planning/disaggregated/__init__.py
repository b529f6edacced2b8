"""Prefill and decode on separate instances: x prefill instances, y decode instances, and the cache sent between them.

`instances` finds the layouts of either pool and their `rates`, `matching` the smallest x and y for two layouts, and
`search` the best pair of layouts for a kind of device. `rows`, `front` and `commands` describe it.
"""
