"""`duat compare`: what moves with the input."""
