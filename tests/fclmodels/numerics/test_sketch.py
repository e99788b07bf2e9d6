"""The law of sketches, drawn either way: zero mean, covariance X* X*^T, independent columns; and the subspace found."""

import numpy as np
import pytest
import scipy.stats
import torch
from numpy.testing import assert_allclose

from fclmodels.numerics.products import add_gram, mirror
from fclmodels.numerics.sketch import gaussian_sketch, gaussian_sketch_of_gram
from fclmodels.numerics.subspace import principal, residual

D, N = 12, 30
MANY = 40_000


def random(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def inputs(seed: int = 0, d: int = D, n: int = N, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    """Columns of a decaying spectrum and with a mean, as activations have."""
    generator = np.random.default_rng(seed)
    X = generator.standard_normal((d, d)) @ (np.arange(1, d + 1)[:, None] ** -0.7 * generator.standard_normal((d, n)))
    return torch.from_numpy(X + 0.5).to(dtype)


def basis(r: int, d: int = D, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.linalg.qr(torch.randn(d, d, generator=random(99), dtype=torch.float64)).Q[:, :r].to(dtype)


def plain(X: torch.Tensor, Phi: torch.Tensor, width: int, seed: int) -> torch.Tensor:
    return gaussian_sketch(residual(X, Phi), width, random(seed))


def from_gram(X: torch.Tensor, Phi: torch.Tensor, width: int, seed: int) -> torch.Tensor:
    return gaussian_sketch_of_gram(X.double() @ X.double().T, Phi, width, random(seed))


@pytest.mark.parametrize("draw", [plain, from_gram])
@pytest.mark.parametrize("r", [0, 4, 11, 12])
def test_columns_are_independent_and_normal_with_the_residuals_covariance(draw, r):
    X, Phi = inputs(), basis(r)
    outside = X - Phi @ (Phi.T @ X)
    covariance = outside @ outside.T
    Y = draw(X, Phi, MANY, seed=r)
    assert Y.shape == (D, MANY)
    scale = float(covariance.diagonal().max()) if r < D else float((X @ X.T).diagonal().max())
    # Each entry's estimate has a standard deviation of at most sqrt(2 / MANY) times the largest variance.
    assert_allclose(Y @ Y.T / MANY, covariance, atol=5 * (2 / MANY) ** 0.5 * scale)
    assert_allclose(Y.mean(dim=1), 0, atol=5 * (scale / MANY) ** 0.5)
    assert_allclose(Y[:, 1:] @ Y[:, :-1].T / MANY, 0, atol=5 * (2 / MANY) ** 0.5 * scale)
    assert_allclose(Phi.T @ Y, 0, atol=1e-10 * scale)
    for v in np.random.default_rng(r).standard_normal((5, D)) if r < D - 1 else ():
        along = torch.from_numpy(v)
        deviation = float(along @ covariance @ along) ** 0.5
        assert scipy.stats.kstest((along @ Y).numpy() / deviation, "norm").pvalue > 1e-3


def test_both_draws_have_one_law():
    X, Phi = inputs(), basis(4)
    one, other = plain(X, Phi, 4000, 1).numpy(), from_gram(X, Phi, 4000, 2).numpy()
    for v in np.random.default_rng(3).standard_normal((8, D)):
        # A linear and a quadratic form of the columns, the latter over pairs of them.
        assert scipy.stats.ks_2samp(v @ one, v @ other).pvalue > 1e-3
        products = [(v @ Y[:, ::2]) * (v @ Y[:, 1::2]) for Y in (one, other)]
        assert scipy.stats.ks_2samp(*products).pvalue > 1e-3


@pytest.mark.parametrize("width", [1, 3, 12, 400])
def test_both_draws_find_the_same_subspace(width):
    """The share of X*'s energy that the sketch's leading directions hold, over many sketches."""
    X, Phi = inputs(d=40, n=200), basis(10, d=40)
    outside = X - Phi @ (Phi.T @ X)
    rank = min(5, width)
    best = float((np.linalg.svd(outside, compute_uv=False)[:rank] ** 2).sum() / outside.norm() ** 2)
    shares = {}
    for draw in (plain, from_gram):
        bases = [principal(draw(X, Phi, width, seed))[0][:, :rank] for seed in range(60)]
        shares[draw] = [float((U.T @ outside).norm() ** 2 / outside.norm() ** 2) for U in bases]
        assert max(shares[draw]) <= best + 1e-12
    one, other = shares.values()
    error = (np.var(one) / 60 + np.var(other) / 60) ** 0.5
    assert abs(np.mean(one) - np.mean(other)) < 4 * error
    if width == 400:
        assert min(*one, *other) > 0.98 * best


def test_a_sketch_is_x_times_the_generators_draw():
    X = inputs(dtype=torch.float32)
    assert_allclose(gaussian_sketch(X, 7, random(5)), X @ torch.randn(N, 7, generator=random(5)), atol=1e-4)


def test_sketches_of_clients_add_up_to_a_sketch_of_all_their_inputs():
    X, Y, Phi = inputs(1), inputs(2), basis(3)
    total = plain(X, Phi, MANY, 1) + from_gram(Y, Phi, MANY, 2)
    outside = residual(torch.cat([X, Y], dim=1), Phi)
    covariance = outside @ outside.T
    assert_allclose(total @ total.T / MANY, covariance, atol=5 * (2 / MANY) ** 0.5 * float(covariance.diagonal().max()))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("scale", [1e-12, 1.0, 1e12])
def test_dependent_inputs_whose_gram_matrix_is_not_quite_semidefinite(dtype, scale):
    """Sums of float32 products have negative eigenvalues; a sketch stays near the inputs' span all the same."""
    d, rank = 300, 40
    X = scale * inputs(3, rank, 5000, dtype).abs()
    X = torch.rand(d, rank, generator=random(4), dtype=dtype) @ X
    gram = torch.zeros(d, d, dtype=torch.float64)
    for part in X.split(1000, dim=1):
        add_gram(gram, part)
    mirror(gram)
    Phi = basis(0, d, dtype)
    Y = gaussian_sketch_of_gram(gram, Phi, 500, random(0))
    assert Y.dtype == dtype
    span = torch.linalg.qr(X[:, :rank].double()).Q
    assert (residual(Y.double(), span).norm() / Y.norm()) ** 2 < 1e-4
    # The energy of 500 columns, of which the first direction has nearly all, varies by 6 %.
    assert abs(float(Y.norm() ** 2 / 500 / gram.trace()) - 1) < 0.3


def test_inputs_of_zero_and_a_single_column():
    Phi = basis(2)
    assert not gaussian_sketch_of_gram(torch.zeros(D, D, dtype=torch.float64), Phi, 4, random(0)).any()
    assert not gaussian_sketch(torch.zeros(D, N), 4, random(0)).any()
    assert gaussian_sketch(torch.zeros(D, 0), 4, random(0)).shape == (D, 4)
    x = inputs(n=1)
    Y = from_gram(x, Phi, 5, 0)
    along = residual(x, Phi) / residual(x, Phi).norm()
    assert_allclose(residual(Y, along), 0, atol=1e-3 * Y.norm())


def test_what_is_no_gram_matrix_is_refused():
    for gram in (torch.diag(torch.tensor([1.0, -1.0, 2.0])), torch.full((3, 3), torch.nan)):
        with pytest.raises(ValueError, match="semidefinite"):
            gaussian_sketch_of_gram(gram.double(), torch.zeros(3, 0), 2, random(0))
