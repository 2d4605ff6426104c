"""Values that are known, orderings that are proved, and errors that say what is wrong."""

import math
from dataclasses import replace
from itertools import combinations, product

import mpmath
import pytest
import torch
from torch import Tensor, nn

import curvcert
from curvcert import Anchor, Ball, Bound, Estimate, Global, lipschitz
from curvcert.activations import ACTIVATIONS, RELU, SIN, TANH, declare_activation, leaky_relu
from curvcert.bounds.lipschitz import LIPSCHITZ_METHODS, AbstractLipschitzMethod, LipLT, Product
from curvcert.bounds.lipschitz.analyses import over_balls
from curvcert.bounds.lipschitz.liplt import liplt_bound, liplt_prefixes
from curvcert.bounds.lipschitz.lipsdp_recursion import lipsdp_metrics, lipsdp_recursion_bound
from curvcert.bounds.lipschitz.problem import Problem, make_problem
from curvcert.errors import InvalidInput, SoundnessError, UnsupportedBlock, UnsupportedNorm
from curvcert.network import Affine, Block, MaxPool, Network
from curvcert.norms import conjugate
from curvcert.operators import Dense, Identity, NormBounds, Zero
from curvcert.propagation.hessians import total_curvature
from tests.bounds.cases import CASES, IDS, ROWS, feed_forward, one_dimensional, randn, residual
from tests.sampling import crossed

INF = math.inf
F64 = torch.float64
SLACK = 1e-11
"""Relative: verified eigenvalues and the slack of a recursion; far below any looseness."""


def column(*values: float) -> Tensor:
    return torch.tensor(values, dtype=F64)[:, None]


def assert_exact(bound: Bound, exact: Tensor | float, slack: float = SLACK) -> None:
    exact = torch.as_tensor(exact, dtype=F64)
    assert bool((bound.value >= exact * (1 - 1e-15)).all()), (bound.value, exact)
    assert bool((bound.value <= exact * (1 + slack) + 1e-290).all()), (bound.value, exact)


# Exact values.


@pytest.mark.parametrize("method", ["product", "liplt", "auto"])
def test_linear_networks_are_exact(method) -> None:
    A = randn(4, 5, seed=1)
    network = Network.of_blocks((Affine(Dense(A), torch.zeros(4, dtype=F64), "linear"),))
    assert_exact(lipschitz(network, 2, method=method), torch.linalg.matrix_norm(A, 2))
    for q in (1.0, 1.5, 2.0, INF):
        assert_exact(lipschitz(network, 1, q, method), torch.linalg.vector_norm(A, q, dim=0).max())
    for p in (1.0, 1.5, 2.0, 3.0, INF):
        assert_exact(lipschitz(network, p, INF, method), torch.linalg.vector_norm(A, conjugate(p), dim=1).max())
        rows = torch.stack([A[i] - A[j] for i, j in combinations(range(4), 2)])
        assert_exact(
            lipschitz(network, p, method=method, pair="all"), torch.linalg.vector_norm(rows, conjugate(p), dim=1)
        )
        assert_exact(lipschitz(network, p, method=method, logit=2), torch.linalg.vector_norm(A[2], conjugate(p)))


@pytest.mark.parametrize("method", ["product", "liplt", "lipsdp-recursion", "auto"])
@pytest.mark.parametrize("w", [-2.5, 0.3, 1e-6, 1e6])
def test_one_dimensional_networks_are_exact(method, w) -> None:
    assert_exact(lipschitz(one_dimensional(w, TANH), method=method), abs(w))


def test_a_chain_of_linear_slopes_is_exact_by_lipLT_and_not_by_the_product() -> None:
    # With slopes in [1, 1] only the product of the maps is left: LipLT sees it, the product of norms does not.
    straight = leaky_relu(1.0)
    network = feed_forward((4, 3, 5, 2), straight, seed=3)
    maps = [block.W.as_matrix() for block in network.blocks] + [network.blocks[-1].G.as_matrix()]
    exact = torch.linalg.matrix_norm(torch.linalg.multi_dot(maps[::-1]), 2)
    assert_exact(lipschitz(network, method="liplt"), exact, 1e-10)
    assert float(lipschitz(network, method="product")) > 1.1 * float(exact)


def test_anchored_tanh_at_two() -> None:
    # The tangent from (2, tanh 2) touches at y < 0 with tanh'(y) (y - 2) = tanh y - tanh 2.
    touch = mpmath.findroot(lambda y: mpmath.sech(y) ** 2 * (y - 2) - mpmath.tanh(y) + mpmath.tanh(2), -0.8)
    slope = float(mpmath.sech(touch) ** 2)
    assert slope == pytest.approx(0.5815729372, abs=1e-10)
    bound = lipschitz(one_dimensional(1.0, TANH), method="anchored", at=column(2.0, 0.0, -2.0))
    assert_exact(bound, torch.tensor([slope, 1.0, slope], dtype=F64))
    assert isinstance(bound.scope, Anchor)


@pytest.mark.parametrize("name", ["tanh", "gelu", "silu", "sin", "softsign", "relu"])
def test_local_in_one_dimension_is_the_largest_slope_in_the_interval(name) -> None:
    w, b = 1.5, 0.4
    network = one_dimensional(w, ACTIVATIONS[name], b)
    x, r = column(-3.0, -0.5, 0.1, 2.0), torch.tensor([0.5, 0.1, 1.0, 0.0], dtype=F64)
    grid = x + r[:, None] * torch.linspace(-1, 1, 200_001, dtype=F64)
    exact = w * ACTIVATIONS[name].derivative(w * grid + b).abs().amax(dim=1)
    bound = lipschitz(network, method="local", at=x, radius=r)
    # The grid misses the peak by less than half its step, where softsign' has a corner.
    assert_exact(bound, exact, 1e-4 if name == "softsign" else 1e-8)
    assert isinstance(bound.scope, Ball)


@pytest.mark.parametrize(("p", "q"), [(2.0, 2.0), (2.0, INF), (1.0, INF), (3.0, INF), (INF, INF)])
def test_local_in_a_ball_of_radius_zero_is_the_norm_of_the_jacobian(p, q) -> None:
    network = feed_forward((4, 6, 5, 3), TANH)
    x = randn(5, 4, seed=2)
    J = network.jacobian(x)
    exact = torch.linalg.matrix_norm(J, 2) if q == 2 else torch.linalg.vector_norm(J, conjugate(p), dim=2).amax(dim=1)
    assert_exact(lipschitz(network, p, q, "local", at=x, radius=0.0), exact, 1e-9)


@pytest.mark.parametrize("p", [1.0, 1.5, 2.0, INF])
def test_local_of_pairs_in_a_ball_of_radius_zero_is_the_gradient(p) -> None:
    network = residual(4, 5, TANH)
    x = randn(3, 4, seed=2)
    exact = torch.linalg.vector_norm(network.all_differences().jacobian(x), conjugate(p), dim=2)
    assert_exact(lipschitz(network, p, method="local", at=x, radius=0.0, pair="all"), exact, 1e-9)


@pytest.mark.parametrize(("p", "q", "exact"), [(1, 1, 4.0), (2, 2, 2.0), (INF, INF, 1.0), (INF, 1, 16.0), (2, 1, 8.0)])
def test_max_pooling(p, q, exact) -> None:
    # 2 x 2 windows with stride 1 on 5 x 5: an inner entry lies in 4 of 16 windows.
    network = Network.of_blocks((MaxPool((1, 5, 5), (2, 2), (1, 1), name="pool"),))
    for method in ("product", "liplt"):
        assert_exact(lipschitz(network, p, q, method), exact)


# Orderings.


@pytest.mark.parametrize(("case", "p"), crossed(CASES, [1.0, 1.5, 2.0, 3.0, INF]))
def test_liplt_never_exceeds_the_product(case, p) -> None:
    network = case.make()
    assert float(lipschitz(network, p, method="liplt")) <= float(lipschitz(network, p, method="product"))
    if network.outputs > 1:
        by = {name: lipschitz(network, p, method=name, pair="all").value for name in ("liplt", "product")}
        assert bool((by["liplt"] <= by["product"]).all())


@pytest.mark.parametrize("name", ROWS)
def test_the_lipsdp_recursion_never_exceeds_the_product(name) -> None:
    network = feed_forward((4, 5, 6, 3), ROWS[name], seed=4)
    recursion, product = (float(lipschitz(network, method=m)) for m in ("lipsdp-recursion", "product"))
    assert recursion <= product * (1 + SLACK)


def test_the_lipsdp_recursion_gains_on_slopes_from_0_to_1() -> None:
    network = feed_forward((6, 12, 12, 12, 3), TANH, seed=4)
    assert float(lipschitz(network, method="lipsdp-recursion")) < 0.8 * float(lipschitz(network, method="product"))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "norms"), crossed(CASES, [(1.0, 1.0), (2.0, 2.0), (3.0, 3.0), (INF, INF), (2.0, INF)])
)
def test_a_smaller_ball_and_a_smaller_scope_never_give_more(case, norms) -> None:
    network, (p, q) = case.make(), norms
    x = randn(2, *network.in_shape, seed=1)
    everywhere = float(lipschitz(network, p, q, "liplt"))
    previous = torch.zeros(len(x), dtype=F64)
    for radius in (0.0, 1e-6, 0.01, 0.1, 0.5, 1.0, 4.0, 100.0):
        local = lipschitz(network, p, q, "local", at=x, radius=radius).value
        assert bool((previous <= local * (1 + SLACK)).all()), radius
        assert bool((local <= everywhere * (1 + SLACK)).all()), radius
        previous = local
    assert bool((lipschitz(network, p, q, "anchored", at=x).value <= everywhere * (1 + SLACK)).all())


@pytest.mark.parametrize("p", [1.0, 2.0])
def test_over_a_ball_it_is_at_most_the_gradient_at_its_centre_and_its_change_by_the_curvature(p) -> None:
    won = []
    for name, radius in product(("tanh", "gelu", "silu"), (0.05, 0.2, 1.0)):
        network, x = feed_forward((5, 8, 8, 3), ROWS[name], seed=3), 2 * randn(6, 5, seed=3)
        free = x.clone().requires_grad_()
        gradient = torch.autograd.grad(network(free)[:, 0].sum(), free)[0]
        balls = over_balls(make_problem(network, p, None, x, radius, None, 0))
        covectors = balls.gradients_of()
        assert covectors is not None
        K = total_curvature(balls, covectors)[:, 0]
        most = torch.linalg.vector_norm(gradient, conjugate(p), dim=1) + K * radius
        local = lipschitz(network, p, method="local", at=x, radius=radius, logit=0).value
        assert bool((local <= most * (1 + SLACK)).all())
        won.append(float((local / most).amax()))
    # It is what makes the bound of some samples.
    assert max(won) >= 1 - SLACK, max(won)


def test_auto_is_the_least_and_says_what_it_chose() -> None:
    network = feed_forward((4, 6, 5, 3), TANH)
    x = torch.stack([torch.zeros(4, dtype=F64), 20 * randn(4, seed=1)])
    bound = lipschitz(network, at=x)
    names = ("product", "liplt", "lipsdp-recursion", "lipsdp", "anchored")
    each = torch.stack([lipschitz(network, method=name, at=x).value for name in names])
    assert torch.equal(bound.value, each.amin(dim=0))
    assert set(bound.method.split(" / ")) == {names[k] for k in each.argmin(dim=0).tolist()}
    assert bound.skipped == ("local: needs at=x and radius=r",)
    assert isinstance(bound.scope, Anchor)
    assert lipschitz(network, p=1).skipped[0] == "lipsdp-recursion: needs p = q = 2"


def test_an_anchored_bound_never_serves_a_ball() -> None:
    bound = lipschitz(one_dimensional(1.0, TANH), at=column(2.0), radius=2.0)
    assert "anchored: needs at=x and no radius" in bound.skipped
    assert float(bound.value) >= 1.0


def test_a_global_bound_serves_every_scope() -> None:
    network, x = feed_forward((3, 4, 2), TANH), randn(3, 3, seed=1)
    for scope in ({"at": x}, {"at": x, "radius": 0.1}):
        bound = lipschitz(network, method="liplt", pair="all", **scope)
        assert bound.value.shape == (3, 1)
        assert isinstance(bound.scope, Global)
        assert torch.equal(bound.value[0], lipschitz(network, method="liplt", pair="all").value)


# Shapes, batches, breakdowns.


@pytest.mark.parametrize(
    ("target", "shape"), [({}, ()), ({"logit": 1}, ()), ({"pair": (0, 2)}, ()), ({"pair": "all"}, (3,))]
)
@pytest.mark.parametrize("method", LIPSCHITZ_METHODS)
def test_shapes(target, shape, method) -> None:
    network, x = feed_forward((4, 5, 3), TANH), randn(6, 4, seed=1)
    scope = {"anchored": {"at": x}, "local": {"at": x, "radius": 0.1}}.get(method, {})
    asked = {"at": None, "radius": None, "pair": None, "logit": None} | scope | target
    problem = make_problem(network, 2, None, **asked)
    if reason := LIPSCHITZ_METHODS[method].reason_to_skip(problem):
        pytest.skip(reason)
    bound = lipschitz(network, method=method, **scope, **target)
    assert bound.value.shape == ((6,) if scope else ()) + shape
    assert bound.value.dtype == F64
    assert [term.layer for term in bound.per_layer] == ["layer0"]


def test_pairs_come_in_the_order_of_combinations_and_one_at_a_time_they_are_the_same() -> None:
    network, x = feed_forward((4, 6, 4), TANH), randn(2, 4, seed=1)
    for scope in ({}, {"at": x}, {"at": x, "radius": 0.3}):
        together = lipschitz(network, pair="all", **scope).value
        for k, pair in enumerate(combinations(range(4), 2)):
            torch.testing.assert_close(
                lipschitz(network, pair=pair, **scope).value, together[..., k], rtol=SLACK, atol=0
            )
    torch.testing.assert_close(
        lipschitz(network, pair=(0, -1)).value, lipschitz(network, pair=(3, 0)).value, rtol=SLACK, atol=0
    )


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=IDS)
def test_a_sample_does_not_depend_on_the_others(case) -> None:
    network = case.make()
    x, r = randn(4, *network.in_shape, seed=1), torch.tensor([0.1, 1.0, 0.0, 3.0], dtype=F64)
    for scope, method in (({"at": x}, "anchored"), ({"at": x, "radius": r}, "local"), ({"at": x, "radius": r}, "auto")):
        together = lipschitz(network, method=method, **scope).value
        for i in range(len(x)):
            alone = lipschitz(network, method=method, **{key: value[i : i + 1] for key, value in scope.items()}).value
            # The search for LipSDP's multipliers starts from slopes whose last digits depend on the batch.
            torch.testing.assert_close(alone[0], together[i], rtol=1e-4 if method == "auto" else SLACK, atol=0)


@pytest.mark.parametrize("case", CASES, ids=IDS)
def test_every_method_breaks_its_bound_down_by_layer(case) -> None:
    network = case.make()
    x = randn(2, *network.in_shape, seed=1)
    names = [block.name for block in network.blocks]
    for method in ("product", "liplt", "anchored", "local"):
        scope = {"anchored": {"at": x}, "local": {"at": x, "radius": 0.1}}.get(method, {})
        bound = lipschitz(network, method=method, **scope)
        assert [term.layer for term in bound.per_layer] == names
        assert all(term.method == method and bool((term.value >= 0).all()) for term in bound.per_layer)


def test_all_prefixes_come_at_once_and_bound_the_prefix_networks() -> None:
    network = feed_forward((3, 5, 4, 4, 2), ACTIVATIONS["gelu"], seed=2)
    problem = make_problem(network, 2, None, None, None, None, None)
    prefixes = liplt_prefixes(problem, problem.norms)
    assert liplt_prefixes(problem, problem.norms) is prefixes
    for k in range(1, len(network.blocks) + 1):
        alone = lipschitz(network.prefix(k), method="liplt")
        torch.testing.assert_close(alone.value, prefixes[k], rtol=SLACK, atol=0)


def test_estimated_norms_lead_to_an_estimate() -> None:
    class Halved(NormBounds):
        """Norms that are too small, as an estimate may be."""

        def norm(self, op, p, q) -> Tensor:
            return 0.5 * super().norm(op, p, q)

        def result(self, value, p, q, scope, method, per_layer=(), assumes=(), skipped=()) -> Estimate:
            return Estimate(value, p, q, scope, method, per_layer)

    problem = make_problem(feed_forward((3, 4, 2), TANH), 2, None, None, None, None, None)
    assert isinstance(liplt_bound(problem, Halved()), Estimate)


def test_what_was_declared_is_told() -> None:
    act = declare_activation("cube-root-ish", torch.tanh, lambda z: 1 - torch.tanh(z) ** 2, slope=(0.0, 1.0))
    network = feed_forward((3, 4, 2), act)
    x = randn(2, 3, seed=1)
    for scope in ({}, {"at": x}, {"at": x, "radius": 0.1}):
        assert any("cube-root-ish" in line for line in lipschitz(network, **scope).assumes)


def test_the_input_needs_no_gradient_and_gets_none() -> None:
    x = randn(2, 3, seed=1).requires_grad_()
    for scope in ({"at": x}, {"at": x, "radius": 0.1}):
        assert not lipschitz(feed_forward((3, 4, 2), TANH), **scope).value.requires_grad


# The LipSDP recursion.


@pytest.mark.parametrize("name", ROWS)
@pytest.mark.parametrize("widths", [(3, 5, 4, 2), (6, 2, 7, 1)])
def test_the_metrics_are_feasible_for_lipsdp(name, widths) -> None:
    """The matrix inequality of each step holds for X = Y^-1, checked in plain linear algebra."""
    network = feed_forward(widths, ROWS[name], seed=6)
    metrics = lipsdp_metrics(make_problem(network, 2, None, None, None, None, None))
    alpha, beta = ROWS[name].slope
    for block, before, after in zip(network.blocks, metrics, metrics[1:], strict=False):
        W = block.W.as_matrix()
        X, following = (_inverse_metric(metric, n) for metric, n in ((before, W.shape[1]), (after, W.shape[0])))
        S = W @ torch.linalg.inv(X) @ W.T
        if after.matrix is None:
            top = torch.linalg.eigvalsh(S).max()
            assert float(after.scale) >= max(alpha**2, beta**2) * float(top) * (1 - 1e-12)
            continue
        # Some multiplier t makes the inequality hold; the recursion's own is one.
        t = 2 / (beta * (beta - alpha) * float(torch.linalg.eigvalsh(S).max()) * (1 + 1e-11))
        corner, side = X + t * alpha * beta * W.T @ W, -t * (alpha + beta) / 2 * W.T
        eye = torch.eye(len(W), dtype=F64)
        matrix = torch.cat([torch.cat([corner, side], dim=1), torch.cat([side.T, t * eye - following], dim=1)])
        assert float(torch.linalg.eigvalsh(matrix).min()) >= -1e-9 * float(matrix.abs().max())


def _inverse_metric(metric, n: int) -> Tensor:
    if metric.matrix is None:
        return torch.eye(n, dtype=F64) / metric.scale
    A = torch.eye(n, dtype=F64) if metric.along is None else metric.along.as_matrix()
    multiple = 0.0 if metric.multiple is None else metric.multiple
    return torch.linalg.inv(multiple * torch.eye(n, dtype=F64) + A @ metric.matrix @ A.T)


def test_slopes_about_zero_leave_the_product() -> None:
    network = feed_forward((3, 4, 4, 2), SIN, seed=3)
    bound = lipschitz(network, method="lipsdp-recursion")
    assert "X^-1 = L^2 I" in bound.method
    assert "nothing to gain" in bound.per_layer[0].method


@pytest.mark.parametrize(
    "slope", [(0.0, 0.0), (-1.0, 0.0), (-1.0, 1.0), (-0.999999, 1.0), (-0.99, 1.0), (0.5, 0.5), (0.999, 1.0)]
)
def test_unusual_slopes(slope) -> None:
    # An affine activation attains the steeper end of its declared slopes.
    steepest = max(slope, key=abs)
    act = declare_activation("straight", lambda z: steepest * z, lambda z: torch.full_like(z, steepest), slope=slope)
    network = feed_forward((3, 4, 4, 2), act, seed=3)
    maps = [steepest * block.W.as_matrix() for block in network.blocks] + [network.blocks[-1].G.as_matrix()]
    exact = float(torch.linalg.matrix_norm(torch.linalg.multi_dot(maps[::-1]), 2))
    for method in ("product", "liplt", "lipsdp-recursion"):
        assert float(lipschitz(network, method=method)) >= exact * (1 - 1e-14)


def test_layers_over_the_memory_budget_are_passed_and_named() -> None:
    network = feed_forward((3, 150, 140, 2), TANH, seed=3)
    problem = make_problem(network, 2, None, None, None, None, None)
    small = replace(problem, norms=NormBounds(memory_budget=2**20))
    bound = lipsdp_recursion_bound(small)
    assert bound.method == "lipsdp-recursion (X^-1 = L^2 I at layer0, layer1)"
    assert "over the memory budget" in bound.per_layer[0].method
    assert float(lipsdp_recursion_bound(problem).value) <= float(bound.value)
    assert float(bound.value) <= float(lipschitz(network, method="product")) * (1 + SLACK)


def test_the_recursion_refuses_what_it_has_no_rule_for() -> None:
    with pytest.raises(UnsupportedBlock, match="residual"):
        lipsdp_metrics(make_problem(residual(3, 4, TANH), 2, None, None, None, None, None))
    with pytest.raises(UnsupportedNorm, match="p = q = 2"):
        lipsdp_metrics(make_problem(feed_forward((3, 4, 2), TANH), 1, None, None, None, None, None))


# Methods as objects.


def test_a_method_can_be_passed_as_an_object() -> None:
    network = feed_forward((3, 4, 2), TANH)
    assert float(lipschitz(network, method=LipLT())) == float(lipschitz(network, method="liplt"))
    assert lipschitz(network, method=Product()).method == "product"


class _Wrong(AbstractLipschitzMethod):
    """A method that returns whatever it was given."""

    name = "wrong"

    def __init__(self, answer) -> None:
        self.answer = answer

    def reason_to_skip(self, problem: Problem) -> None:
        return None

    def bound(self, problem: Problem) -> Bound:
        return self.answer


def test_what_a_method_returns_is_checked_again() -> None:
    network, x = feed_forward((3, 4, 2), TANH), randn(2, 3, seed=1)
    one = torch.ones(2, dtype=F64)
    with pytest.raises(SoundnessError, match="must return a Bound, got Estimate"):
        lipschitz(network, method=_Wrong(Estimate(one, 2, 2)))
    with pytest.raises(SoundnessError, match="asked for was l1"):
        lipschitz(network, p=1, method=_Wrong(Bound(one, 2, 2)))
    with pytest.raises(SoundnessError, match="holds for Anchor, asked for was Ball"):
        lipschitz(network, at=x, radius=1.0, method=_Wrong(Bound(one, 2, 2, Anchor(x))))


# Errors.


def _network() -> Network:
    return feed_forward((3, 4, 3), TANH)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"method": "lip"}, "Unknown method 'lip'. Choose one of: auto, product"),
        ({"method": None}, "Unknown method None"),
        ({"method": ["liplt"]}, "Unknown method"),
        ({"method": "anchored"}, "needs at=x"),
        ({"method": "local"}, "needs at=x and radius=r"),
        ({"method": "local", "at": torch.zeros(1, 3)}, "needs at=x and radius=r"),
        ({"method": "anchored", "at": torch.zeros(1, 3), "radius": 1.0}, "no radius"),
        ({"method": "lipsdp-recursion", "p": 1}, "p = q = 2"),
        ({"p": 0.5}, "1 <= p <= inf"),
        ({"p": math.nan}, "1 <= p <= inf"),
        ({"p": "two"}, "must be a number"),
        ({"q": 0.9}, "1 <= q <= inf"),
        ({"radius": 1.0}, "needs its centre"),
        ({"at": torch.zeros(1, 3), "radius": -1.0}, "at least 0"),
        ({"at": torch.zeros(1, 3), "radius": math.nan}, "finite"),
        ({"at": torch.zeros(1, 3), "radius": math.inf}, "finite"),
        ({"at": torch.zeros(2, 3), "radius": torch.ones(3)}, "one per sample"),
        ({"at": torch.zeros(2, 3), "radius": torch.ones(2, 1)}, "one per sample"),
        ({"at": torch.zeros(1, 3), "radius": "wide"}, "one number"),
        ({"at": torch.zeros(3)}, "Expected a batch of shape"),
        ({"at": torch.zeros(1, 4)}, "Expected a batch of shape"),
        ({"at": torch.zeros(0, 3)}, "empty batch"),
        ({"at": torch.full((1, 3), math.nan)}, "finite inputs"),
        ({"at": torch.zeros(1, 3, dtype=torch.int64)}, "floating-point"),
        ({"at": [[0.0, 0.0, 0.0]]}, "Expected a batch"),
        ({"pair": (0, 0)}, "same one twice"),
        ({"pair": (0, -3)}, "same one twice"),
        ({"pair": (0, 3)}, "does not exist"),
        ({"pair": (0, 1, 2)}, "two different outputs"),
        ({"pair": [0, 1]}, "two different outputs"),
        ({"pair": "every"}, "two different outputs"),
        ({"pair": (0, 1.0)}, "an int"),
        ({"logit": 3}, "does not exist"),
        ({"logit": "first"}, "an int"),
        ({"logit": True}, "an int"),
        ({"logit": 0, "pair": (0, 1)}, "not both"),
    ],
)
def test_bad_arguments(arguments, message) -> None:
    with pytest.raises(InvalidInput, match=message):
        lipschitz(_network(), **arguments)


def test_a_module_is_not_a_network() -> None:
    with pytest.raises(InvalidInput, match=r"Expected a Network, got Linear. Make one with curvcert.trace"):
        lipschitz(nn.Linear(2, 2))  # type: ignore[arg-type]


def test_pairs_of_a_single_output() -> None:
    with pytest.raises(InvalidInput, match="at least two outputs"):
        lipschitz(feed_forward((3, 4, 1), TANH), pair="all")


def test_the_recursion_does_not_apply_behind_max_pooling() -> None:
    network = Network.of_blocks((MaxPool((1, 4, 4), (2, 2), (2, 2), name="pool"),))
    with pytest.raises(InvalidInput, match="no rule for a MaxPool"):
        lipschitz(network, method="lipsdp-recursion")
    assert lipschitz(network).skipped[0].endswith("no rule for a MaxPool")


def test_a_traced_module_and_its_blocks_agree() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).eval()
    network = curvcert.trace(model, torch.zeros(1, 3))
    block = network.blocks[0]
    assert isinstance(block, Block)
    by_hand = torch.linalg.matrix_norm(block.W.as_matrix(), 2) * torch.linalg.matrix_norm(block.G.as_matrix(), 2)
    assert_exact(lipschitz(network, method="product"), by_hand)


def test_other_norms_go_through_l2_where_that_is_less() -> None:
    network = feed_forward((16, 20, 20, 3), TANH, seed=4)
    l2 = float(lipschitz(network, 2, 2, "lipsdp-recursion"))
    assert float(lipschitz(network, 1, INF)) <= l2 * (1 + SLACK)
    bound = lipschitz(network, INF, INF)
    assert "through l2" in bound.method
    assert l2 < float(bound) <= 4 * l2 * (1 + SLACK)
    x = randn(2, 16, seed=1)
    wide, narrow = (lipschitz(network, p, at=x, radius=r) for p, r in ((2, 4e-3), (INF, 1e-3)))
    # The balls are the same but for rounding, and so are the multipliers that are found but for theirs.
    assert bool((narrow.value <= 4 * wide.value * (1 + 1e-4)).all())
    assert isinstance(narrow.scope, Ball) and torch.equal(narrow.scope.r, torch.full((2,), 1e-3, dtype=F64))


@pytest.mark.parametrize("method", ["product", "liplt", "lipsdp-recursion"])
@pytest.mark.parametrize("weights", [(4.0, 1.0, 0.5), (0.5, 3.0, 2.0)])
def test_chains_in_one_dimension_are_exact(method, weights) -> None:
    blocks = (block for w in weights for block in one_dimensional(w, RELU).blocks)
    assert_exact(lipschitz(Network.of_blocks(tuple(blocks)), method=method), math.prod(weights))


@pytest.mark.parametrize("p", [1.0, 2.0, 3.0, INF])
def test_the_change_of_norms_is_paid_for(p) -> None:
    """The slope of tanh(x_1 + ... + x_4) at 0 is 4^(1 - 1/p), which no way around by l2 may undercut."""
    W, zero = Dense(torch.ones(1, 4, dtype=F64)), torch.zeros(1, dtype=F64)
    network = Network.of_blocks((Block(Zero((4,), (1,)), Identity((1,)), W, zero, zero, TANH, "sum"),))
    assert_exact(lipschitz(network, p), 4.0 ** (1.0 - 1.0 / p), 1e-9)
