"""duat: the Dynamic Universal Approximation form of Hugging Face checkpoints, exact and certified."""

__version__ = "0.2.0"
