"""What is left after a set is removed, refitted by least squares to what the dense model gave."""
