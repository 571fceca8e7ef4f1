"""Linear bounds: relaxations of activations, backward and forward substitution, optimised slopes."""
