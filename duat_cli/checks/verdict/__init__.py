"""From measurements to a report: rules are judged, findings grouped by cause, the baseline compared or renewed."""
