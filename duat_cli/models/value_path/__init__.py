"""V and O of the heads: the layers that they can be read from, and the factors of W'."""
