"""Foundations: errors, files, keyed random numbers, callbacks, threads."""
