"""ONNX files by skl2onnx and by tf2onnx from Keras, for files.py.

    PYTHON benchmarks/onnx/other_files.py FOLDER

PYTHON is that of an environment with skl2onnx, scikit-learn, tensorflow and tf2onnx. Weights are
random, or of a fit on random rows.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np


def of_sklearn(folder: Path) -> None:
    """Write a file for each of some estimators, fitted on 400 rows of 10 features."""
    from skl2onnx import to_onnx
    from sklearn.ensemble import RandomForestClassifier
    from sklearn.linear_model import LogisticRegression
    from sklearn.neural_network import MLPClassifier, MLPRegressor
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler
    from sklearn.svm import SVC

    rng = np.random.default_rng(0)
    x = rng.normal(size=(400, 10)).astype(np.float32)
    classes, values = (x[:, 0] + x[:, 1] ** 2 > 1).astype(np.int64), x[:, :2].sum(1)
    small = {"hidden_layer_sizes": (32, 16), "max_iter": 40, "random_state": 0}
    estimators: dict[str, tuple[Any, Any, dict[str, Any]]] = {
        "sklearn-mlp": (MLPClassifier(**small), classes, {}),
        "sklearn-mlp-dictionary": (MLPClassifier(**small), classes, {"zipmap": True}),
        "sklearn-regressor": (MLPRegressor(**small), values, {}),
        "sklearn-scaled": (make_pipeline(StandardScaler(), MLPRegressor(**small)), values, {}),
        "sklearn-logistic": (LogisticRegression(), classes, {}),
        "sklearn-forest": (RandomForestClassifier(5, random_state=0), classes, {}),
        "sklearn-svc": (SVC(), classes, {}),
    }
    for name, (estimator, target, options) in estimators.items():
        estimator.fit(x, target)
        named = {id(estimator): {"zipmap": False, **options}} if target is classes else None
        file = folder / f"{name}.onnx"
        file.write_bytes(to_onnx(estimator, x[:1], options=named).SerializeToString())


def of_keras(folder: Path) -> None:
    """Write a file for each of some networks, by tf2onnx."""
    import keras
    import tensorflow as tf
    import tf2onnx
    from keras import layers

    keras.utils.set_random_seed(0)
    x = keras.Input((16, 24))
    seen = layers.MultiHeadAttention(2, 12)(x, x)
    attending = keras.Model(x, layers.Dense(3)(layers.LayerNormalization()(x + seen)[:, 0]))
    networks = {
        "keras-cnn": keras.Sequential(
            [
                keras.Input((24, 24, 3)),
                layers.Conv2D(8, 3, padding="same", activation="relu"),
                layers.SeparableConv2D(16, 3, strides=2, padding="same"),
                layers.BatchNormalization(),
                layers.ReLU(6.0),
                layers.GlobalAveragePooling2D(),
                layers.Dense(5, activation="softmax"),
            ]
        ),
        "keras-mobilenet-v2": keras.applications.MobileNetV2(
            (96, 96, 3), alpha=0.35, weights=None, classes=10
        ),
        "keras-mobilenet-v3": keras.applications.MobileNetV3Small(
            (96, 96, 3), weights=None, classes=10
        ),
        "keras-lstm": keras.Sequential(
            [keras.Input((12, 8)), layers.LSTM(16), layers.Dense(4)],
        ),
        "keras-gru-both-ways": keras.Sequential(
            [keras.Input((12, 8)), layers.Bidirectional(layers.GRU(16)), layers.Dense(4)],
        ),
        "keras-attention": attending,
        "keras-embedding": keras.Sequential(
            [
                keras.Input((10,), dtype="int32"),
                layers.Embedding(50, 16),
                layers.Conv1D(16, 3, padding="causal"),
                layers.GlobalMaxPooling1D(),
                layers.Dense(3),
            ]
        ),
        "keras-transposed": keras.Sequential(
            [
                keras.Input((16, 16, 3)),
                layers.Conv2D(8, 3, strides=2, padding="same", activation="swish"),
                layers.Conv2DTranspose(8, 3, strides=2, padding="same"),
                layers.Conv2D(2, 1),
            ]
        ),
    }
    for name in ("keras-mobilenet-v2", "keras-mobilenet-v3"):
        small = networks[name]  # as initialized its answer is the same for all images
        small.set_weights([3 * w if w.ndim == 4 else w for w in small.get_weights()])
    for name, network in networks.items():
        shape = [None, *network.input_shape[1:]]
        spec = (tf.TensorSpec(shape, network.inputs[0].dtype, name="x"),)
        function = tf.function(lambda x, of=network: of(x, training=False))
        tf2onnx.convert.from_function(
            function, spec, opset=17, output_path=str(folder / f"{name}.onnx")
        )


if __name__ == "__main__":
    target = Path(sys.argv[1])
    target.mkdir(parents=True, exist_ok=True)
    of_sklearn(target)
    of_keras(target)
