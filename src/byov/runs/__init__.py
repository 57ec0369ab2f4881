"""What a run keeps on disk: checkpoints, the split of its images, its training log."""
