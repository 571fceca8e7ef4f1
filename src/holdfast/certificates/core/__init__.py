"""What several certificates share: margins, distances, radii, proved norms, rounding of logits."""
