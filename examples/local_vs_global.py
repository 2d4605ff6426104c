"""Global, anchored and local: the same bound, asked for fewer and fewer pairs of points.

Run it: python examples/local_vs_global.py
"""

import torch

import curvcert
from curvcert.data import load_demo_network, load_digits

net = curvcert.trace(load_demo_network(), torch.zeros(1, 1, 8, 8))
x = load_digits("test").as_float64()[:5]

print("Lipschitz bounds of the logit difference f_3 - f_8, median over 5 digits")
everywhere = curvcert.lipschitz(net, pair=(3, 8))
print(f"  any two points            {float(everywhere):8.2f}  by {everywhere.method}")
print(f"  the digit and any point   {float(curvcert.lipschitz(net, pair=(3, 8), at=x).value.median()):8.2f}")
for radius in (0.1, 0.01, 0.001):
    local = curvcert.lipschitz(net, pair=(3, 8), at=x, radius=radius)
    print(f"  two points within {radius:<5}   {float(local.value.median()):8.2f}")
gradient = net.difference(3, 8).jacobian(x).flatten(1).norm(dim=1)
print(f"  the gradient's norm       {float(gradient.median()):8.2f}  (the limit)")
