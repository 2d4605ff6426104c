"""Save a certificate with its network, and have it checked by code that shares nothing with what made it.

Run it: python examples/save_and_check.py
"""

import tempfile
from pathlib import Path

import torch
from torch import nn

import curvcert

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 3)).eval()
net = curvcert.trace(model, torch.zeros(1, 6))
x = torch.randn(4, 6, dtype=torch.float64)

with tempfile.TemporaryDirectory() as name:
    certificate_file, network_file = Path(name) / "certificate.safetensors", Path(name) / "network.safetensors"
    curvcert.certify(net, x, method="checkable").save(certificate_file)
    curvcert.save_network(net, network_file)

    print(curvcert.load_certificate(certificate_file))
    verdict = curvcert.check_certificate(certificate_file, network_file, x.numpy())
    print("status:", *verdict.status)
    print("the certificate holds:", verdict.holds)

    elsewhere = curvcert.check_certificate(certificate_file, network_file, x.numpy() + 1e-3)
    print("for other inputs:", elsewhere.status[0], "-", elsewhere.reasons[0])
