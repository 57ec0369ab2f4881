"""Figures for the pages, the run folders and the studies."""
