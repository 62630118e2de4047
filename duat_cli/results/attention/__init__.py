"""Reports of the attention matrices H themselves."""
