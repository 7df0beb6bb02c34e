"""The arrays of a scikit-learn pipeline, and a penalty for each feature learned on validation
rows.
"""

import torch
from sklearn.datasets import load_diabetes
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import PolynomialFeatures, StandardScaler

from hgms.adapters import from_losses
from hgms.comparison import compare

features, target = load_diabetes(return_X_y=True)
pipeline = make_pipeline(
    StandardScaler(), PolynomialFeatures(2, include_bias=False), StandardScaler()
)
X = pipeline.fit(features[:150]).transform(features)
y = (target - target[:150].mean()) / target[:150].std()
width = X.shape[1]


def error(x, rows):
    return (rows["0"] @ x - rows["1"]).square().mean()


def g(theta, x, rows):
    return error(x, rows) + (theta.exp() * x.square()).sum()


test = {"0": torch.as_tensor(X[300:]), "1": torch.as_tensor(y[300:])}
start = {
    "theta0": torch.full((width,), -3.0, dtype=torch.float64),
    "x0": torch.zeros(width, dtype=torch.float64),
}
problem = from_losses(
    **start,
    g=g,
    f=lambda theta, x, rows: error(x, rows),
    lower_data=(X[:150], y[:150]),
    upper_data=(X[150:300], y[150:300]),
    evaluate=lambda theta, x: {"test_error": error(x, test)},
)
comparison = compare(problem, ["uniform", "hg-implicit"], budget="5 steps", seeds=1)
print(comparison)
