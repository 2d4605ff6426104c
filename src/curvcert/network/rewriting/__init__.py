"""What is known about patterns of nodes: one rule per file, each from nodes to nodes or to a view of them."""
