"""The same bounds in less time; every file here could be deleted."""
