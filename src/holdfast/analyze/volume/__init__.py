"""The volume of good minima: are they found because an optimiser looks for them, or because there are more of them?

Optimisers without gradients, volume estimates with exact intervals, toys with pictures, and few-shot heads, after
Chiang et al., "Loss landscapes are all you need: neural network generalization can be explained without the implicit
bias of gradient descent", 2023.
"""
