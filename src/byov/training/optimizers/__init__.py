"""Optimizers over a posterior."""
