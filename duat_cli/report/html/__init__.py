"""Reports as one HTML file each: pure functions from a result model to markup, nothing computed, nothing fetched."""
