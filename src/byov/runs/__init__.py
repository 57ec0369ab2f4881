"""The run folder on disk: paths, checkpoints, the split of its images, the training log."""
