"""The report of `duat compare`."""
