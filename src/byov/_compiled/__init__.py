"""Loops over weights that numba compiles, and how tensors get there."""
