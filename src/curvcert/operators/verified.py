r"""Eigenvalues and singular values bounded from above, with a proof that floating point completes.

If a floating-point Cholesky factorisation of :math:`C = \lambda I - S` runs to the end, then C is
positive definite but for a rounding error that we can bound, so :math:`\lambda` bounds the largest
eigenvalue of S but for the same error.  An ordinary eigenvalue solver only guesses the
:math:`\lambda`; nothing rests on its accuracy but the tightness.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import numpy as np
import torch
from jaxtyping import Float64
from scipy.sparse.linalg import ArpackNoConvergence, LinearOperator, eigsh
from torch import Tensor

from curvcert.budget import checkpoint
from curvcert.errors import InvalidInput, OutOfRange
from curvcert.operators.lanczos import (
    congruent_eigenvalue_guesses,
    largest_eigenvalue_guesses,
    quick_eigenvalue_guesses,
)
from curvcert.rounding import TINY, UNIT_ROUNDOFF, Upper, gamma, inflate, lengths, power_of_two, root_above

_DIRECT_SIZE = 1500
"""Largest symmetric matrix whose whole spectrum is computed to guess the top of it."""

_BATCHED_DIRECT_SIZE = 256
"""The same for a batch with one bound per matrix."""

_SMALL_SIZE = 32
"""The same for a batch on an accelerator: its solvers take larger ones one by one."""

_CONGRUENT_DIRECT_SIZE = 96
"""The same for matrices that differ in a diagonal on either side."""

_CONGRUENT_TIGHT = 1e-9
"""How far below the truth their guesses may be, relatively, before more steps are made."""

_QUICK_SIZE = 384
"""Largest single matrix on a processor of which the spectrum is computed before an iteration is tried."""

_STEPS = (64, 160)
"""Lanczos steps for one guess; the more only where the fewer are not tight."""

_BATCHED_STEPS = 40
"""Lanczos steps where each matrix has a guess of its own."""

_LEAST_STEP = 1e-13
"""The first shift is at least this far above a guess, relatively."""

_STEPS_UP = tuple(1e-12 * 8.0**k for k in range(13))
"""How far above its guess the bound of an inverse form may be, relatively, until it is given up."""

_SINGLE_STEP = 1e-5
"""The same for guesses in single precision, of the largest in size."""

_ROUGH, _ROUGH_STEPS = 1e-6, 16
"""How far above a quick guess its first shift is, relatively, and the steps of such a guess."""

_GRAM_ROWS = 256
"""Rows of a Gram matrix that are computed at once, up to its diagonal."""

_TIGHT = 1e-10
"""A guess counts as long as a bound is verified within this of it, relatively."""


def largest_eigenvalue_upper_bound(
    matrix: Float64[Tensor, "*batch n n"], error: float | Tensor = 0.0
) -> Float64[Tensor, ""]:
    r"""Bound the largest eigenvalue over a batch of symmetric matrices.

    `error` bounds, in the 2-norm, how far the given floats may be from the matrices that are meant; what
    is not symmetric in them is averaged away, which moves them no further.  With :math:`C = fl(\lambda I - S)`
    and a Cholesky
    factorisation of C that completes,

    .. math:: \lambda_{max}(S) \le \lambda + \frac{\gamma_{n+2}}{1 - \gamma_{n+2}} \mathrm{tr}\, C,

    which assumes inner products summed in some order (LAPACK).  Elsewhere (CUDA) the computed
    factor R is checked instead: :math:`\lambda_{max}(S) \le \lambda + \|C - RR^T\|_F` plus the
    rounding of that residual.  The result may be negative only by rounding; it is clipped at 0.

    >>> S = torch.tensor([[2.0, 1.0], [1.0, 2.0]], dtype=torch.float64)
    >>> 3.0 <= float(largest_eigenvalue_upper_bound(S)) < 3.0 + 1e-12
    True
    """
    if not bool(torch.isfinite(matrix).all()):
        raise InvalidInput("An eigenvalue bound needs finite numbers, got NaN or infinity. Check the weights.")
    symmetric, averaging = symmetrised(matrix)
    scale = power_of_two(symmetric.abs().amax())
    scaled = symmetric / scale
    for shift in _shifts(scaled):
        checkpoint()
        bound = _verify(scaled, shift)
        if bound is not None:
            bound = inflate(bound.clamp(min=0.0), 0.0) + 2 * TINY
            return inflate(bound * scale + averaging.amax() + torch.as_tensor(error).to(bound), 0.0)
    raise OutOfRange("No eigenvalue bound could be verified: the numbers overflow. Rescale the weights.")


def largest_eigenvalues_upper_bound(
    matrices: Float64[Tensor, "batch n n"], error: Float64[Tensor, " batch"]
) -> Float64[Tensor, " batch"]:
    """Bound the largest eigenvalue of each symmetric matrix of a batch, known to within `error`.

    As `largest_eigenvalue_upper_bound`, but one value per matrix; over a size of 256 (32 on an accelerator) the
    guesses come from a Lanczos iteration, and what it is short of the truth costs tightness, 1e-6 as a rule.

    >>> S = torch.tensor([[[2.0]], [[3.0]]], dtype=torch.float64)
    >>> largest_eigenvalues_upper_bound(S, torch.zeros(2, dtype=torch.float64)).round(decimals=9)
    tensor([2., 3.], dtype=torch.float64)
    """
    if not bool(torch.isfinite(matrices).all()):
        raise OutOfRange("An eigenvalue bound needs finite numbers: these overflow. Rescale the weights.")
    symmetric, averaging = symmetrised(matrices)
    scale = power_of_two(symmetric.abs().amax(dim=(-2, -1)))
    scaled = symmetric / scale[:, None, None]
    guess, below = _largest_eigenvalue_estimates(scaled)
    bounds = _verified_each(scaled, guess, torch.maximum(below, _LEAST_STEP * guess.abs().clamp(min=2.0**-60)))
    return inflate(bounds * scale + averaging + error, 0.0)


def congruent_eigenvalues_upper_bound(
    B: Float64[Tensor, "n n"], error: Tensor, s: Float64[Tensor, "batch n"], at_once: int
) -> Float64[Tensor, " batch"]:
    r"""Bound the largest eigenvalue of :math:`D B D`, D = diag(s), for each s >= 0, B semidefinite to within `error`.

    All guesses take products with one B; then there is one factorisation for each, `at_once` of them held together.

    >>> B, s = torch.eye(2, dtype=torch.float64), torch.tensor([[1.0, 2.0]], dtype=torch.float64)
    >>> none = torch.zeros((), dtype=torch.float64)
    >>> 4.0 <= float(congruent_eigenvalues_upper_bound(B, none, s, 1)) < 4.0 + 1e-10
    True
    """
    if not bool(torch.isfinite(B).all()):
        raise OutOfRange("An eigenvalue bound needs finite numbers: these overflow. Rescale the weights.")
    symmetric, averaging = symmetrised(B)
    size = power_of_two(symmetric.abs().amax())
    scaled = symmetric / size
    # The largest entry of a semidefinite matrix is on its diagonal: it becomes about 1.
    tops = (s * scaled.diagonal().abs().sqrt()).amax(dim=1)
    sizes = power_of_two(torch.maximum(tops, s.amax(dim=1) * 2.0**-200))
    weights = s / sizes[:, None]
    guess, below = _congruent_guesses(scaled, weights)
    margin = torch.maximum(below, _LEAST_STEP * guess.abs().clamp(min=2.0**-60))

    def bounded(own: Tensor, guess: Tensor, margin: Tensor) -> Tensor:
        return _verified_of(lambda k: (-own[k])[:, :, None] * scaled * own[k][:, None, :], guess, margin)

    pieces = zip(*(each.split(max(1, at_once)) for each in (weights, guess, margin)), strict=True)
    found = [bounded(*piece) for piece in pieces]
    # Two roundings per entry; the Frobenius norm of a semidefinite matrix is at most its trace.
    # Its own trace is off by no more than the error times the root of n.
    off = (Upper(symmetric.diagonal().abs()).sum() * (4 * UNIT_ROUNDOFF) + averaging + error) * (1 + gamma(4 * len(B)))
    # Entries that underflow are off by less than the least float, times weights of at most 2**200.
    scaled_bounds = Upper(torch.cat(found)) + len(B) * 2.0**-600
    return (scaled_bounds * size * sizes * sizes + off * s.amax(dim=1) * s.amax(dim=1) + TINY).bound


def _congruent_guesses(B: Tensor, s: Tensor) -> tuple[Tensor, Tensor]:
    """Guess the largest eigenvalue of each diag(s) B diag(s), and how far below the truth that may be."""
    if len(B) <= _CONGRUENT_DIRECT_SIZE and s.device.type == "cpu":
        top: Tensor = torch.linalg.eigvalsh(s[:, :, None] * B * s[:, None, :])[:, -1]
        return top, torch.zeros_like(top)
    guess, below = congruent_eigenvalue_guesses(B, s, _BATCHED_STEPS)
    slow = (below > _CONGRUENT_TIGHT * guess.abs()).nonzero().flatten()
    if len(slow):
        guess[slow], below[slow] = congruent_eigenvalue_guesses(B, s[slow.to(s.device)], _STEPS[-1])
    return guess.to(s), below.to(s)


def extreme_eigenvalues_upper_bounds(
    matrices: Float64[Tensor, "batch n n"], error: Float64[Tensor, " batch"]
) -> tuple[Float64[Tensor, " batch"], Float64[Tensor, " batch"]]:
    """Bound the largest eigenvalue of each symmetric matrix of a batch, and that of its negative; 0 at least.

    Only the lower triangles are read.  As `largest_eigenvalues_upper_bound`, with guesses in single precision: quick,
    and loose by 1e-5 of the larger one; inf where the numbers overflow.

    >>> S = torch.tensor([[[2.0]], [[-3.0]]], dtype=torch.float64)
    >>> top, bottom = extreme_eigenvalues_upper_bounds(S, torch.zeros(2, dtype=torch.float64))
    >>> [f"{float(each):.3f}" for each in (*top, *bottom)]
    ['2.000', '0.000', '0.000', '3.000']
    """
    guessed = _Guessed.of(matrices, error)
    return guessed.top(), replace(guessed, scaled=-guessed.scaled, guesses=-guessed.guesses.flip(1)).top()


def top_eigenvalues_upper_bounds(
    matrices: Float64[Tensor, "batch n n"], error: Float64[Tensor, " batch"]
) -> Float64[Tensor, " batch"]:
    """Bound the largest eigenvalue of each symmetric matrix alone, as `extreme_eigenvalues_upper_bounds` does."""
    return _Guessed.of(matrices, error).top()


@dataclass(frozen=True, eq=False)
class _Guessed:
    """Matrices divided by powers of two, zeros where they overflow, and their eigenvalues in single precision."""

    scaled: Tensor
    guesses: Tensor
    scale: Tensor
    known: Tensor
    error: Tensor

    @staticmethod
    def of(matrices: Tensor, error: Tensor) -> "_Guessed":
        scale = power_of_two(matrices.abs().amax(dim=(-2, -1)))
        known = (matrices.sum(dim=(-2, -1)) + error).isfinite()
        scaled = torch.where(known[:, None, None], matrices / scale[:, None, None], 0.0)
        return _Guessed(scaled, _eigenvalue_guesses(scaled), scale, known, error)

    def top(self) -> Tensor:
        """Return proven bounds on the largest eigenvalues; inf where the numbers overflow."""
        margin = _SINGLE_STEP * self.guesses.abs().amax(dim=1).clamp(min=2.0**-20)
        bound = _verified_each(self.scaled, self.guesses[:, -1], margin)
        return torch.where(self.known, inflate(bound * self.scale + self.error, 0.0), torch.inf)


def _eigenvalue_guesses(scaled: Tensor) -> Tensor:
    """Guess the eigenvalues of each matrix, in single precision; the norms where LAPACK finds none in one of them."""
    try:
        found: Tensor = torch.linalg.eigvalsh(scaled.to(torch.float32)).to(scaled)
        return found
    except torch.linalg.LinAlgError:  # type: ignore[attr-defined]
        norms = torch.linalg.matrix_norm(scaled)
        return torch.stack([-norms, norms], dim=1)


def eigenvalue_upper_bound_near(matrix: Float64[Tensor, "n n"], guess: float, slack: float) -> Float64[Tensor, ""]:
    """Bound the largest eigenvalue of a symmetric matrix, 0 at least, by about a guess times 1 + slack if that holds.

    >>> S = torch.tensor([[2.0, 1.0], [1.0, 2.0]], dtype=torch.float64)
    >>> 3.0 <= float(eigenvalue_upper_bound_near(S, 3.0, 1e-4)) < 3.001
    True
    """
    scale = power_of_two(matrix.abs().amax())
    scaled = (matrix / scale)[None]
    near = torch.as_tensor(guess, dtype=matrix.dtype, device=matrix.device).reshape(1).clamp(min=0.0) / scale
    bound = _verified_each(scaled, near, (slack * near).clamp(min=2.0**-40))
    return inflate(bound[0] * scale, 0.0)


def _verified_each(scaled: Tensor, guess: Tensor, margin: Tensor) -> Tensor:
    return _verified_of(lambda index: -scaled[index], guess, margin)


def _verified_of(negative: Callable[[Tensor], Tensor], guess: Tensor, margin: Tensor) -> Tensor:
    """Return proven bounds on the largest eigenvalues, 0 at least, from guesses and margins; inf without.

    `negative` makes, by their numbers, new matrices that are the negatives of those to be bounded.
    """
    bounds = torch.full_like(guess, torch.inf)
    open_ = torch.arange(len(guess), device=guess.device)
    for _ in range(60):
        checkpoint()
        shift = (guess + margin)[open_]
        C = negative(open_)
        C.diagonal(dim1=-2, dim2=-1).add_(shift[:, None])
        R, info = torch.linalg.cholesky_ex(C)
        done = (info == 0) & R.sum(dim=(-2, -1)).isfinite()
        bounds[open_[done]] = (shift + _cholesky_errors(C, R))[done]
        open_ = open_[~done]
        if len(open_) == 0:
            break
        margin = 4 * margin
    return inflate(bounds.clamp(min=0.0), 0.0) + 2 * TINY


def _largest_eigenvalue_estimates(symmetric: Tensor) -> tuple[Tensor, Tensor]:
    """Guess the largest eigenvalue of each matrix, and how far below the truth that may be."""
    on_cpu = symmetric.device.type == "cpu"
    if symmetric.shape[-1] <= (_BATCHED_DIRECT_SIZE if on_cpu else _SMALL_SIZE):
        top: Tensor = torch.linalg.eigvalsh(symmetric).amax(dim=-1)
        return top, torch.zeros_like(top)
    guess, below = largest_eigenvalue_guesses(symmetric, _BATCHED_STEPS)
    return guess.to(symmetric), below.to(symmetric)


def spectral_norm_of_matrix_upper_bound(matrix: Float64[Tensor, "*batch n m"]) -> Float64[Tensor, ""]:
    r"""Bound the largest singular value over a batch of matrices, to about 1e-11.

    With :math:`B = fl(WW^T)` (or :math:`W^T W`, whichever is smaller) and inner products of length
    m, :math:`\sigma^2 \le \lambda_{max}(B) + \gamma_m \|W\|_F^2`.

    >>> W = torch.diag(torch.tensor([3.0, -4.0], dtype=torch.float64))
    >>> 4.0 <= float(spectral_norm_of_matrix_upper_bound(W)) < 4.0 + 1e-10
    True
    """
    if matrix.numel() == 0:
        return matrix.new_zeros(())
    wide = matrix if matrix.shape[-2] <= matrix.shape[-1] else matrix.mT
    scale = power_of_two(wide.abs().amax())
    scaled = wide / scale
    m = scaled.shape[-1]
    error = Upper(scaled).square().sum(-2, -1).amax() * gamma(m) + m * TINY
    return Upper(largest_eigenvalue_upper_bound(_gram(scaled), error.bound)).root().bound * scale


def spectral_norms_of_matrices_upper_bound(matrices: Float64[Tensor, "batch n m"]) -> Float64[Tensor, " batch"]:
    """Bound the largest singular value of each matrix, loose by 1e-4 as a rule; inf where the numbers overflow.

    >>> W = torch.diag(torch.tensor([3.0, -4.0], dtype=torch.float64))
    >>> 4.0 <= float(spectral_norms_of_matrices_upper_bound(W[None])[0]) < 4.001
    True
    """
    wide = matrices if matrices.shape[-2] <= matrices.shape[-1] else matrices.mT
    known = wide.abs().amax(dim=(-2, -1)).isfinite()
    scale = power_of_two(torch.where(known, wide.abs().amax(dim=(-2, -1)), 1.0))
    scaled = torch.where(known[:, None, None], wide / scale[:, None, None], 0.0)
    m = scaled.shape[-1]
    forming = Upper(scaled).square().sum(-2, -1) * gamma(m) + m * TINY
    gram = scaled @ scaled.mT
    guess, below = quick_eigenvalue_guesses(gram, _ROUGH_STEPS)
    # Cholesky factorisations read the lower triangles alone: each of their entries is one inner product.
    squared = _verified_of(lambda index: -gram[index], guess, torch.maximum(below, _ROUGH * guess).clamp(min=2.0**-60))
    return torch.where(known, (forming + squared).root().bound * scale, torch.inf)


def _gram(wide: Tensor) -> Tensor:
    """Return W W', each inner product once."""
    n = wide.shape[-2]
    if n < 2 * _GRAM_ROWS or wide.dim() > 2 or wide.device.type != "cpu":
        return wide @ wide.mT
    gram = wide.new_empty(n, n)
    for start in range(0, n, _GRAM_ROWS):
        stop = min(start + _GRAM_ROWS, n)
        gram[start:, start:stop] = wide[start:] @ wide[start:stop].mT
        gram[start:stop, stop:] = gram[stop:, start:stop].mT
    return gram


def dominating_factor(matrix: Float64[Tensor, "n n"], error: float | Tensor = 0.0) -> Float64[Tensor, "n n"]:
    r"""Return a lower triangular R with :math:`R R^T \succeq S`, for S positive semidefinite.

    S is known to within `error` in the 2-norm.  R is the Cholesky factor of the given matrix
    shifted up by more than that error and its own.

    >>> R = dominating_factor(torch.eye(2, dtype=torch.float64))
    >>> bool(torch.linalg.eigvalsh(R @ R.T - torch.eye(2)).min() >= 0)
    True
    """
    n = matrix.shape[-1]
    symmetric, averaging = symmetrised(matrix)
    error = averaging + error
    trace = symmetric.diagonal().abs().sum()
    shift = 4 * float(error + gamma(n + 2) * trace) + torch.finfo(matrix.dtype).tiny
    for _ in range(60):
        C = symmetric.clone()
        C.diagonal().add_(shift)
        R, info = torch.linalg.cholesky_ex(C)
        if int(info) == 0 and shift >= float(error + _cholesky_error(C, R)):
            factor: Tensor = R
            return factor
        shift *= 4
    raise InvalidInput("No Cholesky factor could be verified: the matrix holds NaN or is far from semidefinite.")


def is_positive_definite(A: Float64[Tensor, "n n"], error: Tensor) -> bool:
    """Verify that every symmetric matrix within `error` of A, in the 2-norm, is positive definite.

    If R R' is within d of A - s I, no eigenvalue of A is below s - d, whatever computed R.

    >>> A = torch.tensor([[1.0, 0.999], [0.999, 1.0]], dtype=torch.float64)
    >>> is_positive_definite(A, torch.tensor(1e-4)), is_positive_definite(A, torch.tensor(1e-2))
    (True, False)
    """
    n = len(A)
    trace = Upper(A.diagonal().abs()).sum()
    shift = 4 * (trace * gamma(n + 4) + error).bound
    C = A - shift * torch.eye(n, dtype=A.dtype, device=A.device)
    R, info = torch.linalg.cholesky_ex(C)
    if int(info) != 0 or not bool(torch.isfinite(R).all()):
        return False
    forming = Upper(R).square().sum() * gamma(n + 2) + trace * (2 * UNIT_ROUNDOFF)
    return float((lengths(Upper(C - R @ R.mT, 1)) + forming + error).bound) < float(shift)


def inverse_form_estimate(M: Float64[Tensor, "n n"], C: Float64[Tensor, "m n"]) -> Float64[Tensor, ""]:
    """Return the largest eigenvalue of C M^-1 C' as computed; inf where M is not definite, or so it seems."""
    R, info = torch.linalg.cholesky_ex(M)
    X = torch.linalg.solve_triangular(R, C.mT, upper=False)
    S = X.mT @ X
    if int(info) != 0 or not bool(torch.isfinite(S).all()):
        return torch.full((), torch.inf, dtype=M.dtype, device=M.device)
    largest: Tensor = torch.linalg.eigvalsh(S)[-1]
    return largest.clamp(min=0.0)


def inverse_form_upper_bound(
    M: Float64[Tensor, "n n"], C: Float64[Tensor, "m n"], error: Tensor, C_error: Tensor
) -> Float64[Tensor, ""]:
    r"""Bound the largest eigenvalue of :math:`C M^{-1} C^T`; inf where that cannot be verified.

    It holds for every symmetric matrix within `error` of M and every one within `C_error` of C, in the 2-norm.  A value
    :math:`\rho` is a bound if and only if

    .. math:: \begin{pmatrix} M & C^T \\ C & \rho I \end{pmatrix} \succeq 0,

    which one factorisation shows; an ordinary one guesses the value.

    >>> M, C, none = 2 * torch.eye(2, dtype=torch.float64), torch.ones(1, 2, dtype=torch.float64), torch.tensor(0.0)
    >>> 1.0 <= float(inverse_form_upper_bound(M, C, none, none)) < 1.0 + 1e-10
    True
    """
    n, unproven = len(M), torch.full((), torch.inf, dtype=M.dtype, device=M.device)
    guess = inverse_form_estimate(M, C)
    if not bool(torch.isfinite(guess)):
        return unproven
    # The corner is of the size of 1; the square of a power of two does not round.
    scale = power_of_two(guess.sqrt())
    whole = torch.zeros(n + len(C), n + len(C), dtype=M.dtype, device=M.device)
    whole[:n, :n], whole[n:, :n], whole[:n, n:] = M, C / scale, C.mT / scale
    off = (Upper(C_error) / scale + error + TINY).bound
    for step in _STEPS_UP:
        rho = (guess / scale / scale) * (1 + step) + TINY
        whole.diagonal()[n:] = rho
        if is_positive_definite(whole, off):
            return inflate(rho * scale * scale, 0.0) + TINY
    return unproven


def symmetrised(matrix: Float64[Tensor, "*batch n n"]) -> tuple[Tensor, Tensor]:
    """Return the mean of each matrix and its transpose, and a bound on the rounding of that mean."""
    mean = (matrix + matrix.mT) / 2
    rounding = UNIT_ROUNDOFF * torch.linalg.vector_norm(mean, dim=(-2, -1)) * (1 + 1e-9)
    exact = (matrix == matrix.mT).all(dim=-1).all(dim=-1)
    return mean, torch.where(exact, torch.zeros_like(rounding), rounding)


def _cholesky_error(C: Tensor, R: Tensor) -> Tensor:
    """Bound the 2-norm of C_true - R R' over a batch, where forming C rounded on its diagonal."""
    return _cholesky_errors(C, R).amax()


def _cholesky_errors(C: Tensor, R: Tensor) -> Tensor:
    n = C.shape[-1]
    diagonal = C.diagonal(dim1=-2, dim2=-1)
    if C.device.type == "cpu":
        g = gamma(n + 2)
        excess = Upper(diagonal).sum(-1) * (g / (1 - g))
    else:
        residual = lengths(Upper(C.tril() - (R @ R.mT).tril(), 1), -2, -1)
        excess = residual * root_above(2) + Upper(R).square().sum(-2, -1) * gamma(n)
    # The sum on the diagonal rounds by u |C_ii| at most.
    return (excess + 2 * UNIT_ROUNDOFF * diagonal.amax(dim=-1) + n * TINY).bound


def _verify(symmetric: Tensor, shift: float) -> Tensor | None:
    """Return a proven bound near the shift, or None if the factorisation breaks down."""
    C = -symmetric
    C.diagonal(dim1=-2, dim2=-1).add_(shift)
    R, info = torch.linalg.cholesky_ex(C)
    if bool((info != 0).any()) or not bool(torch.isfinite(R).all()):
        return None
    return shift + _cholesky_error(C, R)


def _shifts(symmetric: Tensor) -> Iterator[float]:
    """Yield values from just above the largest eigenvalue over the batch, or so it seems, and further and further."""
    n, batched = symmetric.shape[-1], symmetric.dim() > 2
    if symmetric.device.type != "cpu":
        iterated = n > (_SMALL_SIZE if batched else _DIRECT_SIZE)
    else:
        iterated = not batched and _QUICK_SIZE < n <= _DIRECT_SIZE
    if iterated:
        yield from _iterated_shifts(symmetric.reshape(-1, n, n))
    guess = _largest_eigenvalue_estimate(symmetric)
    margin = max(abs(guess), 2.0**-60) * (_LEAST_STEP if n <= _DIRECT_SIZE else 1e-11)
    for _ in range(60):
        yield guess + margin
        margin *= 4


def _iterated_shifts(symmetric: Tensor) -> Iterator[float]:
    """Yield the same by Lanczos iteration, as long as they are tight: it takes a few products, a spectrum thousands."""
    for steps in _STEPS:
        guesses, below = largest_eigenvalue_guesses(symmetric, steps)
        guess, slack = float(guesses.amax()), max(float(guesses.amax().abs()), 2.0**-60)
        margin = max(float((guesses + below).amax()) - guess, _LEAST_STEP * slack)
        while margin <= _TIGHT * slack:
            yield guess + margin
            margin *= 4


def _largest_eigenvalue_estimate(symmetric: Tensor) -> float:
    """Guess the largest eigenvalue over the batch; a poor guess costs time, not soundness."""
    n = symmetric.shape[-1]
    if n <= _DIRECT_SIZE or symmetric.dim() > 2 or symmetric.device.type != "cpu":
        return float(torch.linalg.eigvalsh(symmetric).amax())

    def product(
        v: "np.ndarray[tuple[int], np.dtype[np.float64]]",
    ) -> "np.ndarray[tuple[int], np.dtype[np.float64]]":
        return (symmetric @ torch.from_numpy(np.ascontiguousarray(v).reshape(-1))).numpy()

    start = np.cos(np.arange(n, dtype=np.float64))
    operator = LinearOperator((n, n), matvec=product, dtype=np.float64)
    try:
        top = eigsh(operator, k=1, which="LA", v0=start, tol=1e-11, ncv=40, maxiter=60, return_eigenvectors=False)
        return float(top[0])
    except ArpackNoConvergence:
        return float(torch.linalg.eigvalsh(symmetric).amax())
