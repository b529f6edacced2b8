"""Prefill and decode on separate instances: x prefill instances, y decode instances, and the cache sent between them.

`instances` finds the layouts of either pool, `rates` how many of each a load needs by the short form, and
`search` the best pair of layouts, on one kind of device or on two. `split` is such a pair with its numbers, and
`finalists` says which pairs are simulated. `rows`, `front` and `commands` describe it.
"""
