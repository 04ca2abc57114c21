"""Programs of the repository itself: they make and fetch what its tests and demos need."""
