"""The claimed tables of Lipschitz and curvature constants beside the checker's own."""

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from curvcert.checker.claims import Claims
from curvcert.checker.facts import Facts
from curvcert.checker.findings import CURVATURE, LIPSCHITZ, findings_of, require, require_proof
from curvcert.checker.outward import Array
from curvcert.checker.verdict import Finding


@dataclass(frozen=True, eq=False)
class Tables:
    """Both tables; what is found about them is found about every sample."""

    facts: Facts
    claims: Claims

    @property
    def claims_L(self) -> bool:
        """Whether there is a table of Lipschitz constants."""
        return not _is_empty(self.claims.L)

    @cached_property
    def L(self) -> Array:
        """The checker's own Lipschitz constants; infinite where none are claimed."""
        return self.facts.L(self.claims.p) if self.claims_L else np.full_like(self.claims.L, np.inf)

    @cached_property
    def findings(self) -> list[Finding]:
        """What of the claimed tables is not proven."""
        return findings_of(lambda: self._check("L"), lambda: self._check("K"))

    def _check(self, name: str) -> None:
        claimed = self.claims.L if name == "L" else self.claims.K
        if _is_empty(claimed):
            require(not np.nan_to_num(np.diagonal(claimed)).any(), f"the table {name} has a diagonal and nothing else")
            return
        proper = np.array_equal(claimed, claimed.T) and not np.diagonal(claimed).any() and not np.isnan(claimed).any()
        require(proper, f"the table {name} is not that of differences of classes")
        if name == "K":
            self.facts.require_smooth()
        require_proof(name == "L" or self.claims.p == 2, "curvature constants are covered for p = 2 only", engine=False)
        own = self.L if name == "L" else self.facts.K
        short = too_small(claimed, own)
        if short.any():
            i, j = np.argwhere(short)[0]
            text = f"{name} of classes {i} and {j} is claimed to be {claimed[i, j]:.9g}, proven is {own[i, j]:.9g}"
            require_proof(False, text, self.known(name))

    def known(self, name: str) -> bool:
        """Whether a table's constants come by methods that the checker has rules for that are as good."""
        return (
            not self.facts.model.wide
            and self.claims.made_by["LK".index(name)] <= (LIPSCHITZ, CURVATURE)["LK".index(name)]
        )


def too_small(claimed: Array, own: Array) -> NDArray[np.bool_]:
    """Return where the checker's own constants do not prove the claimed ones; a NaN of its own proves nothing."""
    short: NDArray[np.bool_] = ~(claimed >= own)
    return short


def _is_empty(table: Array) -> bool:
    return bool(np.isnan(table[~np.eye(len(table), dtype=bool)]).all())
