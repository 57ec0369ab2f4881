"""Pictures, for the pages and for the studies."""
