"""The reports: every number duat prints, its name in the JSON, its meaning and its unit. One report a file."""
