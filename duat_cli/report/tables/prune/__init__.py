"""`duat prune-bound` as text for a terminal."""
