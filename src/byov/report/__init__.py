"""Pages about runs and scores."""
