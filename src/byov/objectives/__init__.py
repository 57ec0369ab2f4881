"""The training objectives, one per file."""
