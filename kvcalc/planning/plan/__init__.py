"""`kvcalc plan`: the smallest layout that serves the traffic, for each kind of device and engine.

`document` answers with a row each. `targets` and `traffic` are what is asked, `shapes` the layouts of one replica,
`replicas` the search with the short form, and `pareto` the front. `planned` simulates the load, `judge` compares the
times with the targets, and `finalists` searches among simulated layouts. `disaggregated` has layouts with separate
prefill and decode instances.
"""
