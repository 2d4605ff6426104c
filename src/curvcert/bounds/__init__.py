"""Bounds: the types of a result, and the rooms for Lipschitz and curvature constants."""
