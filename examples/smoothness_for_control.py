"""A learned pendulum: how wrong can its linearisation be? Proven, beside the worst that sampling finds.

Run it: python examples/smoothness_for_control.py
"""

import torch
from torch import nn

import curvcert

torch.manual_seed(0)
z = (2 * torch.rand(2000, 3) - 1) * torch.tensor([3.0, 2.0, 2.0])  # angle, speed, torque
change = 0.1 * torch.stack((z[:, 1], z[:, 2] - 2.0 * z[:, 0].sin() - 0.2 * z[:, 1]), 1)
model = nn.Sequential(nn.Linear(3, 16), nn.Tanh(), nn.Linear(16, 2))
optimiser = torch.optim.Adam(model.parameters(), lr=2e-2)
for _ in range(300):
    optimiser.zero_grad()
    nn.functional.mse_loss(model(z), change).backward()
    optimiser.step()

net = curvcert.trace(model.eval(), torch.zeros(1, 3))
z0 = torch.tensor([[0.5, 0.0, 0.0]], dtype=torch.float64)
J = net.jacobian(z0)[0]
for radius in (1.0, 0.3, 0.1):
    # Two outputs: sqrt(K_0^2 + K_1^2) bounds the change of the whole Jacobian.
    each = [float(curvcert.curvature(net, logit=i, at=z0, radius=radius)) for i in range(2)]
    K = (each[0] ** 2 + each[1] ** 2) ** 0.5
    steps = torch.randn(10_000, 3, dtype=torch.float64)
    steps *= radius / steps.norm(dim=1, keepdim=True)
    worst = float((net(z0 + steps) - net(z0) - steps @ J.T).norm(dim=1).max())
    proven = K / 2 * radius**2
    print(f"within {radius}: K <= {K:.3f}, error of the linearisation: proven {proven:.5f}, found {worst:.5f}")
