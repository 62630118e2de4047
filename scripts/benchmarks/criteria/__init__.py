"""What is left of a model when the same share of it is removed by duat and by the criteria in use."""
