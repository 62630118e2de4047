"""The reports, one in each file: every number that duat prints, its name in the JSON, its meaning and its unit."""
