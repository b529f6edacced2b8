"""Prefill and decode on separate instances: x prefill instances, y decode instances, and the cache sent between them.

`instances` finds the layouts of either pool and their `rates`, `matching` the cheapest x and y for two layouts, and
`search` the best pair of layouts, on one kind of device or on two. `split` is such a pair with its numbers, and
`finalists` says which pairs are simulated. `rows`, `front` and `commands` describe it.
"""
