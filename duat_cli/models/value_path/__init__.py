"""V and O of the heads: where they can be read, and the factors of W'."""
