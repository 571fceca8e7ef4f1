"""Can an explanation be trusted? Locality, stability, randomised weights."""
