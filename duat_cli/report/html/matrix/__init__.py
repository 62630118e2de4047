"""The pages of `duat matrix` and `duat matrix --network`."""
