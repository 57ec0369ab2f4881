"""What is measured of a run, with and without labels."""
