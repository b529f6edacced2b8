"""A question with its defaults resolved: the model, its types, its layout and its workload."""
