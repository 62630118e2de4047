"""What W' is described by, and how it is measured where channels are gated."""
