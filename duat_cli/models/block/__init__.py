"""The parts of a block, and its norms as affine maps."""
