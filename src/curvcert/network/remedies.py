"""What a layer or a call that has no rule is told about itself, and what to do instead."""

import re

_LOGITS = (
    "Certify the logits: leave a last softmax out, which changes no label. Inside a network there is no rule for it."
)
_NORM = "It divides by a size that depends on the input, and has no rule. Use BatchNorm, whose statistics are fixed."
_PRODUCT = "It multiplies values that depend on the input, which has no constant on the whole space."
_RECURRENT = "Recurrent cells multiply gates with states, which has no rule. Use convolutions over time (Conv1d)."
_JUMP = "It jumps, so that it has no Lipschitz constant."
_ORDER = "It picks entries by their values. Use MaxPool1d, MaxPool2d, or a mean."
_REMEDIES = {
    **dict.fromkeys(("softmax", "logsoftmax", "softmin", "softmaxd"), _LOGITS),
    **dict.fromkeys(("layernorm", "rmsnorm", "groupnorm", "instancenorm", "localresponsenorm", "normalize"), _NORM),
    **dict.fromkeys(
        ("multiheadattention", "transformerencoderlayer", "transformerencoder", "scaleddotproductattention"), _PRODUCT
    ),
    **dict.fromkeys(("glu", "bmm", "baddbmm", "bilinear", "prod", "einsum"), _PRODUCT),
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

    >>> remedy("LogSoftmax").split(":")[0], remedy("InstanceNorm2d") == remedy("layer_norm"), remedy("fft")
    ('Certify the logits', True, '')
    """
    plain = re.sub(r"[123]d$", "", name.lower().replace("_", ""))
    return _REMEDIES.get(plain, "")
