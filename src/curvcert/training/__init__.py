"""Training networks whose certificates are large: recipes, a loop that survives being killed, checkpoints."""

from curvcert.training.callbacks import CertifiedLog
from curvcert.training.checkpoint import Checkpoint, checkpoints, load_checkpoint, save_checkpoint
from curvcert.training.distributed import Place, Ranks, RanksApart, joined, place_from
from curvcert.training.kept import load_kept, read_digests
from curvcert.training.loop import TrainingResult, train, train_side_by_side
from curvcert.training.model_file import MODEL, load_model, load_trained, save_model
from curvcert.training.multiplier import Multiplier
from curvcert.training.recipe import Recipe, load_recipe, recipe_from_dict, recipe_names
from curvcert.training.side_by_side import SideBySide
from curvcert.training.trainer import Trainer, make_model

__all__ = [
    "MODEL",
    "CertifiedLog",
    "Checkpoint",
    "Multiplier",
    "Place",
    "Ranks",
    "RanksApart",
    "Recipe",
    "SideBySide",
    "Trainer",
    "TrainingResult",
    "checkpoints",
    "joined",
    "load_checkpoint",
    "load_kept",
    "load_model",
    "load_recipe",
    "load_trained",
    "make_model",
    "place_from",
    "read_digests",
    "recipe_from_dict",
    "recipe_names",
    "save_checkpoint",
    "save_model",
    "train",
    "train_side_by_side",
]
