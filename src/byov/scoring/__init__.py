"""Label-free scores of images."""
