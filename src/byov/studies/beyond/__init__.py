"""Studies beyond the paper, one file each."""
