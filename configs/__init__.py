"""Data that steers duat: prompt sets and policies. No code."""
