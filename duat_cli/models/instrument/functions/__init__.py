"""How activations and scores follow from what they read."""
