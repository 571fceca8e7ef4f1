"""From a module to a graph of few operations: trace, operations, rules, and the check that graph and model agree."""
