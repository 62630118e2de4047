"""Passes that begin at a block, and gradients carried back block by block."""
