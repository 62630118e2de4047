"""A model's own code as an affine map: discovery, capture, replay, and the factors of W'."""
