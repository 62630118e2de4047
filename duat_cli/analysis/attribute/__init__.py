"""`duat attribute`: what a prediction is made of."""
