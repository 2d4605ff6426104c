"""Attacks: searches for misclassified points.  What they find is an upper bound on robustness, never a certificate."""

from curvcert.attacks.outside import autoattack, foolbox
from curvcert.attacks.pgd import Attack, pgd

__all__ = ["Attack", "autoattack", "foolbox", "pgd"]
