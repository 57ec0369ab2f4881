"""A trained run in use: load it, compute features, compare with its reference images."""
