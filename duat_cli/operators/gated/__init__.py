"""W' with channels that are scaled by the receiving token."""
