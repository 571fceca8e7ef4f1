"""What all domains share: input regions, placements of patches, rounding."""
