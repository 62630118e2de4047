"""From measurements to a report: rules judged, findings by their causes, the baseline compared or renewed."""
