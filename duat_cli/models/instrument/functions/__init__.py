"""Activations and attention scores as functions of their inputs."""
