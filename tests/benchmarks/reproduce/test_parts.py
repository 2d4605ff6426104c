"""The frame's parts: rows by pattern, recipes, kept models, arrays, and a search that contradicts a certificate."""

import re
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from benchmarks.harness import read_record
from benchmarks.reproduce import EXPERIMENTS, Options, load_arrays
from benchmarks.reproduce.certificates_of_the_paper import paper_pair_curvature, paper_radii
from benchmarks.reproduce.experiment import make_record, save_arrays
from benchmarks.reproduce.figures import draw_figures
from benchmarks.reproduce.models import Subject, experiment_recipe, experiment_recipes, on_digits, small_dense, trained
from benchmarks.reproduce.paper_numbers import TABLE_1
from benchmarks.reproduce.results_page import TEMPLATE, results_page, short_table
from benchmarks.reproduce.searching import require_consistent, searched_distances
from benchmarks.reproduce.table1 import CLAIMS, RECIPES, all_rows, chosen_rows
from curvcert.bounds.curvature import curvature
from curvcert.data import load_digits
from curvcert.errors import InvalidFile, InvalidInput, SoundnessError
from curvcert.network import trace
from curvcert.operators import NormBounds

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
    assert bool((paper_pair_curvature(network) >= curvature(network, pair="all", method="unrolled").value).all())


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


def test_norms_that_are_shared_give_the_same_constants() -> None:
    subject, norms = small_dense(3, Options(Path("unused"), samples=6)), NormBounds()
    for at in (None, subject.x):
        alone = paper_pair_curvature(subject.network, at)
        assert torch.equal(paper_pair_curvature(subject.network, at, norms), alone)


def test_anchored_constants_of_wide_convolutions() -> None:
    """Beyond 1,024 neurons a layer's weighted norm is not computed; its largest weight still counts."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(1, 6, 3, padding=1), nn.Tanh(), nn.Flatten(), nn.Linear(6 * 196, 3)).eval()
    network = trace(model, torch.zeros(1, 1, 14, 14))
    x = torch.stack([torch.zeros(1, 14, 14), torch.full((1, 14, 14), 40.0)]).double()
    anchored, K = paper_pair_curvature(network, x), paper_pair_curvature(network)
    assert bool((anchored > 0).all())
    assert bool((anchored <= K).all())
    assert float(anchored[0]) < 0.8 * float(K)


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
    assert len(titles) == 9
    for values in TABLE_1.values():
        assert " | ".join(f"{value:.2f}" for value in values) in page


def test_the_short_table_says_whether_ours_is_above() -> None:
    certified = {"36/255": 52.1, "72/255": 40.9, "108/255": 29.18}
    row = {"model": "6F", "method": "ours", "certificate": "best", "samples": 10_000, "clean": 60.0, "seed": 1}
    made = make_record("table1", Options(Path("unused")), {}, {"rows": [{**row, "certified": certified}]})
    lines = short_table(made).splitlines()
    assert (
        lines[-1] == "| 6F | ours, soundly certified | 1 | 60.00 | 52.10 | 40.90 | 29.18 | **yes**, by 0.01 or more |"
    )
    assert sum("not yet measured" in line for line in lines) == 2
    less = {**row, "certified": {**certified, "108/255": 29.17}}
    lines = short_table(replace(made, figures={"rows": [less]})).splitlines()
    assert lines[-1].endswith("| no: 0.00 below at 108/255 |")
    few = {**row, "certified": certified, "samples": 1000}
    assert short_table(replace(made, figures={"rows": [few]})) == short_table(None)


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
