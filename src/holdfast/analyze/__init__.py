"""What a trained network looks like inside and around: landscapes, overfitting, tightness of bounds.

Models take inputs (B, ...) to logits (B, K), in eval mode; x are inputs and y their labels (B,). `seed` fixes every
random choice; `chunk` and `batch_size` are the inputs worked on at a time, which do not change the answer.
"""
