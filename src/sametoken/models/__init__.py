"""One file per architecture, a registry, and the checkpoint loaders."""
