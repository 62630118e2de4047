"""`duat prune-bound` as text for a terminal: result in, text out."""
