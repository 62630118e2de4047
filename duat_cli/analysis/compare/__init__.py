"""`duat compare`: the parts of the sum that change with the input."""
