"""What is minimised, one file each."""
