"""What studies share: runs, workers, comparisons, claims and the ledger."""
