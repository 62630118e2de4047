"""The numbers that describe W', and how they are measured, also where channels are gated."""
