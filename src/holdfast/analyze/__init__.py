"""What a trained network looks like inside and around: landscapes, overfitting, tightness of bounds."""
