"""Pruning of weights and of whole units."""
