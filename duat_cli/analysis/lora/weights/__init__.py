"""What the weights alone say of an adapter or a fine-tuned checkpoint."""
