"""What a layer or a call that has no rule is told about itself, and what to do instead."""

import re

_NORM = "It divides by a size that depends on the input. Use LayerNorm, RMSNorm, GroupNorm or BatchNorm."
_PRODUCT = "Write it out with matrix products, softmax and the product of two values."
_RECURRENT = "Write its steps out with Linear layers, gates and states, or use convolutions over time (Conv1d)."
_JUMP = "It jumps, so that it has no Lipschitz constant."
_ORDER = "It picks entries by their values. Use MaxPool1d, MaxPool2d, or a mean."
_REMEDIES = {
    **dict.fromkeys(("localresponsenorm", "normalize"), _NORM),
    **dict.fromkeys(
        ("multiheadattention", "transformerencoderlayer", "transformerencoder", "scaleddotproductattention"), _PRODUCT
    ),
    **dict.fromkeys(("baddbmm", "bilinear", "prod", "einsum"), _PRODUCT),
    **dict.fromkeys(("rnn", "gru", "lstm", "rnncell", "grucell", "lstmcell"), _RECURRENT),
    **dict.fromkeys(("sign", "round", "floor", "ceil", "heaviside", "threshold", "hardshrink", "argmax", "gt"), _JUMP),
    **dict.fromkeys(("ge", "lt", "le", "eq", "where"), "It branches on values, and may jump. Use clamp, relu or abs."),
    **dict.fromkeys(("max", "min", "amax", "amin", "sort", "topk", "adaptivemaxpool", "maximum", "minimum"), _ORDER),
    **dict.fromkeys(("embedding", "embeddingbag"), "It takes whole numbers. Let the network begin behind it."),
    **dict.fromkeys(("float", "half", "double", "to", "type"), "A cast rounds. Give the input in the dtype you mean."),
    "upsample": "Use mode 'nearest' or '(bi)linear'.",
    **dict.fromkeys(("dataparallel", "distributeddataparallel"), "Trace the module inside: model.module."),
}


def remedy(name: str) -> str:
    """Return what to do about a layer or function of that name; an empty string if nothing is known of it.

    >>> remedy("GRU") == remedy("nn_gru"), remedy("LSTMCell") == remedy("lstm_cell"), remedy("fft")
    (False, True, '')
    """
    plain = re.sub(r"[123]d$", "", name.lower().replace("_", ""))
    return _REMEDIES.get(plain, "")
