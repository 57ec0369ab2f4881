"""Loops over weights, compiled by numba, and their interface for tensors."""
