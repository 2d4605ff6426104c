"""The numbers that the paper reports: Entesari, Sharifi and Fazlyab, ICML 2024.

Its norms were estimated from below by power iteration; ours are upper bounds.
"""

from typing import Any

FLOATS = {
    "fig:anch": "Figure 1",
    "fig:certifiedRadiusAttack": "Figure 2",
    "fig:certified_radius": "Figure 3",
    "table:main_results": "Table 1",
    "fig:AnchoredExperiment": "Figure 4",
    "fig:newCertifiedAttackRadius": "Figure 5",
    "fig:attack_example": "Figure 6",
    "fig:persampleImprovement": "Figure 7",
    "fig:curvatureIsBetterThanLipschitz": "Figure 8",
    "fig:attackRadius": "Figure 9",
}
"""The labels of the paper's figures and its table, as its source has them in this order, and their numbers."""

TABLE_1: dict[tuple[str, str], tuple[float, float, float, float]] = {
    ("6C2F", "Standard"): (79.95, 0.0, 0.0, 0.0),
    ("6C2F", "CRM"): (58.57, 36.25, 18.36, 7.37),
    ("6C2F", "CCRC"): (61.15, 49.53, 33.36, 16.95),
    ("Lip-3C1F", "SLL"): (57.2, 45.0, 35.0, 26.5),
    ("Lip-3C1F", "SLL+CCRC"): (53.2, 46.6, 39.3, 31.6),
    ("6F", "Standard"): (61.89, 0.0, 0.0, 0.0),
    ("6F", "CRM"): (60.63, 42.73, 24.75, 12.6),
    ("6F", "CCRC"): (62.1, 52.09, 40.8, 29.17),
}
"""Model and method; clean accuracy, and certified at 36/255, 72/255 and 108/255, in percent."""

LOT_XS = (75.5, 63.4, 49.2, 36.1)
"""A 1-Lipschitz network of 1.6 million parameters, in the same columns; the first two: Prach and others, CVPR 2024."""

ATTACKS_6F: dict[str, Any] = {
    "clean": 56.19,
    "certified": 47.16,
    "pgd": 48.46,
    "attack_certificates": 808,
    "within": 645,
    "at_most": 49.74,
}
"""Attack certificates of the curvature-trained 6F at 36/255; accuracies in percent."""

ATTACKS_ONE_LIPSCHITZ: dict[str, Any] = {"correct": 5000, "attack_certificates": 150, "largest": 0.07}
"""Attack certificates of a 1-Lipschitz model: about 150 of about 5,000, all below 0.07."""

TANH_SLOPE_AT_2 = 0.582
"""What the anchored slope of tanh at 2 lies below."""
