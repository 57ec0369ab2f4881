"""What only studies measure."""
