"""Training: the step, the loop, optimizers, monitors, several processes."""
