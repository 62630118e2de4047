"""`duat attribute`: the parts of a prediction, which add up to it."""
