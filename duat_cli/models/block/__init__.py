"""What a block consists of: its parts and its norms as affine maps."""
