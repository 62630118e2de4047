"""The damage of single terms: predicted, read exactly, bounded and measured."""
