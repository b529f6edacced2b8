"""What mixes the tokens of a layer: attention, a recurrence or a convolution.

A mixer says once what it keeps (`caches`), what it weighs (`weights`) and what it computes (`flops`). All counts are
sums over the mixers of a model's layers.
"""
