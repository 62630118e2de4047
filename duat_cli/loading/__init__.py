"""From a folder or a hub id to a model in memory: files checked before anything is read, one line for every fault."""
