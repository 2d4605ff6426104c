import pytest
import torch
from typer.testing import CliRunner

from curvcert.bounds.lipschitz import LIPSCHITZ_METHODS
from curvcert.cli import app
from curvcert.cli.demo import linear_layers
from curvcert.data import load_demo_network
from curvcert.network import Network, trace
from curvcert.operators import norm_upper_bound
from curvcert.operators.estimates import norm_estimate


@pytest.fixture(scope="module")
def network() -> Network:
    return trace(load_demo_network(), torch.zeros(1, 1, 8, 8))


def test_shows_every_layer_every_method_and_what_to_try_next() -> None:
    result = CliRunner().invoke(app, ["demo"], env={"COLUMNS": "120"})
    assert result.exit_code == 0, result.output
    for text in ("1 (tanh)", "3 (tanh)", "6 (tanh)", "output", "certified", *LIPSCHITZ_METHODS, "Next:"):
        assert text in result.output


def test_the_layers_are_those_of_the_network(network: Network) -> None:
    model = load_demo_network().double()
    shapes = [tuple(op.as_matrix().shape) for _, op in linear_layers(network)]
    assert shapes == [(512, 64), (256, 512), (32, 256), (10, 32)]
    torch.testing.assert_close(dict(linear_layers(network))["output"].as_matrix(), model[7].weight, rtol=0, atol=0)


def test_the_columns_keep_their_order(network: Network) -> None:
    for _, op in linear_layers(network):
        exact = float(torch.linalg.matrix_norm(op.as_matrix(), 2))
        assert float(norm_upper_bound(op, p=2)) >= exact * (1 - 1e-14)
        assert float(norm_estimate(op)) <= exact * (1 + 1e-12)
