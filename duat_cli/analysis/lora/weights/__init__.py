"""Analysis of an adapter or a fine-tuned checkpoint from its weights alone."""
