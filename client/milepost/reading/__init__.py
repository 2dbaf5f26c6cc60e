"""From a checkpoint back to a state: which one, whether it is whole, and loading it."""
