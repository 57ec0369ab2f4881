"""The commands, one file each: its options, from which the help is made, and `run`, which returns the exit code."""
