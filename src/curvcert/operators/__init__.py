"""Linear maps and norms of them that are upper bounds."""

from curvcert.operators.base import (
    AbstractLinearMap,
    Composition,
    Identity,
    Reshape,
    Scaled,
    Sum,
    Transposed,
    Zero,
    add,
    compose,
    scale,
)
from curvcert.operators.circuit import Circuit
from curvcert.operators.conv import Conv2d
from curvcert.operators.dense import Dense
from curvcert.operators.gather import Gather
from curvcert.operators.gram import gram_norm_upper_bound
from curvcert.operators.norm_bounds import NormBounds, norm_upper_bound
from curvcert.operators.permutation import Flip, Permutation
from curvcert.operators.rows import column_norms_upper_bound, row_norms_upper_bound
from curvcert.operators.segments import Segment
from curvcert.operators.slices import Slice
from curvcert.operators.structured import AveragePool2d, Diagonal, batch_norm_in_eval

__all__ = [
    "AbstractLinearMap",
    "AveragePool2d",
    "Circuit",
    "Composition",
    "Conv2d",
    "Dense",
    "Diagonal",
    "Flip",
    "Gather",
    "Identity",
    "NormBounds",
    "Permutation",
    "Reshape",
    "Scaled",
    "Segment",
    "Slice",
    "Sum",
    "Transposed",
    "Zero",
    "add",
    "batch_norm_in_eval",
    "column_norms_upper_bound",
    "compose",
    "gram_norm_upper_bound",
    "norm_upper_bound",
    "row_norms_upper_bound",
    "scale",
]
