"""FP8 communication: a wire format, the operations on it, and what they are compared with."""
