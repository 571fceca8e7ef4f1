"""The same gradients in less time; every file here could be deleted."""
