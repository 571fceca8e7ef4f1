"""What several attacks share: ascent, gradients, losses, stages, minimum-norm searches."""
