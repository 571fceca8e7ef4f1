"""The loss of a trained network around its weights: curvature, surfaces, and what the adversary does there.

x_adv are perturbed inputs. A *frozen* loss keeps them as they are while the weights move; a *renewed* loss attacks
again at every point. The Hessian is of the frozen loss: the renewed one has kinks.
"""
