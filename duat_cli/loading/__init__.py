"""The way from a folder or a hub id to a model in memory. Files are checked before they are read; every fault is one
line."""
