"""What several explanations share: paths, baselines, the boundary search, pictures."""
