"""What is carried through a network, one way of bounding per file."""
