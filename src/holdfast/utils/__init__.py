"""Small tools that know nothing of robustness: progress, memory, files, intervals, options."""
