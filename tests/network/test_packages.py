"""Networks of other packages, where they are installed; none of them is needed otherwise."""

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

import curvcert
from curvcert.errors import UnsupportedModule
from tests.network.cases import Function

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]


def same(model: nn.Module, x: Tensor) -> curvcert.Network:
    """Assert that a network has the module's values, and return it."""
    net = curvcert.trace(model.eval(), x[:1])
    with torch.no_grad():
        torch.testing.assert_close(net(x.double()).float(), model(x).float(), rtol=1e-4, atol=1e-4)
    return net


def policies() -> dict[str, tuple[str, bool, Callable[[Any, Tensor], Tensor]]]:
    """What is certified of a policy: its algorithm, whether actions are discrete, and the function of observations."""
    return {
        "PPO's logits": ("PPO", True, lambda p, o: p.action_net(p.mlp_extractor.forward_actor(p.extract_features(o)))),
        "PPO's value": ("PPO", True, lambda p, o: p.predict_values(o)),
        "PPO's mean action": ("PPO", False, lambda p, o: p.get_distribution(o).distribution.mean),
        "A2C's action": ("A2C", False, lambda p, o: p._predict(o, deterministic=True)),
        "DQN's values": ("DQN", True, lambda p, o: p.q_net(o)),
        "TD3's action": ("TD3", False, lambda p, o: p.actor(o)),
        "SAC's mean action": ("SAC", False, lambda p, o: torch.tanh(p.actor.get_action_dist_params(o)[0])),
    }


@pytest.mark.parametrize("name", policies())
def test_stable_baselines3(name: str) -> None:
    gym, sb3 = pytest.importorskip("gymnasium"), pytest.importorskip("stable_baselines3")
    algorithm, discrete, function = policies()[name]

    class Nothing(gym.Env):
        observation_space = gym.spaces.Box(-1, 1, (4,), np.float32)
        action_space = gym.spaces.Discrete(3) if discrete else gym.spaces.Box(-1, 1, (2,), np.float32)

    policy = getattr(sb3, algorithm)("MlpPolicy", Nothing(), device="cpu", seed=0).policy.eval()
    net = same(Function(lambda m, o: function(m.policy, o), policy=policy), torch.randn(3, 4))
    assert 0 < float(curvcert.lipschitz(net)) < float("inf")


def test_lightning() -> None:
    L = pytest.importorskip("lightning")

    class Lit(L.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))

        def forward(self, x: Tensor) -> Tensor:
            return self.net(x)

        def training_step(self, batch: Tensor, number: int) -> Tensor:
            return self(batch).square().sum()

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), 0.01)

    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    trainer = L.Trainer(max_epochs=1, accelerator="cpu", enable_model_summary=False, **quiet)
    model = Lit()
    trainer.fit(model, torch.utils.data.DataLoader(torch.randn(8, 4), batch_size=4))
    same(model, torch.randn(3, 4))


def test_deel_torchlip() -> None:
    lip = pytest.importorskip("deel.torchlip")
    x = torch.randn(5, 16)
    for act in (nn.Tanh, lip.GroupSort2):
        model = lip.Sequential(lip.SpectralLinear(16, 8), act(), lip.SpectralLinear(8, 3))
        model(x)
        net = same(model.vanilla_export(), x)
        assert float(curvcert.lipschitz(net)) < 1.5
    same(lip.Sequential(lip.SpectralLinear(16, 8), nn.Tanh(), lip.SpectralLinear(8, 3)).eval(), x)
    images = torch.randn(5, 1, 8, 8)
    layers = (lip.SpectralConv2d(1, 4, 3, padding=1), nn.Tanh(), lip.ScaledAvgPool2d(2), nn.Flatten())
    model = lip.Sequential(*layers, lip.FrobeniusLinear(64, 1))
    model(images)
    same(model.vanilla_export(), images)
    sorting = lip.Sequential(lip.SpectralLinear(16, 8), lip.FullSort(), lip.SpectralLinear(8, 3))
    sorting(x)
    with pytest.raises(UnsupportedModule, match="sort"):
        curvcert.trace(sorting.vanilla_export().eval(), x[:1])


def test_orthogonium() -> None:
    pytest.importorskip("orthogonium")
    from orthogonium.layers import AdaptiveOrthoConv2d, OrthoLinear
    from orthogonium.layers.custom_activations import MaxMin

    def exported(model: nn.Module, x: Tensor) -> nn.Module:
        model(x)
        for part in model.eval().modules():
            for name in list(getattr(part, "parametrizations", ())):
                parametrize.remove_parametrizations(part, name)
        return model

    x, images = torch.randn(5, 16), torch.randn(5, 2, 8, 8)
    net = same(exported(nn.Sequential(OrthoLinear(16, 8), nn.Tanh(), OrthoLinear(8, 3)), x), x)
    assert float(curvcert.lipschitz(net)) < 1.001
    same(exported(nn.Sequential(OrthoLinear(16, 8), MaxMin(), OrthoLinear(8, 3)), x), x)
    convs = (AdaptiveOrthoConv2d(2, 4, 3, padding=1), nn.Tanh(), AdaptiveOrthoConv2d(4, 4, 2, stride=2, padding=0))
    same(exported(nn.Sequential(*convs, nn.Flatten(), OrthoLinear(64, 3)), images), images)


X = 5 + 3 * np.random.default_rng(0).standard_normal((80, 4)).astype(np.float32)


@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("kind", ["three classes", "two classes", "logistic", "regression"])
def test_scikit_learn(kind: str, scaled: bool, tmp_path: Path) -> None:
    pytest.importorskip("sklearn")
    skl2onnx = pytest.importorskip("skl2onnx")
    from sklearn.neural_network import MLPClassifier, MLPRegressor
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import MinMaxScaler, StandardScaler

    y = (X[:, 0] > 5).astype(int) + (0 if kind == "two classes" else (X[:, 1] > 6).astype(int))
    shared = {"hidden_layer_sizes": (8, 6), "max_iter": 30, "random_state": 0}
    regression, act = kind == "regression", "logistic" if kind == "logistic" else "tanh"
    last = MLPRegressor(activation="relu", **shared) if regression else MLPClassifier(activation=act, **shared)
    model = make_pipeline(StandardScaler(), MinMaxScaler(), last) if scaled else last
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model.fit(X, y.astype(float) if regression else y)
        path = tmp_path / "model.onnx"
        path.write_bytes(skl2onnx.to_onnx(model, X[:1]).SerializeToString())
    if regression:
        net = curvcert.load_onnx(path)
        expected = model.predict(X)
    else:
        with pytest.warns(UserWarning, match="without its ZipMap"):
            net = curvcert.load_onnx(path)
        expected = model.predict_proba(X)
    x = torch.from_numpy(X).double()
    np.testing.assert_allclose(net(x).numpy().reshape(expected.shape), expected, rtol=1e-4, atol=1e-4)
    # The scaler is part of the network: radii are in units of the raw data.
    options = {"threshold": float(np.median(expected))} if regression else {}
    certificate = curvcert.certify(net, x[:5], **options)
    assert bool((certificate.radius > 0).sum() >= 3)
    classes = net(x[:5])[:, 0] > options["threshold"] if regression else torch.from_numpy(model.predict(X[:5]))
    assert torch.equal(certificate.label, classes.long())


def test_keras(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KERAS_BACKEND", "tensorflow")
    tf, tf2onnx = pytest.importorskip("tensorflow"), pytest.importorskip("tf2onnx")
    keras = pytest.importorskip("keras")
    K, tokens = keras.layers, keras.Input((5, 4))
    models = {
        "dense": ([keras.Input((4,)), K.Dense(8, "tanh"), K.Dense(3, "softmax")], (4,)),
        "images": (
            [keras.Input((8, 8, 1)), K.Conv2D(4, 3, padding="same", activation="swish"), K.BatchNormalization(),
             K.AveragePooling2D(2), K.Conv2D(4, 3, strides=2, activation="elu"), K.GlobalAveragePooling2D(),
             K.Dense(3)],
            (8, 8, 1),
        ),
        "kinks": ([keras.Input((8, 8, 1)), K.Conv2D(4, 3, activation="relu"), K.MaxPooling2D(2), K.Flatten(),
            K.Dropout(0.5), K.Dense(3)], (8, 8, 1)),
        "lstm": ([keras.Input((5, 3)), K.LSTM(4), K.Dense(3)], (5, 3)),
        "attention": (tokens, (5, 4)),
    }  # fmt: skip
    for name, (layers, shape) in models.items():
        if name == "attention":
            model = keras.Model(tokens, K.LayerNormalization()(tokens + K.MultiHeadAttention(2, 3)(tokens, tokens)))
        else:
            model = keras.Sequential(layers)
        path = tmp_path / f"{name}.onnx"
        call = tf.function(lambda x, model=model: model(x, training=False))
        signature = (tf.TensorSpec((None, *shape), tf.float32, name="x"),)
        tf2onnx.convert.from_function(call, input_signature=signature, opset=17, output_path=str(path))
        net = curvcert.load_onnx(path)
        x = np.random.default_rng(0).standard_normal((3, *shape)).astype(np.float32)
        expected = np.asarray(model(x, training=False))
        np.testing.assert_allclose(net(torch.from_numpy(x).double()).numpy(), expected, rtol=1e-4, atol=1e-4)
