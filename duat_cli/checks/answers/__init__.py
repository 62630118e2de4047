"""What a model answered when its baseline was made, and whether it still does."""
