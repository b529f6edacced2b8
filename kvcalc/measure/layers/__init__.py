"""A model's layers as torch modules with their caches."""
