"""Which terms go together, what is shown of such a set, and writing a checkpoint without it."""
