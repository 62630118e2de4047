"""Reports as tables for a terminal."""
