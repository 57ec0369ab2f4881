"""Shared by all studies: training and caching (lab), arms (compare), claims, their checklist, and the ledger."""
