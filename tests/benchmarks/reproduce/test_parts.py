"""The frame's parts: rows by pattern, recipes, kept models, arrays, and a search that contradicts a certificate."""

import re
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from benchmarks.harness import read_record
from benchmarks.reproduce import EXPERIMENTS, Options, load_arrays
from benchmarks.reproduce.certificates_of_the_paper import paper_radii
from benchmarks.reproduce.experiment import make_record, save_arrays
from benchmarks.reproduce.figures import draw_figures
from benchmarks.reproduce.models import Subject, experiment_recipe, experiment_recipes, on_digits, small_dense, trained
from benchmarks.reproduce.paper_bounds import PaperBounds, paper_pair_curvature, paper_pair_lipschitz
from benchmarks.reproduce.paper_numbers import FLOATS, TABLE_1
from benchmarks.reproduce.results_page import TEMPLATE, results_page, short_table
from benchmarks.reproduce.searching import require_consistent, searched_distances
from benchmarks.reproduce.table1 import CLAIMS, RECIPES, all_rows, chosen_rows
from curvcert.activations import TANH, anchored_curvature_range, anchored_slope_range
from curvcert.bounds.curvature import curvature
from curvcert.data import load_digits
from curvcert.errors import InvalidFile, InvalidInput, SoundnessError
from curvcert.network import Network, trace
from curvcert.nn import SLLDense

ROOT = Path(__file__).parents[3]


def test_rows_by_pattern() -> None:
    assert {row.model for row in chosen_rows(("6F",))} == {"6F"}
    assert {row.name for row in chosen_rows(("*/ours/1/best", "6F/ours/1/best"))} == {
        "6F/ours/1/best",
        "6C2F/ours/1/best",
        "Lip-3C1F/ours/1/best",
    }
    assert chosen_rows(()) == all_rows()
    with pytest.raises(InvalidInput, match="names no row"):
        chosen_rows(("7F",))


def test_rows_that_are_claims_have_two_seeds() -> None:
    for model, method in RECIPES:
        seeds = {row.seed for row in all_rows() if (row.model, row.method) == (model, method)}
        assert seeds == ({0, 1} if method in CLAIMS else {0})


def test_every_row_of_the_paper_has_a_recipe() -> None:
    assert set(TABLE_1) <= set(RECIPES)
    for (model, _), name in RECIPES.items():
        assert experiment_recipe(name).architecture == model
    assert set(RECIPES.values()) | {"mnist-depth", "mnist-6f-ccrc", "6c2f-quadratic"} == set(experiment_recipes())


@pytest.mark.parametrize("name", ["6f-ccrc", "6c2f-ccrc", "lip-3c1f-sll-ccrc"])
def test_the_papers_hyperparameters(name: str) -> None:
    recipe = experiment_recipe(name)
    assert (recipe.loss, recipe.tau, recipe.batch_size) == ("curvature", 0.25, 256)
    assert (recipe.weight_step, recipe.target_accuracy, recipe.weight_min) == (0.05, 0.6, 0.01)
    # The rate is not the paper's 1e-4, which is for 1,000 epochs.
    assert (recipe.final_learning_rate, recipe.beta1, recipe.beta2) == (1e-5, 0.5, 0.9)
    assert recipe.nu == (1.0 if name.startswith("lip") else 0.0)


def test_an_unknown_recipe() -> None:
    with pytest.raises(InvalidInput, match="no recipe '7f'"):
        experiment_recipe("7f")


@pytest.mark.slow
def test_a_model_is_kept_and_another_recipe_refused(tmp_path: Path) -> None:
    options = Options(tmp_path, quick=True)
    recipe = on_digits(experiment_recipe("6f-standard"))
    x = load_digits("test").as_float64()[:4].float()
    first = trained(recipe, options)(x)
    model = next(tmp_path.glob("models/*/model.safetensors"))
    written = model.stat().st_mtime_ns
    assert torch.equal(trained(recipe, options)(x), first)
    assert model.stat().st_mtime_ns == written
    with pytest.raises(InvalidInput, match="was trained with tau"):
        trained(recipe.updated({"tau": "0.5"}), options)


def test_arrays_that_hold_objects_are_refused(tmp_path: Path) -> None:
    np.savez(tmp_path / "objects.npz", radius=np.array([{"a": 1}], dtype=object))
    (tmp_path / "cut.npz").write_bytes(save_arrays(tmp_path / "whole.npz", {"r": np.ones(9)}).read_bytes()[:50])
    for name in ("objects.npz", "cut.npz", "missing.npz"):
        with pytest.raises(InvalidFile, match="Make it again"):
            load_arrays(tmp_path / name)


def test_options_are_checked() -> None:
    for name in ("epochs", "samples"):
        with pytest.raises(InvalidInput, match=name):
            Options(Path("runs"), **{name: 0})


def test_the_papers_constant_is_above_every_pairs_own() -> None:
    network = small_dense(3, Options(Path("unused"), samples=6)).network
    assert bool(
        (paper_pair_curvature(PaperBounds(network)) >= curvature(network, pair="all", method="unrolled").value).all()
    )


def test_anchored_radii_of_the_paper_are_not_below_its_global_ones() -> None:
    subject = small_dense(3, Options(Path("unused"), samples=20))
    plain, correct = paper_radii(subject, anchored=False, batch=8)
    anchored, also = paper_radii(subject, anchored=True, batch=8)
    assert torch.equal(correct, also)
    assert bool((anchored >= plain).all())
    assert bool((anchored[correct] > plain[correct]).any())
    assert bool((plain[~correct] == 0).all())
    wrong = replace(subject, y=(subject.network(subject.x).argmax(dim=1) + 1) % 10)
    assert bool((paper_radii(wrong, anchored=True, batch=8)[0] == 0).all())


def matrices(network: Network) -> list[Tensor]:
    return [block.W.as_matrix() for block in network.blocks] + [network.blocks[-1].G.as_matrix()]


def test_the_papers_formulas_are_the_papers() -> None:
    """Written out with dense norms: LipLT, the SDP bound, the recursion, and all of it as seen from a point."""
    torch.manual_seed(1)
    layers = [nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2)]
    network = trace(nn.Sequential(*layers).eval(), torch.zeros(1, 3))
    *W, V = matrices(network)
    norm, c, x = partial(torch.linalg.matrix_norm, ord=2), TANH.curvature_c, 3 * torch.randn(4, 3).double()
    hats, outer = [0.5 * W[0], 0.5 * W[1], 0.5 * V @ W[2]], [torch.eye(5).double(), torch.eye(4).double(), V]
    L, K = [1.0], [0.0]
    eye = partial(torch.eye, dtype=torch.float64)
    for k in range(3):
        straight = torch.linalg.multi_dot([*reversed(hats[: k + 1]), eye(3)])
        total = norm(straight)
        for j in range(k + 1):
            path = torch.linalg.multi_dot([*reversed(hats[j + 1 : k + 1]), outer[j], eye(outer[j].shape[1])])
            total = total + 0.5 * norm(path) * norm(W[j]) * L[j]
        L.append(float(total))
        Lh = norm(hats[k]) + 0.5 * norm(outer[k]) * norm(W[k])
        omega = c * norm(outer[k]) * norm(W[k].norm(dim=1)[:, None] * W[k])
        K.append(float(omega * L[k] ** 2 + Lh * K[k]))
    bounds = PaperBounds(network)
    assert torch.allclose(torch.stack(bounds.prefixes), torch.tensor(L).double(), rtol=1e-8)
    assert float(bounds.curvature) == pytest.approx(K[-1], rel=1e-8)
    assert float(paper_pair_lipschitz(bounds)) == pytest.approx(2**0.5 * L[-1], rel=1e-8)
    seen_L, seen_K = bounds.anchored(x)
    for n, point in enumerate(x):
        seen, K_x, value, jacobian = 1.0, 0.0, point, eye(3)
        for k, layer in enumerate(layers[:-1:2]):
            z = layer.double()(value).detach()
            slope = anchored_slope_range(TANH, z)[1]
            bend = torch.maximum(*(side.abs() for side in anchored_curvature_range(TANH, z)))
            Lh = norm(hats[k]) + 0.5 * norm(outer[k]) * norm(W[k])
            omega = norm(outer[k]) * norm((bend * W[k].norm(dim=1))[:, None] * W[k])
            K_x = float(Lh * K_x + min(norm(jacobian), seen) * omega * seen)
            seen = float(seen * norm(outer[k]) * norm(slope[:, None] * W[k]))
            value, jacobian = z.tanh(), (1 - z.tanh() ** 2)[:, None] * W[k] @ jacobian
        assert float(seen_L[n]) == pytest.approx(seen, rel=1e-5)
        assert float(seen_K[n]) == pytest.approx(K_x, rel=1e-5)
        assert float(paper_pair_curvature(bounds, x)[n]) == pytest.approx(2**0.5 * K_x, rel=1e-5)


def test_the_papers_formulas_for_one_lipschitz_blocks() -> None:
    torch.manual_seed(0)
    network = trace(nn.Sequential(SLLDense(4, 6), SLLDense(4, 5)).eval().requires_grad_(False), torch.zeros(1, 4))
    bounds = PaperBounds(network)
    assert all(1 <= float(constant) <= 1 + 1e-9 for constant in (*bounds.blocks, *bounds.prefixes))
    total = 0.0
    for block in network.blocks:
        W, G = block.W.as_matrix(), block.G.as_matrix()
        root = torch.linalg.eigvalsh((G.mT @ G) * (W @ W.mT))[-1].sqrt()
        total += TANH.curvature_c * float(root * torch.linalg.matrix_norm(W, 2))
    assert float(bounds.curvature) == pytest.approx(total, rel=1e-8)
    assert float(curvature(network)) <= total * (1 + 1e-9)


def test_anchored_constants_of_wide_convolutions() -> None:
    """Beyond 1,024 neurons a layer's weighted norm is not computed; its largest constant still counts."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(1, 6, 3, padding=1), nn.Tanh(), nn.Flatten(), nn.Linear(6 * 196, 3)).eval()
    bounds = PaperBounds(trace(model, torch.zeros(1, 1, 14, 14)))
    x = torch.stack([torch.zeros(1, 14, 14), torch.full((1, 14, 14), 40.0)]).double()
    anchored, K = paper_pair_curvature(bounds, x), paper_pair_curvature(bounds)
    assert bool((anchored > 0).all())
    assert bool((anchored <= K).all())
    assert float(anchored[0]) < 0.95 * float(K)


def test_distances_of_a_search() -> None:
    # f = (x, -x): the boundary is at 0, so that 0.1 is broken within 0.2, and 0.5 is not.
    model = nn.Linear(1, 2, bias=False).requires_grad_(False).eval()
    model.weight.copy_(torch.tensor([[1.0], [-1.0]]))
    x, y = torch.tensor([[0.1], [0.5]], dtype=torch.float64), torch.zeros(2, dtype=torch.int64)
    subject = Subject(model, trace(model, x[:1].float()), x, y)
    distance = searched_distances(subject, [0.05, 0.2], steps=5, restarts=1)
    assert 0.1 < float(distance[0]) <= 0.2
    assert float(distance[1]) == torch.inf
    require_consistent(torch.tensor([0.1, 0.5]), torch.ones(2, dtype=torch.bool), distance)
    with pytest.raises(SoundnessError, match="sample 0"):
        require_consistent(torch.tensor([0.3, 0.5]), torch.ones(2, dtype=torch.bool), distance)


def test_the_page_is_what_the_records_give() -> None:
    page = results_page(ROOT / "results")
    assert (ROOT / "docs" / "results.md").read_text() == page
    titles = [line for line in page.splitlines() if line.startswith("## ")]
    assert len(titles) == 11
    for values in TABLE_1.values():
        assert " | ".join(f"{value:.2f}" for value in values) in page


def test_the_short_table_says_whether_ours_is_above() -> None:
    certified = {"36/255": 52.1, "72/255": 40.9, "108/255": 29.18}
    row = {"model": "6F", "method": "ours", "certificate": "best", "samples": 10_000, "clean": 60.0, "seed": 1}
    made = make_record("table1", Options(Path("unused")), {}, {"rows": [{**row, "certified": certified}]})
    lines = short_table(made).splitlines()
    other = {**row, "seed": 0, "clean": 62.0, "certified": {**certified, "108/255": 29.20}}
    both = short_table(replace(made, figures={"rows": [other, {**row, "certified": certified}]})).splitlines()
    ours = "| 6F | ours, by our best certificate"
    assert both[-3:] == [
        f"{ours} | mean of 2 | 61.00 | 52.10 | 40.90 | 29.19 | **yes**, by 0.01 or more |",
        f"{ours} | 0 | 62.00 | 52.10 | 40.90 | 29.20 |  |",
        f"{ours} | 1 | 60.00 | 52.10 | 40.90 | 29.18 |  |",
    ]
    assert lines[-2] == f"{ours} | mean of 1 | 60.00 | 52.10 | 40.90 | 29.18 | **yes**, by 0.01 or more |"
    assert sum("not yet measured" in line for line in lines) == 2
    less = {**row, "certified": {**certified, "108/255": 29.17}}
    lines = short_table(replace(made, figures={"rows": [less]})).splitlines()
    assert lines[-2].endswith("| no: 0.00 below at 108/255 |")
    few = {**row, "certified": certified, "samples": 1000}
    assert short_table(replace(made, figures={"rows": [few]})) == short_table(None)


def test_every_figure_and_table_of_the_paper_has_a_name() -> None:
    made = [label for experiment in EXPERIMENTS.values() for label in experiment.labels]
    assert sorted(made) == sorted(FLOATS)
    assert sorted(FLOATS.values()) == ["Figure 1", *(f"Figure {n}" for n in range(2, 10)), "Table 1"]


def test_pictures_of_the_page_are_those_of_the_records() -> None:
    page = results_page(ROOT / "results")
    shown = re.findall(r"^!\[(.+)\]\(images/results/(.+)\.svg\)$", page, re.MULTILINE)
    assert {name for _, name in shown} == {name for name in EXPERIMENTS if read_record(name)}
    assert {path.stem for path in (ROOT / "docs/images/results").iterdir()} == {name for _, name in shown}
    assert all(f'picture("{name}"' in TEMPLATE.read_text() for name in EXPERIMENTS)


@pytest.mark.slow
def test_a_picture_drawn_again_has_the_same_bytes(tmp_path: Path) -> None:
    for folder in ("one", "other"):
        drawn = draw_figures(ROOT / "results", tmp_path / folder)
    assert drawn
    for path in drawn:
        content = path.read_bytes()
        assert content.startswith(b"<?xml")
        assert content == (tmp_path / "one" / path.name).read_bytes()
        assert b"<dc:date>" not in content


def test_tables_of_the_page_are_rectangular() -> None:
    lines = results_page(ROOT / "results").splitlines()
    for one, other in pairwise(lines):
        if one.startswith("|") and other.startswith("|"):
            assert one.count("|") == other.count("|")
