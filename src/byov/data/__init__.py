"""Image sources, augmented views, and shifts (corruptions)."""
